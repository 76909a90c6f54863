"""Does layer norm divide by V in use?

The closed form needs C / V, and layer norm is the only part of the model that divides. Take
prompt A, put the layer-norm scale of an unrelated prompt B in its place, and if the scale
carries V the prediction moves as if A had B's variance:

    Δŷ = (C_A / V_B - C_A / V_A) (u_A - x̄_A).

A layer need not divide the samples as they came. An earlier layer may take a step of gradient
descent, x' = (1 - γ V)(x - x̄) and y' = y - ȳ - γ C (x - x̄), and least squares of what is left
is still least squares of the whole (`models.closed_form` with `gradient_steps` does so exactly).
The norm then divides by V' = var x', and the same test has to be made with the residuals that
the stream holds:

    Δŷ = (C'_A / V'_B - C'_A / V'_A) x'_A(u).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, site_with, sites_with
from models.tasks.linear_regression import Prompts
from models.tasks.task import Task
from probe.activations.collect import collect
from probe.causal.held import Reading, read_by_readout
from probe.causal.norm_scale import layer_divisors, require_norm, require_variances
from probe.stats.regression import Line, fit_line, require_samples

_ORDER = ["layer", "r2", "slope", "ci_low", "ci_high", "slope_low", "slope_high"]


@torch.no_grad()
def division_test(
    model: Studied,
    prompt_config: Task,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Swap layer-norm scales between unrelated prompts, layer by layer.

    What a layer divides by is replaced at all positions. The change of the prediction is
    regressed on the change above. A model that divides by V has R² and slope near 1; the slope is
    part of the answer, because R² does not see the size. The answer depends on how much V varies
    over `prompt_config`.

    Args:
        model: a model whose layers divide (have a site of the role "divisor"), one covariate.
        prompt_config: distribution of the prompts, usually the model's training distribution.
        n_prompts: number of pairs (A, B).
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with one row per layer: layer, r2 (squared correlation; 0 where the prediction
        does not change), slope, ci_low, ci_high (95 % bootstrap interval of r2 over pairs),
        slope_low, slope_high.

    Raises:
        ValueError: for a model without layer norm ("not applicable"), several covariates, or too
            few prompts.
    """
    require_samples(n_prompts)
    require_one_quotient(model, prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    a = prompt_config.sample(n_prompts, generator)
    b = prompt_config.sample(n_prompts, generator)
    expected = (a.xy_cov / b.x_var - a.slope) * (a.query[:, 0] - a.x_mean)
    before = model(a.inputs)
    rows = []
    for divisor in layer_divisors(model):
        change = _exchanged(model, a, b, divisor) - before
        line = fit_line(expected, change, generator, "the expected change")
        rows.append({"layer": divisor.layer, **dataclasses.asdict(line)})
    return pd.DataFrame(rows).loc[:, _ORDER]


@torch.no_grad()
def residual_division_test(
    model: Studied,
    prompt_config: Task,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """`division_test` with V and C of what the stream holds when it reaches the layer.

    x' is the linear reading of the stream that comes nearest to x - x̄ over tokens and prompts
    (fitted on prompts of its own), y' the reading of the readout, with its sign: the prediction is
    minus y' at the query. Only the last layer is read by the readout alone, so a division in an
    earlier one shows up less. For a model that leaves x alone, this is `division_test`.

    Args:
        model: a model whose layers divide what they add to the stream ("branch"), one covariate.
        prompt_config: distribution of the prompts, usually the model's training distribution.
        n_prompts: number of pairs (A, B).
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with the columns of `division_test`; share: slope of the part of the prediction
        that the division is expected to make, (C'/V') x'(u), on (C/V)(u - x̄), 1 if nothing was
        fitted before; step: γ in √(V'/V) ∝ 1 - γ V, 0 if x was not shrunk.

    Raises:
        ValueError: for a model without layer norm or with "post" placement ("not applicable"),
            several covariates, or too few prompts.
    """
    require_samples(n_prompts)
    require_residuals(model, prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    fitted, a, b = (prompt_config.sample(n_prompts, generator) for _ in range(3))
    before = model(a.inputs)
    y_read = read_by_readout(model, a)
    rows = []
    for divisor in layer_divisors(model):
        reading = Reading.fit(_stream(model, fitted, divisor), fitted, y_read)
        of_a, of_b = (reading(_stream(model, prompts, divisor)) for prompts in (a, b))
        variance, made = of_a.variance, of_a.fit
        expected = of_a.covariance / of_b.variance * of_a.at_query - made
        change = _exchanged(model, a, b, divisor) - before
        if not (variance.min() > 0 and expected.std() > 0):  # no x in the stream, or no y read
            line, share, step = Line(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 0.0
        else:
            line = fit_line(expected, change, generator, "the expected change")
            share, _ = np.polyfit(a.slope * (a.query[:, 0] - a.x_mean), made, 1)
            falls, start = np.polyfit(a.x_var, (variance / a.x_var).sqrt(), 1)
            step = -falls / start
        found = {"layer": divisor.layer, **dataclasses.asdict(line)}
        rows.append(found | {"share": share, "step": step})
    return pd.DataFrame(rows).loc[:, [*_ORDER, "share", "step"]]


@torch.no_grad()
def held_scale_points(
    model: Studied,
    prompt_config: Task,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Layer-norm scale at the query beside V', the variance of x as the stream holds it.

    Arguments and errors are those of `residual_division_test`.

    Returns:
        DataFrame with the columns of `probe.causal.norm_scale.scale_points`; statistic is
        "x_var_held".
    """
    require_residuals(model, prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    fitted, prompts = (prompt_config.sample(n_prompts, generator) for _ in range(2))
    frames = []
    y_read = read_by_readout(model, prompts)
    for divisor in layer_divisors(model):
        reading = Reading.fit(_stream(model, fitted, divisor), fitted, y_read)
        variance = reading(_stream(model, prompts, divisor)).variance
        scale = collect(model, prompts, divisor.name)[divisor.name].double()
        columns = {
            "layer": divisor.layer,
            "prompt": range(n_prompts),
            "statistic": "x_var_held",
            "variance": variance,
            "scale": scale[:, -1, 0] / scale.median(),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _exchanged(model: Studied, a: Prompts, b: Prompts, divisor: Site) -> Tensor:
    """Predictions for A under the layer-norm scale of B, [b]."""
    scale = collect(model, b, divisor.name)[divisor.name]
    return model.run(a, writes={divisor.name: scale})[0]


def _stream(model: Studied, prompts: Prompts, divisor: Site) -> Tensor:
    """The stream that reaches the layer of a divisor, [b, p, d]."""
    site = site_with(model, "stream in", divisor.layer).name
    return collect(model, prompts, site)[site]


def require_one_quotient(model: Studied, task: Task) -> None:
    """Refuse a model without layer norm, and a task without one variance to divide by.

    Raises:
        ValueError: saying why `division_test` is not applicable.
    """
    require_norm(model)
    require_variances(task)
    if task.n_covariates != 1:
        raise ValueError(
            f"division test not applicable to {task.n_covariates} covariates: with one "
            f"V there is one quotient; use n_covariates=1"
        )


def require_residuals(model: Studied, task: Task) -> None:
    """Refuse what `require_one_quotient` does, and a norm on the stream that is read.

    Raises:
        ValueError: saying why `residual_division_test` is not applicable.
    """
    require_norm(model)
    for divisor in layer_divisors(model):
        added = [site.name for site in sites_with(model, "added", divisor.layer)]
        order = list(model.sites)
        if any(order.index(name) < order.index(divisor.name) for name in added):
            raise ValueError(
                f"residual division test not applicable to normalization='post', a norm on the "
                f"whole stream (in layer {divisor.layer} {added[0]} comes before {divisor.name}): "
                f"the stream is rescaled before it is read; use 'branch'"
            )
    require_one_quotient(model, task)
