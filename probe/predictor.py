"""Any model as a checked function of prompts.

A model is a `LinearAttentionTransformer`, another `torch.nn.Module`, or any callable that
takes inputs [batch, N+1, 2+p] and returns one prediction per prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from models.prompts import Prompts

# Two calls may differ by rounding, never by this share of the spread of predictions.
_REPEAT = 1e-5
# Predictions with less spread than this share of their size are constant.
_CONSTANT = 1e-10


class Predictor:
    """Calls a model and refuses what cannot be compared with anything.

    Modules are called with inputs of their own dtype, other callables with float64.

    Args:
        model: what to call.

    Raises:
        TypeError: if it cannot be called.
        ValueError: if its parameters are not on the CPU.
    """

    def __init__(self, model: Callable[[Tensor], Tensor]):
        if not callable(model):
            raise TypeError(
                f"the model is a {type(model).__name__}, which cannot be called; give a "
                f"torch.nn.Module or a function from inputs [batch, N+1, 2+p] to [batch]"
            )
        self._model = model
        self._dtype = torch.float64
        if isinstance(model, nn.Module):
            for tensor in chain(model.parameters(), model.buffers()):
                if tensor.device.type != "cpu":
                    raise ValueError(
                        f"the model is on {tensor.device}, prompts are drawn on cpu; move it "
                        f"with model.to('cpu')"
                    )
            floating = (p.dtype for p in model.parameters() if p.is_floating_point())
            self._dtype = next(floating, torch.float64)

    @torch.no_grad()
    def __call__(self, prompts: Prompts) -> Tensor:
        """Predictions in float64, [b]; may be NaN or infinite.

        Raises:
            ValueError: on another shape, device or kind of result.
        """
        result = self._model(prompts.inputs.to(self._dtype))
        try:
            predictions = torch.as_tensor(result)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the model returned {type(result).__name__}; it must return one number per "
                f"prompt as a tensor [batch]"
            ) from error
        if predictions.shape != (len(prompts),):
            raise ValueError(
                f"predictions have shape {tuple(predictions.shape)}, expected "
                f"({len(prompts)},): one number per prompt; wrap the model so that it returns that"
            )
        if predictions.device.type != "cpu":
            raise ValueError(
                f"predictions are on {predictions.device}, prompts on cpu; end the model with "
                f".cpu()"
            )
        if predictions.is_complex():
            raise ValueError(f"predictions are {predictions.dtype}; they must be real numbers")
        return predictions.double()

    def checked(self, prompts: Prompts) -> Tensor:
        """Predictions that are finite, vary over prompts and repeat on a second call, [b].

        Raises:
            ValueError: naming what is wrong and what to do.
        """
        first = self(prompts)
        bad = ~first.isfinite()
        if bad.any():
            raise ValueError(
                f"predictions are NaN or infinite for {int(bad.sum())} of {len(prompts)} prompts, "
                f"first for prompt {int(bad.nonzero()[0, 0])}; check the weights, and that the "
                f"prompts are like those the model was trained on"
            )
        spread = float(first.std())
        if spread <= _CONSTANT * max(1.0, float(first.abs().max())):
            raise ValueError(
                f"predictions are constant ({float(first[0]):.6g} for every prompt), so that no "
                f"algorithm explains them better than another; check that the model reads its "
                f"inputs"
            )
        difference = float((self(prompts) - first).abs().max())
        if not difference <= _REPEAT * spread:
            raise ValueError(
                f"a second call on the same prompts differs by up to {difference:.3g} (spread of "
                f"predictions {spread:.3g}); the model must be deterministic: call model.eval(), "
                f"or fix its seed inside"
            )
        return first
