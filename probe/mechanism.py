"""Evidence from inside a model that the closed form is computed by its layer norms.

For one covariate this is `probe.division_test` and, with the residuals that the stream holds,
`probe.residual_division_test`. For several the closed form divides by several pivots;
`probe.pivot_test` exchanges each between prompts, and the pivot that explains a layer best counts.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from models.config import PromptConfig
from models.constructed import closed_form
from models.transformer import LinearAttentionTransformer
from probe.division import division_test, residual_division_test
from probe.linear import fit_probes
from probe.matching import align
from probe.pivots import pivot_label, pivot_test

DIVISION, SLOPE = "division R²", "division slope"
# The same with the residuals that the stream holds, and how much of the fit is left to divide.
RESIDUAL_DIVISION, RESIDUAL_SLOPE = "residual division R²", "residual division slope"
SHARE = "residual division share"
PROBE, ALIGNMENT, ALIGNMENT_P = "probe R² of", "functional alignment", "functional alignment, p"
_COLUMNS = ["measure", "condition", "value", "ci_low", "ci_high", "n_prompts"]
_PAIRS = 2000
_PROBE_PROMPTS = 4000


def division_evidence(
    model: Any, prompt_config: PromptConfig, generator: torch.Generator
) -> tuple[pd.DataFrame, str, str | None]:
    """Is the division by layer norm in force, layer by layer?

    Args:
        model: any model.
        prompt_config: distribution of the prompts.
        generator: source of prompts and resamples.

    Returns:
        DataFrame with columns measure (`DIVISION`, `SLOPE` and, for one covariate and the branch
        placement, their residual counterparts), condition (the layer), value, ci_low, ci_high,
        n_prompts; when the table is empty, why the test does not apply; and,
        for several covariates, the procedure that the pivots spell out (`probe.pivot_label`).
    """
    if not isinstance(model, LinearAttentionTransformer):
        kind = type(model).__name__
        reason = f"not applicable: a {kind} has no known sites"
        return pd.DataFrame(columns=_COLUMNS), reason, None
    if model.cfg.normalization == "none":
        reason = "not applicable: the model has no layer norm, so nothing in it divides"
        return pd.DataFrame(columns=_COLUMNS), reason, None
    procedure = None
    if prompt_config.n_covariates == 1:
        table = division_test(model, prompt_config, n_prompts=_PAIRS, generator=generator)
    else:
        table = pivot_test(model, prompt_config, n_prompts=_PAIRS, generator=generator)
        procedure = pivot_label(table)
        table = table.drop(columns=["ci_low", "ci_high", "r2", "slope"])
        swaps = ("swap_r2", "swap_r2_low", "swap_r2_high", "swap_slope")
        names = dict(zip(swaps, ("r2", "ci_low", "ci_high", "slope"), strict=True))
        table = table.rename(columns=names)
        table = table.loc[table.groupby("layer").r2.idxmax()]
    rows = _rows(table, {DIVISION: "r2", SLOPE: "slope"})
    if prompt_config.n_covariates == 1 and model.cfg.normalization == "branch":
        table = residual_division_test(model, prompt_config, n_prompts=_PAIRS, generator=generator)
        rows += _rows(table, {RESIDUAL_DIVISION: "r2", RESIDUAL_SLOPE: "slope", SHARE: "share"})
    return pd.DataFrame(rows).reindex(columns=_COLUMNS), "", procedure


def _rows(table: pd.DataFrame, measures: dict[str, str]) -> list[dict[str, Any]]:
    """Measures of a division test as evidence; R² has an interval."""
    rows = []
    for _, row in table.iterrows():
        layer = {"condition": f"layer {int(row.layer)}", "n_prompts": _PAIRS}
        for measure, column in measures.items():
            interval = {"ci_low": row.ci_low, "ci_high": row.ci_high} if column == "r2" else {}
            rows.append({"measure": measure, "value": row[column], **interval, **layer})
    return rows


def supporting_evidence(
    model: Any, prompt_config: PromptConfig, generator: torch.Generator
) -> pd.DataFrame:
    """What the verdict quotes but does not rest on; empty for models without layer norm.

    A linear probe for V in the divisor of each layer norm, at the query; and, for a model with
    as many layers as the construction, its functional alignment to it with a p-value.

    Returns:
        As `division_evidence`; alignments have no interval.
    """
    if not isinstance(model, LinearAttentionTransformer) or model.cfg.normalization == "none":
        return pd.DataFrame(columns=_COLUMNS)
    table = fit_probes(
        model,
        prompt_config,
        [name for name in model.hook_dict if name.endswith("hook_scale")],
        n_train=_PROBE_PROMPTS,
        n_test=_PROBE_PROMPTS,
        n_untrained=1,
        generator=generator,
    )
    table = table[table.statistic.str.startswith("x_var")]
    table = table.assign(measure=f"{PROBE} " + table.statistic, n_prompts=_PROBE_PROMPTS)
    probes = table.rename(columns={"site": "condition", "r2": "value"})[_COLUMNS]
    p = prompt_config.n_covariates
    if model.cfg.normalization != "branch" or model.cfg.n_layers != p + 1:
        return probes
    construction = closed_form(prompt_config.n_context, p)
    found = align(model, construction, level="functional", prompt_config=prompt_config)
    rows = [(ALIGNMENT, found.score), (ALIGNMENT_P, found.p_value)]
    aligned = pd.DataFrame(rows, columns=["measure", "value"]).assign(condition="construction")
    return pd.concat([probes, aligned.reindex(columns=_COLUMNS)], ignore_index=True)
