"""Prompts moved off the distribution they were drawn from, in ways that tell algorithms apart."""

from __future__ import annotations

import torch
from torch import Tensor

from models.tasks.linear_regression import Prompts, prompts_from_arrays


def regression_shifts(base: Prompts, generator: torch.Generator) -> dict[str, Prompts]:
    """Prompts of linear regression under each shift, [batch] each, by name in words.

    Args:
        base: prompts in distribution.
        generator: source of noise and tails.
    """
    x, u = base.x, base.query
    slope = base.slope.reshape(len(base), -1)
    # One typical size of x, so that shifts mean the same for every distribution.
    size = base.x_var.mean().sqrt()

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    def follow(new_x: Tensor) -> Tensor:
        """y moved along the prompt's own line, so that it fits the new x."""
        return base.y + torch.einsum("bnp,bp->bn", new_x - x, slope)

    result = {}
    for factor, name in ((0.5, "x halved"), (2.0, "x doubled"), (4.0, "x times 4")):
        result[name] = prompts_from_arrays(factor * x, follow(factor * x), factor * u)
    shifted = x + 2 * size
    result["x shifted"] = prompts_from_arrays(shifted, follow(shifted), u + 2 * size)
    steep = base.y + 2 * torch.einsum("bnp,bp->bn", x, slope)
    result["slope times 3"] = prompts_from_arrays(x, steep, u)
    result["more noise"] = prompts_from_arrays(x, base.y + 0.5 * normal(base.y), u)
    # A normal over an independent chi of 3 degrees is Student's t.
    chi = torch.stack([normal(x) for _ in range(3)]).square().mean(0).sqrt()
    centre = x.mean(1, keepdim=True)
    heavy = centre + (x - centre) / chi
    result["heavy tails"] = prompts_from_arrays(heavy, follow(heavy), u)
    outlier = base.y.clone()
    outlier[:, 0] += 5 * base.y.std(1) * normal(base.y_mean).sign()
    result["outlier"] = prompts_from_arrays(x, outlier, u)
    return result
