"""Whole sites replaced: by zero, by their mean, by another prompt's activation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import pandas as pd
import torch
from tqdm import tqdm

from models.architecture.sites import Studied
from models.tasks.task import Task, TaskPrompts
from probe.activations.collect import collect
from probe.activations.table import with_titles
from probe.causal.effect import Effect, edited
from probe.stats.regression import require_samples

Mode = Literal["zero", "mean", "resample"]


@torch.no_grad()
def ablate(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None = None,
    mode: Mode = "mean",
    *,
    reference: TaskPrompts | None = None,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Replace whole sites, one at a time, at all positions.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only (zero: nor a
            divisor).
        mode: "zero", "mean" (per position, over the reference prompts), or "resample" (the
            activation on a reference prompt drawn at random for each prompt).
        reference: prompts that "mean" and "resample" take activations from; by default
            `n_prompts` fresh ones of `prompt_config`.
        n_prompts: prompts to measure on.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with one row per site: site, mode, loss (mean squared error to the target),
        loss_ablated, effect (their difference), ci_low, ci_high, change (mean squared change of
        the prediction), change_low, change_high; 95 % bootstrap intervals over prompts.
        In units of the variance of the target; ``.attrs["titles"]`` has words for the sites.

    Raises:
        ValueError: on an unknown site or mode, too few prompts, zero at a divisor, or an edit
            that makes the prediction NaN or infinite.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; give one of {', '.join(get_args(Mode))}")
    require_samples(n_prompts)
    generator = generator or torch.Generator().manual_seed(0)
    names = model.select_sites(sites)
    divisors = [name for name in names if model.sites[name].role == "divisor"]
    if mode == "zero" and divisors:
        if sites is not None:
            raise ValueError(
                f"zero at {divisors[0]!r} would divide by zero; use mode='mean' or 'resample'"
            )
        names = [name for name in names if name not in divisors]
    prompts = prompt_config.sample(n_prompts, generator)
    given = prompt_config.sample(n_prompts, generator) if reference is None else reference
    donors = torch.randint(len(given), (n_prompts,), generator=generator)
    measure = Effect(model, prompts, generator)
    rows = []
    for site in tqdm(names, desc="ablating", unit="site", disable=None, leave=False):
        if mode == "zero":
            replacement = torch.zeros((), dtype=measure.before.dtype)
        else:
            donated = collect(model, given, site)[site]
            replacement = donated.mean(0) if mode == "mean" else donated[donors]
        after = edited(model, prompts, site, replacement.expand_as)
        rows.append({"site": site, "mode": mode, **measure(after)})
    return with_titles(pd.DataFrame(rows), model)
