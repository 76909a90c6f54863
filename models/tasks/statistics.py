"""The sufficient statistics of linear regression: what probes look for and interventions write.

A statistic is a number per prompt with a symbol, and with its *counterfactual*: what the target
would be on prompt A if this statistic alone were that of prompt B. Least squares is
``ȳ + slope · (u - x̄)`` with slope = Σ_xx⁻¹ Σ_xy; taking x_mean, x_var or xy_cov from B leaves the
other moments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.tasks.linear_regression import Prompts

# Covariate numbers as subscripts.
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Statistic:
    """A named number of a prompt.

    Attributes:
        name: unique in its task.
        symbol: for figures and words.
        value: of a batch of prompts, [batch].
        counterfactual: target on A with this statistic taken from B, [batch]; None where it
            cannot change alone.
        family: name it shares with the same statistic of other covariates.
        refusal: why there is no counterfactual.
    """

    name: str
    symbol: str
    # Each task has prompts of its own class.
    value: Callable[[Any], Tensor]
    counterfactual: Callable[[Any, Any], Tensor] | None
    family: str
    refusal: str = ""

    def swapped(self, a: Any, b: Any) -> Tensor:
        """Target on A with this statistic taken from B, [batch].

        Raises:
            ValueError: if the statistic cannot change alone; says why.
        """
        if self.counterfactual is None:
            raise ValueError(f"{self.name}: {self.refusal}")
        return self.counterfactual(a, b)


def regression_statistics(n_covariates: int) -> tuple[Statistic, ...]:
    """Statistics of prompts with p covariates: x̄, ȳ, V, C, the slopes and the prediction.

    With p > 1 covariates the vector-valued ones have a component per covariate, ``x_mean_1`` ..
    ``x_mean_p``.
    """
    statistics: list[Statistic] = []
    for family, symbol in (
        ("x_mean", "x̄"),
        ("y_mean", "ȳ"),
        ("x_var", "V"),
        ("xy_cov", "C"),
        ("slope", "C/V"),
        ("least_squares", "ŷ"),
    ):
        if family in ("y_mean", "least_squares"):
            statistics.append(_of_prompt(family, symbol))
        else:
            statistics += [
                _of_covariate(family, symbol, j, n_covariates) for j in range(n_covariates)
            ]
    return tuple(statistics)


def _of_prompt(family: str, symbol: str) -> Statistic:
    def value(prompts: Prompts) -> Tensor:
        return getattr(prompts, family)

    def swapped(a: Prompts, b: Prompts) -> Tensor:
        if family == "y_mean":
            return a.least_squares + b.y_mean - a.y_mean
        return b.least_squares

    return Statistic(family, symbol, value, swapped, family)


def _of_covariate(family: str, symbol: str, j: int, p: int) -> Statistic:
    """Component j of a statistic that exists per covariate."""

    def value(prompts: Prompts) -> Tensor:
        return getattr(prompts, family).reshape(len(prompts), -1)[:, j]

    swapped = {"x_mean": _x_mean, "slope": _slope, "xy_cov": _xy_cov, "x_var": _x_var}[family]

    def counterfactual(a: Prompts, b: Prompts) -> Tensor:
        return swapped(a, value(a), value(b), j)

    if p == 1:
        return Statistic(family, symbol, value, counterfactual, family)
    # C/V has no symbol per covariate; b is the vector of least-squares slopes.
    symbol = ("b" if family == "slope" else symbol) + str(j + 1).translate(_SUBSCRIPTS)
    name = f"{family}_{j + 1}"
    if family == "x_var":
        refusal = (
            f"one variance of {p} covariates cannot change alone; "
            f"choose a mean, covariance or slope"
        )
        return Statistic(name, symbol, value, None, family, refusal)
    return Statistic(name, symbol, value, counterfactual, family)


def _centred_query(a: Prompts) -> Tensor:
    """u - x̄, [b, p]."""
    return a.query - a.x_mean.reshape(len(a), -1)


def _x_mean(a: Prompts, of_a: Tensor, of_b: Tensor, j: int) -> Tensor:
    return a.least_squares - a.slope.reshape(len(a), -1)[:, j] * (of_b - of_a)


def _slope(a: Prompts, of_a: Tensor, of_b: Tensor, j: int) -> Tensor:
    return a.least_squares + (of_b - of_a) * _centred_query(a)[:, j]


def _xy_cov(a: Prompts, of_a: Tensor, of_b: Tensor, j: int) -> Tensor:
    slope = a.slope.reshape(len(a), -1)
    unit = torch.eye(slope.shape[1], dtype=slope.dtype)[j].expand_as(slope)
    moved = torch.linalg.solve(a.x_cov, unit) * (of_b - of_a)[:, None]
    return a.least_squares + (moved * _centred_query(a)).sum(1)


def _x_var(a: Prompts, of_a: Tensor, of_b: Tensor, j: int) -> Tensor:
    return a.least_squares + (a.xy_cov / of_b - a.slope) * _centred_query(a)[:, 0]
