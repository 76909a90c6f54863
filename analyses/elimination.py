"""Several covariates: does training discover Gaussian elimination?

Every shipped checkpoint of several covariates is put to the pivot test: which pivot does each
layer norm divide by, and does the layer's output perform that step? The labels are counted by
l1 penalty, by correlation of the training prompts and by width; untrained models and the
constructions go through the same test, and models of other correlations once more on the
prompts of p2, so that a difference cannot come from the test. Figures show one model's
coordinates turning into residualised covariates, layer by layer, its scales against every
pivot, and the error of each class against the condition number, beside rivals of equal depth.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd
import torch
from pydantic import Field
from scipy.stats import binomtest, fisher_exact
from torch import Tensor

from models import (
    LinearAttentionTransformer,
    PromptConfig,
    available,
    closed_form,
    determinant_form,
    sample_prompts,
)
from models.checkpoint import checkpoint_folder
from probe import load_subject, pivot_label, pivot_test, read_out
from probe.algorithms import Problem
from probe.elimination import coordinate_correlations, held_residuals
from probe.elimination_figures import (
    coordinates_figure,
    errors_figure,
    pivots_figure,
    shares_figure,
)
from probe.ladder import FAMILIES, tune
from probe.pivots import pivot_points
from probe.reporting import AnalysisConfig, Output, main

CLASSES = ("elimination", "determinant", "neither")
RIVALS = ("GD", "GD++", "Newton")
# Runs in the order of figures; variants of p2 differ from it at one penalty.
GROUPS = ("p2_corr0", "p2", "p2_corr95", "p2_d7", "p3", "p3_corr95")
EXPERIMENT_L1 = 1e-3
# Pairs of sets of models (run, penalty) that differ in one respect.
CONTRASTS = {
    "correlation 0 against 0.95": (("p2_corr0", EXPERIMENT_L1), ("p2_corr95", EXPERIMENT_L1)),
    "the same, all on p2 prompts": (
        ("p2_corr0 on p2", EXPERIMENT_L1),
        ("p2_corr95 on p2", EXPERIMENT_L1),
    ),
    "correlation 0 against 0.8": (("p2_corr0", EXPERIMENT_L1), ("p2", EXPERIMENT_L1)),
    "correlation 0.8 against 0.95": (("p2", EXPERIMENT_L1), ("p2_corr95", EXPERIMENT_L1)),
    "width 5 against 7": (("p2", EXPERIMENT_L1), ("p2_d7", EXPERIMENT_L1)),
    "penalty 1e-4 against 3e-3": (("p2", 1e-4), ("p2", 3e-3)),
}
P2_PROMPTS = PromptConfig(
    n_context=40, n_covariates=2, x_log_scale=0.7, x_mean_std=1.0, x_correlation=0.8
)
# Rivals and models meet here, where covariances are worse conditioned than in training.
HARD_CORRELATION = 0.98
UNTRAINED = 6
CONSTRUCTED = {
    "construction (x1, x2)": lambda n: closed_form(n, 2, scale=1e3),
    "construction (x2, x1)": lambda n: closed_form(n, 2, scale=1e3, order=(2, 1)),
    "construction, determinant": lambda n: determinant_form(n, scale=1e3),
}
# Condition numbers of the covariance of x, bin edges.
CONDITION = (1, 3, 10, 30, 100, 300, 1000)


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        checkpoint: the model whose coordinates are drawn.
        names: checkpoints to classify; every shipped one of several covariates by default.
        n_prompts: prompts per model.
    """

    checkpoint: str = "p2_l1_3e-4_seed5"
    names: tuple[str, ...] = ()
    n_prompts: int = Field(2000, ge=200)


@dataclass(frozen=True)
class Studied:
    """A model under test.

    Attributes:
        name: its name.
        group: label of the run it belongs to, such as "p2", "untrained" or "constructed".
        l1: penalty; NaN if it was not trained.
        model: in float64.
        prompts: the distribution to test it on.
        sha256: hash of its files; None if it is made on the spot.
    """

    name: str
    group: str
    l1: float
    model: LinearAttentionTransformer
    prompts: PromptConfig
    sha256: str | None = None


def run(config: Config) -> Output:
    """Classify every model, then look closely at one."""
    shown_model = load_subject(config.checkpoint)
    names = config.names or [name for name in available() if _n_covariates(name) > 1]
    studied = [_trained(name) for name in names]
    others = [*_on_common_prompts(studied), *_controls()]
    tables, rows = [], []
    for each in [*studied, *others]:
        generator = torch.Generator().manual_seed(config.seed)
        pivots = pivot_test(
            each.model, each.prompts, n_prompts=config.n_prompts, generator=generator
        )
        rows.append(_row(each, pivots))
        tables.append(pivots.assign(model=each.name, group=each.group))
    models = pd.DataFrame(rows)
    scores = pd.concat(tables).merge(models[["model", "l1", "class", "label", "norm. MSE"]])
    shares = count(models)
    errors = condition_errors([*studied, *others], models, config)
    coordinates = _coordinates(shown_model.model, shown_model.prompts, config.seed)
    pivots = scores[scores.model == config.checkpoint]
    untrained = scores[scores.group == "untrained"]
    by_penalty = shares[(shares.group == "p2") & (shares.by != "all")]
    by_run = shares[(shares.by == f"l1 {EXPERIMENT_L1:g}") & shares.group.isin(GROUPS)]
    by_run = by_run.sort_values("group", key=lambda group: group.map(GROUPS.index))
    figures = {
        "shares": (shares_figure(by_penalty, by_run), shares),
        "coordinates": (coordinates_figure(coordinates), coordinates),
        "errors": (errors_figure(errors), errors),
    }
    if len(pivots):
        points = pivot_points(
            shown_model.model, shown_model.prompts, torch.Generator().manual_seed(config.seed)
        )
        figures["pivots"] = (pivots_figure(pivots, points, untrained), points)
    told = shares[(shares.by == "all") | (shares.group == "p2")]
    notes = [
        f"{row.group} {row.by}: {row['class']} {row.models} of {row.of} "
        f"({row.share:.0%}, 95 % {row.low:.0%} to {row.high:.0%})"
        for _, row in told[told["class"] != "neither"].iterrows()
    ]
    for name, row in contrasts(models).iterrows():
        notes.append(f"{name}: " + ", ".join(f"{kind} p = {p:.3f}" for kind, p in row.items()))
    notes.append("read-out: the order whose residuals explain the coordinates best (eliminators)")
    sha256 = {each.name: each.sha256 for each in studied} | {config.checkpoint: shown_model.sha256}
    # What each layer divides by would not fit a terminal: scores.csv holds it.
    shown = models[["model", "norm. MSE", "label", "read-out"]]
    return Output(scores, shown, figures, sha256, tuple(notes))


def count(models: pd.DataFrame) -> pd.DataFrame:
    """Share of models per class with Wilson intervals, by group and penalty.

    Returns:
        DataFrame with columns group, by (the penalty, or "all"), class, models, of, share,
        low, high.
    """
    rows = []
    for group, members in models.groupby("group", sort=False):
        parts = [("all", members)]
        parts += [(f"l1 {l1:g}", part) for l1, part in members.groupby("l1")]
        for by, part in parts:
            for kind in CLASSES:
                k, n = int((part["class"] == kind).sum()), len(part)
                interval = binomtest(k, n).proportion_ci(method="wilson")
                bounds = {"low": interval.low, "high": interval.high}
                row = {"group": group, "by": by, "class": kind, "models": k, "of": n}
                rows.append(row | {"share": k / n} | bounds)
    return pd.DataFrame(rows)


def contrasts(models: pd.DataFrame) -> pd.DataFrame:
    """Fisher's exact test of each of `CONTRASTS`: p values, one column per class."""
    rows = {}
    for name, sides in CONTRASTS.items():
        members = [models[(models.group == group) & (models.l1 == l1)] for group, l1 in sides]
        if all(len(part) for part in members):
            rows[name] = {}
            for kind in CLASSES[:2]:
                found = [int((part["class"] == kind).sum()) for part in members]
                counts = [[n, len(part) - n] for n, part in zip(found, members, strict=True)]
                rows[name][kind] = fisher_exact(counts).pvalue
    return pd.DataFrame.from_dict(rows, orient="index")


@torch.no_grad()
def condition_errors(studied: list[Studied], models: pd.DataFrame, config: Config) -> pd.DataFrame:
    """Error to least squares against the condition number of the covariance, p = 2.

    On prompts with correlations up to `HARD_CORRELATION`. Rivals have as many steps as the
    models layers, with parameters tuned to least squares.

    Returns:
        DataFrame with columns who (class, "untrained", "construction" or rival), condition
        (geometric middle of the bin), error (mean over prompts and models of the squared error
        over the variance of least squares), low, high (over models; NaN for one).
    """
    pairs = [s for s in studied if s.group in ("p2", "constructed", "untrained")]
    hard = P2_PROMPTS.model_copy(update={"x_correlation": HARD_CORRELATION})
    generator = torch.Generator().manual_seed(config.seed + 1)
    prompts = sample_prompts(hard, 4 * config.n_prompts, generator)
    condition = torch.linalg.cond(prompts.x_cov)
    unit = prompts.least_squares.var()
    kinds = models.set_index("model")["class"]
    predictions: dict[str, list[Tensor]] = {}
    for each in pairs:
        who = each.group if each.group != "p2" else kinds[each.name]
        predictions.setdefault(who, []).append(each.model(prompts.inputs))
    depth = pairs[0].model.cfg.n_layers
    problem = Problem.of(prompts)
    for family in FAMILIES:
        if family.name in RIVALS:
            chosen = family.steps.index(depth)
            parameters = tune(family, problem, prompts.least_squares)[chosen : chosen + 1]
            steps = torch.tensor([depth])
            prediction = family.predict(problem, parameters, steps)[0]
            predictions[f"{family.name}, {depth} steps"] = [prediction]
    rows = []
    for who, several in predictions.items():
        error = (torch.stack(several) - prompts.least_squares).square() / unit
        for low, high in pairwise(CONDITION):
            inside = (condition >= low) & (condition < high)
            if inside.sum() < 20:
                continue
            by_model = error[:, inside].mean(1)
            spread = by_model.quantile(torch.tensor([0.0, 1.0]).double()).tolist()
            rows.append(
                {"who": who, "condition": (low * high) ** 0.5, "models": len(several)}
                | {"error": float(by_model.mean())}
                | dict(zip(("low", "high"), spread, strict=True))
            )
    return pd.DataFrame(rows)


def _trained(name: str) -> Studied:
    subject = load_subject(name)
    label = re.sub(r"_l1_.*", "", name)
    l1 = json.loads((checkpoint_folder(name) / "training.json").read_text())["l1"]
    return Studied(name, label, l1, subject.model, subject.prompts, subject.sha256)


def _n_covariates(name: str) -> int:
    return load_subject(name).prompts.n_covariates


def _on_common_prompts(studied: list[Studied]) -> Iterator[Studied]:
    """Models trained on other correlations, on the prompts of p2."""
    for each in studied:
        if each.group in ("p2_corr0", "p2_corr95"):
            name, group = f"{each.name} on p2", f"{each.group} on p2"
            yield Studied(name, group, each.l1, each.model, P2_PROMPTS)


def _controls() -> Iterator[Studied]:
    """Constructions and untrained models of two covariates, on the prompts of p2."""
    prompts = P2_PROMPTS
    for name, build in CONSTRUCTED.items():
        model = build(prompts.n_context)
        yield Studied(name, "constructed", float("nan"), model, prompts)
    shape = closed_form(prompts.n_context, 2).cfg
    for seed in range(UNTRAINED):
        generator = torch.Generator().manual_seed(seed)
        model = LinearAttentionTransformer(shape, generator).double().requires_grad_(False)
        yield Studied(f"untrained {seed}", "untrained", float("nan"), model, prompts)


@torch.no_grad()
def _row(each: Studied, pivots: pd.DataFrame) -> dict:
    """One model in the printed table."""
    label = pivot_label(pivots)
    generator = torch.Generator().manual_seed(0)
    prompts = sample_prompts(each.prompts, 2000, generator)
    error = (each.model(prompts.inputs) - prompts.least_squares).square().mean()
    kind = "neither"
    if label is not None:
        kind = "determinant" if "determinant" in label else "elimination"
    row = {
        "model": each.name,
        "group": each.group,
        "l1": each.l1,
        "norm. MSE": float(error / prompts.least_squares.var()),
        "class": kind,
        "label": label or "–",
        "read-out": "–",
    }
    if kind == "elimination":
        order = read_out(each.model, each.prompts).attrs["order"]
        row["read-out"] = ", ".join(f"x{j}" for j in order)
    return row


def _coordinates(
    model: LinearAttentionTransformer, prompts: PromptConfig, seed: int
) -> pd.DataFrame:
    """Correlations of canonical coordinates, and linear readability, per layer and residual."""
    rotation = read_out(model, prompts, basis="canonical", seed=seed).attrs["rotation"]
    correlations = coordinate_correlations(model, prompts, torch.tensor(rotation).double())
    correlations = correlations.rename(columns={"correlation": "value"})
    held = held_residuals(model, prompts).rename(columns={"r2": "value"})
    return pd.concat(
        [
            correlations.assign(kind="coordinate", coordinate=correlations.coordinate.map(str)),
            held.assign(kind="linear readout", coordinate=""),
        ]
    )


if __name__ == "__main__":
    main("elimination", Config, run, __doc__)
