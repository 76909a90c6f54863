"""Prompts whose x lie closer together, or further apart, about their mean."""

from __future__ import annotations

from torch import Tensor

from models.tasks.linear_regression import Prompts, prompts_from_arrays


def with_spread(prompts: Prompts, factor: float | Tensor, *, follow: bool = False) -> Prompts:
    """Prompts edited by x_n → x̄ + a (x_n − x̄) and u → x̄ + a (u − x̄).

    V becomes a² V. With y as it was, least squares at the query stays the same: its slope falls
    as 1 / a. With `follow` the slope stays the same and the prediction moves.

    Args:
        prompts: of one covariate.
        factor: a, one for all prompts or one each, [b].
        follow: move y along the prompt's own least-squares line.
    """
    mean = prompts.x_mean[:, None, None]
    stretch = factor.reshape(-1, 1, 1) if isinstance(factor, Tensor) else factor
    x = mean + stretch * (prompts.x - mean)
    query = mean[:, 0] + (stretch * (prompts.query[:, None] - mean))[:, 0]
    y = prompts.y
    if follow:
        y = y + prompts.slope[:, None] * (x - prompts.x)[..., 0]
    return prompts_from_arrays(x, y, query)
