"""Adam for many small models at once, with an l1 penalty and a norm clip per model.

Shapes: M models, P parameters of one model; every array is [M, P]. Rows never
mix and every sum runs along one row, so a model's path does not depend on which
models stand beside it.

Two ways to apply the penalty λ‖w‖₁ (Adam step: w <- w - η m̂ / (√v̂ + ε)):

"subgradient": λ sign(w) joins the gradient before clipping, as if it were part of
the loss. Weights end near zero, oscillating at the size of the learning rate.

"proximal": the gradient of the loss alone moves m and v, then every weight is
soft-thresholded. The step divides by d = √(v̂ + λ²) + ε, so it minimises in the metric
diag(d), and the proximal map of λ‖w‖₁ *in that metric* has the threshold

    η λ / d,

not η λ. Only then are the resting points those of loss + λ‖w‖₁: w = 0 where
|∂loss| <= λ, and ∂loss = -λ sign(w) elsewhere (with ηλ the penalty would act on
the normalised gradient, as decoupled weight decay does). The λ² in d, which any metric
is free to have, holds the threshold below η: else a weight whose gradient is still
small, as in a head that has not been found yet, would be deleted at once. A clip that
scales the gradient by c scales λ by c as well, so that it shortens the step on
loss + penalty and does not strengthen the penalty. Zeros are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

L1Method = Literal["subgradient", "proximal"]

_EPS = 1e-8
# Moments of parameters whose gradient is exactly zero decay into subnormal numbers, on which
# arithmetic is a hundred times slower. They are cleared well before.
_NEGLIGIBLE = {np.dtype(np.float32): 1e-30, np.dtype(np.float64): 1e-290}
_CLEAR_EVERY = 100


def learning_rate(step: int, steps: int, peak: float, warmup: int, final_share: float) -> float:
    """Linear warm-up, then a cosine down to `final_share` of the peak.

    Args:
        step: 0-based number of the step.
        steps: length of the run.
        peak: the largest rate, reached at the end of the warm-up.
        warmup: steps of warm-up, cut to a tenth of the run.
        final_share: last rate over `peak`.
    """
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Adam:
    """Moments and rules of one ensemble; `weights` [M, P] are updated in place.

    Attributes:
        m: first moments, [M, P].
        v: second moments, [M, P].
        penalised: which of the P parameters the l1 penalty acts on, bool [P].
        betas: decay of the moments.
        clip: largest Euclidean norm of a model's gradient.
        method: see the module.
    """

    m: np.ndarray
    v: np.ndarray
    penalised: np.ndarray
    betas: tuple[float, float]
    clip: float
    method: L1Method

    def step(
        self, weights: np.ndarray, grads: np.ndarray, t: int, rate: float, l1: np.ndarray
    ) -> None:
        """Take step number `t` (1-based).

        Args:
            weights: [M, P], updated in place.
            grads: [M, P], gradient of the loss; overwritten.
            t: number of the step, for the bias correction.
            rate: η.
            l1: λ of each model at this step, [M].
        """
        dtype = weights.dtype
        beta1, beta2 = self.betas
        strength = l1.astype(dtype)[:, None] * self.penalised.astype(dtype)
        if self.method == "subgradient":
            grads += strength * np.sign(weights)
        # Squares in float64: a float32 gradient of 1e20 must be clipped, not overflow.
        norm = np.sqrt(np.square(grads, dtype=np.float64).sum(axis=1))
        shrink = (self.clip / np.maximum(norm, self.clip)).astype(dtype)[:, None]
        grads *= shrink

        self.m *= dtype.type(beta1)
        self.m += dtype.type(1 - beta1) * grads
        self.v *= dtype.type(beta2)
        grads *= grads
        grads *= dtype.type(1 - beta2)
        self.v += grads
        if t % _CLEAR_EVERY == 0:
            tiny = _NEGLIGIBLE[dtype]
            self.m[np.abs(self.m) < tiny] = 0
            self.v[self.v < tiny] = 0

        scale = self.v * dtype.type(1 / (1 - beta2**t))
        if self.method == "proximal":
            strength *= shrink
            scale += np.square(strength)
        np.sqrt(scale, out=scale)
        scale += dtype.type(_EPS)
        np.divide(dtype.type(rate), scale, out=scale)  # η / d
        weights -= dtype.type(1 / (1 - beta1**t)) * self.m * scale
        if self.method == "proximal":
            scale *= strength
            weights -= np.clip(weights, -scale, scale)
