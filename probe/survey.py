"""One row per model: what many models are compared by.

Error, sparsity, probes, division test and alignment with the construction, each measured as
its own module says. What does not apply to a model is missing (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from models.checkpoint import CheckpointError, available, checkpoint_folder, provenance
from models.config import PromptConfig
from models.training import DISTRIBUTIONS, normalised_mse
from models.transformer import LinearAttentionTransformer
from probe.division import division_test, residual_division_test
from probe.linear import fit_probes
from probe.matching import align
from probe.nearest import ConstructionFamily
from probe.plots import strongest_control
from probe.sparsity import active_heads, exact_zeros
from probe.subject import ZOO, Subject, load_subject


@dataclass(frozen=True)
class Trained:
    """A trained model and how it was trained.

    Attributes:
        subject: the model, its prompts, its hash.
        distribution: name of the prompt distribution, "other" for one without a name.
        l1: penalty weight.
        seed: of training.
        record: contents of training.json.
    """

    subject: Subject
    distribution: str
    l1: float
    seed: int
    record: dict[str, Any]

    @classmethod
    def load(cls, checkpoint: str | Path) -> Trained:
        """Load a checkpoint that `models.train` wrote.

        Raises:
            CheckpointError: if it cannot be loaded, or does not record l1 and seed.
        """
        subject, record = load_subject(checkpoint), provenance(checkpoint)
        if not {"l1", "seed"} <= record.keys():
            raise CheckpointError(
                f"{checkpoint}: its training.json has no l1 and seed; give checkpoints that "
                f"models.train wrote"
            )
        label = distribution_label(subject.prompts)
        return cls(subject, label, float(record["l1"]), int(record["seed"]), record)


def trained_zoo(folder: str = ZOO) -> list[Trained]:
    """All checkpoints that were trained with one covariate, by distribution and l1.

    Args:
        folder: a folder of checkpoint folders, as `models.train` writes; "zoo" for the
            shipped ones.

    Raises:
        CheckpointError: if there is none.
    """
    if folder == ZOO:
        checkpoints = [checkpoint_folder(name) for name in available()]
    else:
        checkpoints = sorted(path.parent for path in Path(folder).glob("*/config.json"))
    zoo = [Trained.load(path) for path in checkpoints if {"l1", "seed"} <= provenance(path).keys()]
    zoo = [each for each in zoo if each.subject.prompts.n_covariates == 1]
    if not zoo:
        raise CheckpointError(
            f"{folder!r} holds no trained checkpoint of one covariate; give a folder that "
            f"models.train wrote, or {ZOO!r}"
        )
    order = [*DISTRIBUTIONS, "other"]
    return sorted(zoo, key=lambda each: (order.index(each.distribution), each.l1, each.seed))


def distribution_label(prompts: PromptConfig) -> str:
    """Name of a prompt distribution in `models.training.DISTRIBUTIONS`, or "other"."""
    return next((name for name, known in DISTRIBUTIONS.items() if known == prompts), "other")


def survey(models: Iterable[Trained], *, n_prompts: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Measure trained models, one row each.

    Args:
        models: what to measure.
        n_prompts: prompts of the division test; probes are fitted and scored on twice as many.
        seed: every model sees the same prompts of its distribution.

    Returns:
        DataFrame with columns name, distribution, l1, seed, normalised_mse, parameters,
        exact_zeros, zero_share, active_heads, active_heads_0 .., probe_V (R² of V from the norm
        scales, the best layer), probe_V_control (its strongest control), probe_C and
        probe_C_control (C from the head states), division_layer, division_r2, division_low,
        division_high, division_slope, the same with residual_ and residual_share, residual_step
        (`residual_division_test`), alignment (functional, with the nearest construction),
        alignment_p.
    """
    return pd.DataFrame([_row(each, n_prompts, seed) for each in models])


def _row(trained: Trained, n_prompts: int, seed: int) -> dict[str, object]:
    model, prompts = trained.subject.model, trained.subject.prompts
    generator = torch.Generator().manual_seed(seed)
    zeros, heads = exact_zeros(model), active_heads(model)
    return {
        "name": trained.subject.name,
        "distribution": trained.distribution,
        "l1": trained.l1,
        "seed": trained.seed,
        "normalised_mse": normalised_mse(model, prompts),
        "parameters": model.cfg.n_parameters,
        "exact_zeros": zeros,
        "zero_share": zeros / model.cfg.n_parameters,
        "active_heads": sum(heads),
        **{f"active_heads_{layer}": n for layer, n in enumerate(heads)},
        **_probes(model, prompts, 2 * n_prompts, generator),
        **_division(model, prompts, n_prompts, generator),
        **_alignment(model, prompts, seed),
    }


def _probes(
    model: LinearAttentionTransformer, prompts: PromptConfig, n: int, generator: torch.Generator
) -> dict[str, float]:
    wanted = {"V": ("ln1_post.hook_scale", "x_var"), "C": ("attn.hook_state", "xy_cov")}
    endings = tuple(site for site, _ in wanted.values())
    sites = [name for name in model.hook_dict if name.endswith(endings)]
    table = fit_probes(
        model, prompts, sites, n_train=n, n_test=n, n_untrained=1, generator=generator
    )
    table = table.assign(control=strongest_control(table))
    found = {}
    for symbol, (site, statistic) in wanted.items():
        here = table[table.site.str.endswith(site) & table.statistic.str.startswith(statistic)]
        best = here.loc[here.r2.idxmax()] if here.r2.notna().any() else None
        found[f"probe_{symbol}"] = math.nan if best is None else best.r2
        found[f"probe_{symbol}_control"] = math.nan if best is None else best.control
    return found


def _division(
    model: LinearAttentionTransformer, prompts: PromptConfig, n: int, generator: torch.Generator
) -> dict[str, float]:
    if model.cfg.normalization == "none" or prompts.n_covariates > 1:
        return {}
    found = {}
    tests = {"division": division_test}
    if model.cfg.normalization == "branch":
        tests["residual"] = residual_division_test
    for name, test in tests.items():
        table = test(model, prompts, n_prompts=n, generator=generator)
        best = table.loc[table.r2.idxmax()]
        found |= {
            f"{name}_layer": int(best.layer),
            f"{name}_r2": best.r2,
            f"{name}_low": best.ci_low,
            f"{name}_high": best.ci_high,
            f"{name}_slope": best.slope,
        }
        if name == "residual":
            found |= {"residual_share": best["share"], "residual_step": best["step"]}
    return found


def _alignment(
    model: LinearAttentionTransformer, prompts: PromptConfig, seed: int
) -> dict[str, float]:
    if not has_construction(model):
        return {}
    family = ConstructionFamily.for_model(model.cfg)
    alignment = align(model, family, "functional", prompt_config=prompts, seed=seed)
    return {"alignment": alignment.score, "alignment_p": alignment.p_value}


def has_construction(model: LinearAttentionTransformer) -> bool:
    """Whether the closed-form construction has this model's size and placement of the norm."""
    config = model.cfg
    p = config.n_covariates
    size = (config.d_model, config.n_layers) == (p + 3, p + 1)
    return size and config.normalization == "branch" and not config.norm_affine
