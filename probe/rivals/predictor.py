"""Any model as a checked function of prompts.

A model is a `torch.nn.Module` or any other callable that takes inputs [batch, N+1, 2+p] and
returns one prediction per prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from models.tasks.linear_regression import Prompts

# Two calls may differ by rounding, never by this share of the spread of predictions.
_REPEAT = 1e-5
# Predictions with less spread than this share of their size are constant.
_CONSTANT = 1e-10
# What torch says, in several forms, where tensors of two dtypes meet.
_MISMATCH = re.compile(r"same dtype|scalar type|Input type .* should be the same", re.IGNORECASE)


class Predictor:
    """Calls a model and refuses what cannot be compared with anything.

    Every call gets inputs of its own, which the model may edit. Their dtype is that of a module's
    floating-point parameters if these share one; if they differ, the module's attribute `dtype`
    if it has one. In all other cases inputs stay in float64.

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
            self._dtype = _input_dtype(model)

    @torch.no_grad()
    def __call__(self, prompts: Prompts) -> Tensor:
        """Predictions in float64, [b]; may be NaN or infinite.

        Raises:
            ValueError: on another shape, device or kind of result, or where the model mixes dtypes.
        """
        try:
            result = self._model(prompts.inputs.to(self._dtype, copy=True))
        except RuntimeError as error:
            if not _MISMATCH.search(str(error)):
                raise
            raise ValueError(
                f"{self._dtypes()} was given {self._dtype} inputs and failed where two dtypes "
                f"meet ({error}); convert the inputs inside it, bring it to one dtype with "
                f"model.to(torch.float64), or give it the attribute `dtype` that inputs should have"
            ) from error
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
        # A copy: a model may hand out a buffer that its next call writes to.
        return predictions.to(torch.float64, copy=True)

    def _dtypes(self) -> str:
        """The model with the dtypes of its parameters, in words."""
        if not isinstance(self._model, nn.Module):
            return "the model"
        found = ", ".join(map(str, _floating_dtypes(self._model))) or "no dtype"
        return f"the model, with parameters of {found},"

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


def _floating_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Dtypes of the floating-point parameters, in their order."""
    return list(dict.fromkeys(p.dtype for p in module.parameters() if p.is_floating_point()))


def _input_dtype(module: nn.Module) -> torch.dtype:
    """The dtype to call a module with; the rule is that of `Predictor`."""
    dtypes = _floating_dtypes(module)
    if len(dtypes) == 1:
        return dtypes[0]
    own = getattr(module, "dtype", None) if dtypes else None
    return own if isinstance(own, torch.dtype) else torch.float64
