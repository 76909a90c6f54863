"""One row per model: what many models are compared by.

Error, sparsity, probes, division test and alignment with the construction, each measured as
its own module says. What does not apply to a model is missing (NaN).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from models.architecture.sites import sites_with
from models.architecture.transformer import LinearAttentionTransformer
from models.checkpoint import (
    SHIPPED,
    CheckpointError,
    available,
    holds_checkpoint,
    provenance,
)
from models.tasks.config import PromptConfig
from models.training.config import DISTRIBUTIONS
from models.training.evaluation import normalised_mse
from probe.causal.division import (
    division_test,
    require_one_quotient,
    require_residuals,
    residual_division_test,
)
from probe.matching.alignment import align
from probe.matching.construction_family import ConstructionFamily, has_construction
from probe.probing.linear import fit_probes, needed_prompts, strongest_control
from probe.probing.readout import read_out
from probe.subjects.names import ZOO
from probe.subjects.sparsity import active_heads, exact_zeros
from probe.subjects.subject import Subject, is_zoo, load_subject
from probe.symmetry.weights import has_plain_forward

# Prompts that a read-out of many models is fitted on.
_READ_OUT_PROMPTS = 480
_OTHER = "other"


@dataclass(frozen=True)
class Trained:
    """A trained model and how it was trained.

    Attributes:
        subject: the model, its prompts, its hash.
        distribution: name of the prompt distribution, "other" for one without a name
            (`told_apart` says what is other).
        l1: penalty weight.
        seed: of training.
    """

    subject: Subject
    distribution: str
    l1: float
    seed: int

    @classmethod
    def load(cls, checkpoint: str | Path) -> Trained:
        """Load a checkpoint that `models.train` wrote.

        Raises:
            CheckpointError: if it cannot be loaded, or does not record l1 and seed.
        """
        subject = load_subject(checkpoint)
        if not {"l1", "seed"} <= subject.record.keys():
            raise CheckpointError(
                f"{checkpoint}: its training.json has no l1 and seed; give checkpoints that "
                f"models.train wrote"
            )
        label = distribution_label(subject.prompts)
        return cls(subject, label, float(subject.record["l1"]), int(subject.record["seed"]))


def trained_zoo(folder: str = ZOO) -> list[Trained]:
    """All checkpoints that were trained with one covariate, by distribution and l1.

    Args:
        folder: a folder of checkpoint folders, as `models.train` writes; "zoo" for the
            shipped ones.

    Raises:
        CheckpointError: if there is none.
    """
    if is_zoo(folder):
        checkpoints = [SHIPPED / name for name in available()]
    elif holds_checkpoint(folder):
        raise CheckpointError(
            f"{folder!r} is one checkpoint; give the folder that it and others stand in"
        )
    else:
        inside = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
        checkpoints = [path for path in inside if holds_checkpoint(path)]
    zoo = [Trained.load(path) for path in checkpoints if {"l1", "seed"} <= provenance(path).keys()]
    zoo = [each for each in zoo if each.subject.prompts.n_covariates == 1]
    if not zoo:
        raise CheckpointError(
            f"{folder!r} holds no trained checkpoint of one covariate; give a folder that "
            f"models.train wrote, or {ZOO!r}"
        )
    order = [*DISTRIBUTIONS, _OTHER]
    zoo = sorted(zoo, key=lambda each: (order.index(each.distribution), each.l1, each.seed))
    return told_apart(zoo)


def distribution_label(prompts: PromptConfig) -> str:
    """Name of a prompt distribution in `models.training.DISTRIBUTIONS`, or "other"."""
    return next((name for name, known in DISTRIBUTIONS.items() if known == prompts), _OTHER)


def told_apart(zoo: Sequence[Trained]) -> list[Trained]:
    """Trained models whose labels differ where more than the penalty and the seed does.

    Models that share a label and an l1 weight are seeds of one training. A label that several
    prompt distributions or shapes of models share is followed by the settings in which these
    differ: "other, x_log_scale 0.5". Models stand together by label.
    """
    groups: dict[str, list[Trained]] = {}
    for each in zoo:
        groups.setdefault(each.distribution, []).append(each)
    labelled = []
    for label, group in groups.items():
        settings = [_settings(each.subject) for each in group]
        differing = [
            name
            for name in dict.fromkeys(name for one in settings for name in one)
            if len({repr(one.get(name)) for one in settings}) > 1
        ]
        named = [
            ", ".join([label, *(f"{name} {one.get(name)}" for name in differing)])
            for one in settings
        ]
        places = list(dict.fromkeys(named))
        order = sorted(range(len(group)), key=lambda i: places.index(named[i]))
        labelled += [dataclasses.replace(group[i], distribution=named[i]) for i in order]
    return labelled


def _settings(subject: Subject) -> dict[str, Any]:
    """What a model was trained on, and its shape."""
    return subject.model.cfg.model_dump() | subject.prompts.model_dump()


def survey(models: Iterable[Trained], *, n_prompts: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Measure trained models, one row each.

    Args:
        models: what to measure.
        n_prompts: prompts of the division test; probes are scored on twice as many, and fitted on
            as many, or more where a site has many features.
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
    divisors = [site.name for site in sites_with(model, "divisor")]
    states = [site.name for site in sites_with(model, "state")]
    sites = [*divisors, *states]
    table = fit_probes(
        model,
        prompts,
        sites,
        n_train=max(n, needed_prompts(model, prompts, sites)),
        n_test=n,
        n_untrained=1,
        generator=generator,
    )
    table = table.assign(control=strongest_control(table))
    family = {one.name: one.family for one in prompts.statistics}
    found = {}
    for symbol, names, statistic in (("V", divisors, "x_var"), ("C", states, "xy_cov")):
        of = table.statistic.map(family) == statistic
        here = table[table.site.isin(names) & of]
        best = here.loc[here.r2.idxmax()] if here.r2.notna().any() else None
        found[f"probe_{symbol}"] = math.nan if best is None else best.r2
        found[f"probe_{symbol}_control"] = math.nan if best is None else best.control
    return found


def _division(
    model: LinearAttentionTransformer, prompts: PromptConfig, n: int, generator: torch.Generator
) -> dict[str, float]:
    found = {}
    tests = {
        "division": (division_test, require_one_quotient),
        "residual": (residual_division_test, require_residuals),
    }
    for name, (test, require) in tests.items():
        if not applies(require, model, prompts):
            continue
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
    if not (has_construction(model.cfg) and has_plain_forward(model)):
        return {}
    family = ConstructionFamily.for_model(model.cfg)
    source = torch.Generator().manual_seed(seed)
    alignment = align(model, family, "functional", prompt_config=prompts, generator=source)
    return {"alignment": alignment.score, "alignment_p": alignment.p_value}


def read_outs(models: Iterable[Trained], seed: int = 0) -> pd.DataFrame:
    """How well named quantities describe the coordinates of each model, site by site.

    Args:
        models: what to read.
        seed: of prompts, starts and resamples.

    Returns:
        DataFrame with columns model, site, mean_r2 (over coordinates, negative ones as 0).
    """
    rows = []
    for each in models:
        subject = each.subject
        table = read_out(
            subject.model,
            subject.prompts,
            n_prompts=_READ_OUT_PROMPTS,
            generator=torch.Generator().manual_seed(seed),
        )
        for site, group in table.groupby("site", sort=False):
            rows.append((subject.name, site, group.r2.clip(lower=0).mean()))
    return pd.DataFrame(rows, columns=["model", "site", "mean_r2"])


def applies(require: Callable[[Any, Any], None], model: Any, task: Any) -> bool:
    """Whether a test can be made on a model and task, by what it requires of them."""
    try:
        require(model, task)
    except ValueError:
        return False
    return True
