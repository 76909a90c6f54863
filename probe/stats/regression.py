"""Lines fitted to prompts, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.moments import ROUNDING_STEPS

# Any line fits two points; of n unrelated ones it explains 1 / (n - 1), here a twentieth.
FEWEST_SAMPLES = 20


@dataclass(frozen=True)
class Line:
    """A fitted line with 95 % bootstrap intervals over samples.

    Attributes:
        slope: least-squares slope.
        slope_low: lower bound.
        slope_high: upper bound.
        r2: squared correlation, which is R² of the line; 0 where y does not vary at all.
        ci_low: lower bound of r2.
        ci_high: upper bound of r2.
    """

    slope: float
    slope_low: float
    slope_high: float
    r2: float
    ci_low: float
    ci_high: float


def fit_line(x: Tensor, y: Tensor, generator: torch.Generator, name: str = "the regressor") -> Line:
    """Regress y on x, both [n]; `name` says what x is, for the error.

    Raises:
        ValueError: on fewer than `FEWEST_SAMPLES` samples, or if x does not vary beyond rounding.
    """
    require_samples(len(x))
    x = x.double()
    rounding = ROUNDING_STEPS * torch.finfo(torch.float64).eps * x.abs().max()
    if not (x - x.mean()).abs().max() > rounding:
        raise ValueError(
            f"{name} does not vary over the {len(x)} prompt(s), so that nothing can be regressed "
            f"on it; use more prompts, or a distribution in which it varies"
        )
    once = slopes_and_r2(x[None], y, torch.ones(1, len(y), dtype=torch.float64))
    slopes, r2s = slopes_and_r2(x[None], y, resample_counts(len(y), generator))
    slope_low, slope_high = percentiles(slopes)
    ci_low, ci_high = percentiles(r2s)
    numbers = (once[0], slope_low, slope_high, once[1], ci_low, ci_high)
    return Line(*(float(number) for number in numbers))


def require_samples(n_prompts: int) -> None:
    """Refuse a regression over too few prompts, before any work.

    Raises:
        ValueError: below `FEWEST_SAMPLES`.
    """
    if n_prompts < FEWEST_SAMPLES:
        raise ValueError(
            f"n_prompts={n_prompts} is too few: R² over n prompts is about 1 / (n - 1) where "
            f"nothing is to be found; give at least {FEWEST_SAMPLES}"
        )


def slopes_and_r2(x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R² of lines of y [n] on each of several regressors [c, n], per resample.

    Args:
        x: regressors.
        y: what they explain.
        draws: how often each sample counts, [resamples, n].

    Returns:
        Slopes and squared correlations (0 where y does not vary), each [resamples, c].
    """
    x = x.double() - x.double().mean(1, keepdim=True)
    y = y.double() - y.double().mean()
    n = draws.sum(1, keepdim=True)
    sy, syy = (draws @ column[:, None] for column in (y, y * y))
    sx, sxx, sxy = (draws @ columns.T for columns in (x, x * x, x * y))
    xx, xy, yy = sxx - sx * sx / n, sxy - sx * sy / n, syy - sy * sy / n
    return xy / xx, torch.where(yy > 0, xy * xy / (xx * yy), 0.0)
