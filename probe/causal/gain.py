"""In what range of V is the prediction least squares? Gain on its fit, V from small to large.

Inside the model's own distribution an answer can be near least squares without any division
by V; outside it has to divide. So V is set by hand over decades, and the gain is the slope of
the prediction on (C/V)(u − x̄): 1 where the model predicts by least squares, more or less where
it divides by something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from models.tasks.config import PromptConfig
from models.tasks.linear_regression import sample_prompts
from probe.causal.spread import with_spread
from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.regression import slopes_and_r2

# Tolerances, in per cent, for which the range of V is told.
TOLERANCES = (5, 10)
_DECADES = 4


@torch.no_grad()
def gain_curve(
    model: Callable[[Tensor], Tensor],
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 3000,
    per_decade: int = 8,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Gain of the prediction on (C/V)(u − x̄) against V, over four decades.

    The same prompts are used at each V: x is scaled about x̄, and y moves along the prompt's
    line, so that slopes and noise are those of `prompt_config`.

    Args:
        model: a callable from inputs to predictions.
        prompt_config: distribution the model was trained on, one covariate; the median of V there
            is the middle of the curve.
        n_prompts: prompts at each V.
        per_decade: values of V in a decade.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns x_var, gain, gain_low, gain_high (95 % bootstrap interval over
        prompts), r2 (of the prediction less ȳ on the fit), error (mean squared error to least
        squares in units of the fit's variance). In `attrs`: x_var_median and x_var_central, the
        median and the central 90 % of V in `prompt_config`; range_5 and range_10, the
        ends in V of the stretch around the median in which the gain is within 5 and 10 % of 1
        (between rows linear in log V), None if it is not so at the median; words_5 and words_10,
        the same in words.

    Raises:
        ValueError: for several covariates, or fewer than 20 prompts or 1 value of V per decade.
    """
    if prompt_config.n_covariates != 1:
        raise ValueError(
            f"gain curve not applicable to {prompt_config.n_covariates} covariates: it is drawn "
            f"against one V; use n_covariates=1"
        )
    if n_prompts < 20 or per_decade < 1:
        raise ValueError(
            f"n_prompts={n_prompts}, per_decade={per_decade}: an interval needs at least 20 "
            f"prompts, and a curve 1 value of V per decade"
        )
    generator = generator or torch.Generator().manual_seed(0)
    base = sample_prompts(prompt_config, n_prompts, generator)
    draws = resample_counts(n_prompts, generator)
    once = torch.ones(1, n_prompts, dtype=torch.float64)
    median = float(base.x_var.median())
    steps = _DECADES * per_decade // 2
    rows = []
    for k in range(-steps, steps + 1):
        x_var = median * 10 ** (k / per_decade)
        prompts = with_spread(base, (x_var / base.x_var).sqrt(), follow=True)
        fit = prompts.target - prompts.y_mean
        prediction = model(prompts.inputs).double()
        made = prediction - prompts.y_mean
        gain, r2 = slopes_and_r2(fit[None], made, once)
        low, high = percentiles(slopes_and_r2(fit[None], made, draws)[0])
        error = (prediction - prompts.target).square().mean() / fit.var(correction=0)
        numbers = map(float, (gain, low, high, r2, error))
        rows.append((x_var, *numbers))
    columns = ["x_var", "gain", "gain_low", "gain_high", "r2", "error"]
    table = pd.DataFrame(rows, columns=columns)
    ends = base.x_var.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    table.attrs |= {"x_var_median": median, "x_var_central": tuple(ends)}
    for tolerance in TOLERANCES:
        found = _range(table, steps, tolerance / 100)
        table.attrs |= {f"range_{tolerance}": found, f"words_{tolerance}": _in_words(table, found)}
    return table


def _range(table: pd.DataFrame, middle: int, tolerance: float) -> tuple[float, float] | None:
    """Ends in V of the stretch around a row where the gain is near 1, None if it is not there.

    Between rows the gain is taken as linear in log V.
    """
    away = (table["gain"] - 1).abs().to_numpy() - tolerance
    signed = (table["gain"] - 1).to_numpy()
    log = np.log(table["x_var"].to_numpy())
    if away[middle] > 0:
        return None
    ends = []
    for step, edge in ((-1, 0), (1, len(table) - 1)):
        row = middle
        while row != edge and away[row + step] <= 0:
            row += step
        end = log[row]
        if row != edge:
            beyond = row + step
            crossed = np.copysign(tolerance, signed[beyond])
            share = (crossed - signed[row]) / (signed[beyond] - signed[row])
            end += share * (log[beyond] - log[row])
        ends.append(math.exp(end))
    return ends[0], ends[1]


def _in_words(table: pd.DataFrame, found: tuple[float, float] | None) -> str:
    """Such as "V from .25 to 4"; an end that the curve does not reach is "or less", "or more"."""
    if found is None:
        return f"not at V = {_short(table.attrs['x_var_median'])}, where it was trained"
    low, high = found
    below = " or less" if math.isclose(low, table["x_var"].iloc[0]) else ""
    above = " or more" if math.isclose(high, table["x_var"].iloc[-1]) else ""
    return f"V from {_short(low)}{below} to {_short(high)}{above}"


def _short(value: float) -> str:
    """Two digits without a leading zero: .25, 4, 79."""
    digits = max(0, 1 - math.floor(math.log10(value)))
    text = f"{value:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.removeprefix("0") if text.startswith("0.") else text
