"""What the stream still holds of x and y when a divisor is reached, and how it is read there.

Earlier layers may have taken x to x' = (1 − γ V)(x − x̄) and y to what is left to be fitted, y'.
x' is the linear reading of the stream that comes nearest to x − x̄ over context tokens and
prompts; y' is what the read-out would take from the stream, with the opposite sign, since the
prediction is minus y' at the query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, sites_with
from models.tasks.linear_regression import Prompts
from probe.stats.moments import Moments


@dataclass(frozen=True)
class Held:
    """Statistics of x' and y', each [b].

    Attributes:
        variance: V'.
        covariance: C'.
        at_query: x' at the query.
    """

    variance: Tensor
    covariance: Tensor
    at_query: Tensor

    @property
    def fit(self) -> Tensor:
        """(C'/V') x'(u), what least squares of the residuals predicts."""
        return self.covariance / self.variance * self.at_query


@dataclass(frozen=True)
class Reading:
    """Directions of the stream that read x' and y', [d] each."""

    x: Tensor
    y: Tensor

    @classmethod
    def fit(cls, stream: Tensor, prompts: Prompts, y: Tensor) -> Reading:
        """Read x' from a stream [b, p, d] by regression over the context tokens of `prompts`."""
        centred = prompts.x[..., 0] - prompts.x_mean[:, None]
        context = stream[:, :-1].flatten(0, 1)
        line = Moments().update(context[None], centred.flatten()[:, None]).ridge()
        return cls(line.weights[0, :, 0], y)

    def __call__(self, stream: Tensor) -> Held:
        """Statistics of what a stream [b, p, d] holds."""
        x, y = stream.double() @ self.x, stream.double() @ self.y
        x = x - x[:, :-1].mean(1, keepdim=True)
        context = x[:, :-1]
        return Held(context.square().mean(1), (context * y[:, :-1]).mean(1), x[:, -1])


def read_by_readout(model: Studied, prompts: Prompts) -> Tensor:
    """Direction that reads y' from the last stream: minus the prediction's gradient, [d].

    The gradient is that at the query: for a linear read-out the same in every prompt, otherwise
    the median over `prompts`. Zero where the prediction is made beside the stream.

    Raises:
        ValueError: if the model shows no stream after its blocks.
    """
    streams: tuple[Site, ...] = sites_with(model, "stream out")
    if not streams:
        raise ValueError("not applicable: the model has no site of the role 'stream out'")
    leaves: list[Tensor] = []

    def cut(stream: Tensor) -> Tensor:
        leaves.append(stream.detach().requires_grad_())
        return leaves[0]

    with torch.enable_grad():
        prediction, _ = model.run(prompts, writes={streams[-1].name: cut})
        if not prediction.requires_grad:
            return leaves[0].new_zeros(leaves[0].shape[-1], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(
            prediction.sum(), leaves, allow_unused=True, materialize_grads=True
        )
    return -gradient[:, -1].double().median(0).values
