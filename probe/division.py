"""Does layer norm divide by V in use?

The closed form needs C / V, and layer norm is the only part of the model that divides. Take
prompt A, put the layer-norm scale of an unrelated prompt B in its place, and if the scale
carries V the prediction moves as if A had B's variance:

    Δŷ = (C_A / V_B - C_A / V_A) (u_A - x̄_A).
"""

from __future__ import annotations

import dataclasses

import pandas as pd
import torch

from models.config import PromptConfig
from models.prompts import sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import collect
from probe.moments import fit_line
from probe.norms import require_norm


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
    if prompt_config.n_covariates != 1:
        raise ValueError(
            f"division test not applicable to {prompt_config.n_covariates} covariates: with one "
            f"V there is one quotient; use n_covariates=1"
        )
    generator = generator or torch.Generator().manual_seed(0)
    a = sample_prompts(prompt_config, n_prompts, generator)
    b = sample_prompts(prompt_config, n_prompts, generator)
    expected = (a.xy_cov / b.x_var - a.slope) * (a.query[:, 0] - a.x_mean)
    before = model(a.inputs)
    rows = []
    for layer in range(model.cfg.n_layers):
        site = f"blocks.{layer}.ln1_post.hook_scale"
        scale = collect(model, b.inputs, site)[site]
        after = model.run_with_hooks(
            a.inputs, fwd_hooks=[(site, lambda _, hook, scale=scale: scale)]
        )
        line = fit_line(expected, after - before, generator, "the expected change")
        rows.append({"layer": layer, **dataclasses.asdict(line)})
    order = ["layer", "r2", "slope", "ci_low", "ci_high", "slope_low", "slope_high"]
    return pd.DataFrame(rows)[order]
