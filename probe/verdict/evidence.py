"""What the verdict quotes but does not rest on, from inside a model."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from models.architecture.sites import Studied, sites_with
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from probe.causal.mechanism_test import EVIDENCE_COLUMNS
from probe.matching.alignment import align
from probe.matching.construction_family import has_construction_steps
from probe.probing.linear import fit_probes
from probe.symmetry.weights import has_plain_forward

PROBE, ALIGNMENT, ALIGNMENT_P = "probe R² of", "functional alignment", "functional alignment, p"
_PROBE_PROMPTS = 4000


def supporting_evidence(
    model: Any, prompt_config: PromptConfig, generator: torch.Generator
) -> pd.DataFrame:
    """Probes and alignment; empty for models that divide nowhere.

    A linear probe for V in each divisor, at the query; and, for a model with as many layers as the
    construction and its forward pass, its functional alignment to it with a p-value.

    Returns:
        DataFrame with columns measure, condition (the site), value, ci_low, ci_high, n_prompts;
        alignments have no interval.
    """
    divisors = sites_with(model, "divisor") if isinstance(model, Studied) else ()
    if not divisors:
        return pd.DataFrame(columns=EVIDENCE_COLUMNS)
    table = fit_probes(
        model,
        prompt_config,
        [site.name for site in divisors],
        n_train=_PROBE_PROMPTS,
        n_test=_PROBE_PROMPTS,
        n_untrained=1,
        generator=generator,
    )
    variances = [one.name for one in prompt_config.statistics if one.family == "x_var"]
    table = table.loc[table.statistic.isin(variances)]
    table = table.assign(measure=f"{PROBE} " + table.statistic, n_prompts=_PROBE_PROMPTS)
    table = table.rename(columns={"site": "condition", "r2": "value"})
    probes = table.loc[:, EVIDENCE_COLUMNS]
    if not (has_plain_forward(model) and has_construction_steps(model.cfg)):
        return probes
    construction = closed_form(prompt_config.n_context, prompt_config.n_covariates)
    found = align(model, construction, level="functional", prompt_config=prompt_config)
    rows = [(ALIGNMENT, found.score), (ALIGNMENT_P, found.p_value)]
    aligned = pd.DataFrame(rows, columns=["measure", "value"]).assign(condition="construction")
    return pd.concat([probes, aligned.reindex(columns=EVIDENCE_COLUMNS)], ignore_index=True)
