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

from models.config import PromptConfig
from models.prompts import Prompts, sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import collect
from probe.moments import Line, Moments, fit_line
from probe.norms import require_norm

_ORDER = ["layer", "r2", "slope", "ci_low", "ci_high", "slope_low", "slope_high"]


@torch.no_grad()
def division_test(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Swap layer-norm scales between unrelated prompts, layer by layer.

    `hook_scale` is replaced at all positions. The change of the prediction is regressed on the
    change above. A model that divides by V has R² and slope near 1; the slope is part of the
    answer, because R² does not see the size. The answer depends on how much V varies over
    `prompt_config`.

    Args:
        model: a model with layer norm ("branch" or "post"), one covariate.
        prompt_config: distribution of the prompts, usually the model's training distribution.
        n_prompts: number of pairs (A, B).
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with one row per layer: layer, r2 (squared correlation; 0 where the prediction
        does not change), slope, ci_low, ci_high (95 % bootstrap interval of r2 over pairs),
        slope_low, slope_high.

    Raises:
        ValueError: for a model without layer norm ("not applicable") or several covariates.
    """
    require_norm(model)
    _require_one_covariate(prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    a = sample_prompts(prompt_config, n_prompts, generator)
    b = sample_prompts(prompt_config, n_prompts, generator)
    expected = (a.xy_cov / b.x_var - a.slope) * (a.query[:, 0] - a.x_mean)
    before = model(a.inputs)
    rows = []
    for layer in range(model.cfg.n_layers):
        change = _exchanged(model, a, b, layer) - before
        line = fit_line(expected, change, generator, "the expected change")
        rows.append({"layer": layer, **dataclasses.asdict(line)})
    return pd.DataFrame(rows)[_ORDER]


@torch.no_grad()
def residual_division_test(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
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
        model: a "branch" model, one covariate.
        prompt_config: distribution of the prompts, usually the model's training distribution.
        n_prompts: number of pairs (A, B).
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with the columns of `division_test`; share: slope of the part of the prediction
        that the division is expected to make, (C'/V') x'(u), on (C/V)(u - x̄), 1 if nothing was
        fitted before; step: γ in √(V'/V) ∝ 1 - γ V, 0 if x was not shrunk.

    Raises:
        ValueError: for a model without layer norm or with "post" placement ("not applicable"), or
            several covariates.
    """
    _require_residuals(model, prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    fitted, a, b = (sample_prompts(prompt_config, n_prompts, generator) for _ in range(3))
    before = model(a.inputs)
    rows = []
    for layer in range(model.cfg.n_layers):
        site = f"blocks.{layer}.hook_resid_pre"
        reading = _reading(model, fitted, site)
        held = [_held(model, prompts, site, reading) for prompts in (a, b)]
        (at_query, variance, covariance), (_, other, _) = held
        made = covariance / variance * at_query
        expected = covariance / other * at_query - made
        change = _exchanged(model, a, b, layer) - before
        if not (variance.min() > 0 and expected.std() > 0):  # no x in the stream, or no y read
            line, share, step = Line(0, 0, 0, 0, 0, 0), 0.0, 0.0
        else:
            line = fit_line(expected, change, generator, "the expected change")
            share, _ = np.polyfit(a.slope * (a.query[:, 0] - a.x_mean), made, 1)
            falls, start = np.polyfit(a.x_var, (variance / a.x_var).sqrt(), 1)
            step = -falls / start
        rows.append({"layer": layer, **dataclasses.asdict(line), "share": share, "step": step})
    return pd.DataFrame(rows)[[*_ORDER, "share", "step"]]


@torch.no_grad()
def held_scale_points(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Layer-norm scale at the query beside V', the variance of x as the stream holds it.

    Arguments and errors are those of `residual_division_test`.

    Returns:
        DataFrame with the columns of `probe.norms.scale_points`; statistic is "x_var_held".
    """
    _require_residuals(model, prompt_config)
    generator = generator or torch.Generator().manual_seed(0)
    fitted, prompts = (sample_prompts(prompt_config, n_prompts, generator) for _ in range(2))
    frames = []
    for layer in range(model.cfg.n_layers):
        site, norm = f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.ln1_post.hook_scale"
        _, variance, _ = _held(model, prompts, site, _reading(model, fitted, site))
        scale = collect(model, prompts.inputs, norm)[norm].double()
        columns = {
            "layer": layer,
            "prompt": range(n_prompts),
            "statistic": "x_var_held",
            "variance": variance,
            "scale": scale[:, -1, 0] / scale.median(),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _exchanged(
    model: LinearAttentionTransformer, a: Prompts, b: Prompts, layer: int
) -> torch.Tensor:
    """Predictions for A under the layer-norm scale of B, [b]."""
    site = f"blocks.{layer}.ln1_post.hook_scale"
    scale = collect(model, b.inputs, site)[site]
    return model.run_with_hooks(a.inputs, fwd_hooks=[(site, lambda _, hook: scale)])


def _reading(model: LinearAttentionTransformer, prompts: Prompts, site: str) -> torch.Tensor:
    """Direction of the stream that reads x - x̄ best over context tokens, [d]."""
    centred = prompts.x[..., 0] - prompts.x_mean[:, None]
    stream = collect(model, prompts.inputs, site)[site][:, :-1].flatten(0, 1)
    return Moments().update(stream[None], centred.flatten()[:, None]).ridge().weights[0, :, 0]


def _held(
    model: LinearAttentionTransformer, prompts: Prompts, site: str, reading: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x' at the query, V' and C' of the residuals in the stream, [b] each."""
    stream = collect(model, prompts.inputs, site)[site].double()
    x, y = stream @ reading, -stream @ model.unembed.W_U[-1].double()
    x = x - x[:, :-1].mean(1, keepdim=True)
    variance = x[:, :-1].square().mean(1)
    covariance = (x[:, :-1] * y[:, :-1]).mean(1)
    return x[:, -1], variance, covariance


def _require_residuals(model: LinearAttentionTransformer, prompt_config: PromptConfig) -> None:
    require_norm(model)
    if model.cfg.normalization != "branch":
        raise ValueError(
            f"residual division test not applicable to normalization="
            f"{model.cfg.normalization!r}: the stream is rescaled before it is read; use 'branch'"
        )
    _require_one_covariate(prompt_config)


def _require_one_covariate(prompt_config: PromptConfig) -> None:
    if prompt_config.n_covariates != 1:
        raise ValueError(
            f"division test not applicable to {prompt_config.n_covariates} covariates: with one "
            f"V there is one quotient; use n_covariates=1"
        )
