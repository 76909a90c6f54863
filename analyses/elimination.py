"""Several covariates: does training discover Gaussian elimination?

Every shipped checkpoint of several covariates is put to the pivot test: which pivot does each
layer norm divide by, and does the layer's output perform that step? The labels are counted by
l1 penalty, by correlation of the training prompts and by width; untrained models and the
constructions go through the same test, and models of other correlations once more on the
prompts of p2, so that a difference cannot come from the test. Figures show one model's
coordinates turning into residualised covariates, layer by layer, its scales against every
pivot, and the error of each class against the condition number, beside rivals of equal depth.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        checkpoint: the model whose coordinates, scales and errors are drawn; it is classified
            with the others.
        names: checkpoints to classify; every shipped one of several covariates by default.
        n_prompts: prompts per model.
    """

    checkpoint: str = "p2_l1_3e-4_seed5"
    names: tuple[str, ...] = ()
    n_prompts: int = Field(2000, ge=200)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd
import torch
from scipy.stats import fisher_exact
from torch import Tensor
from tqdm import tqdm

from models import (
    LinearAttentionTransformer,
    PromptConfig,
    Prompts,
    available,
    closed_form,
    determinant_form,
    sample_prompts,
)
from models.architecture.sites import layers_of
from models.checkpoint import PREFIX
from models.training.evaluation import normalised_error
from probe import Subject, load_subject, pivot_label, pivot_test, read_out
from probe.causal.pivots import pivot_points, require_pivots
from probe.figures.elimination import (
    coordinates_figure,
    errors_figure,
    pivots_figure,
    shares_figure,
)
from probe.probing.residuals import coordinate_correlations, held_residuals
from probe.report.script import Output, main
from probe.rivals import registry
from probe.rivals.algorithms import NormalEquations
from probe.rivals.fitting import tune
from probe.subjects.counts import share

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


@dataclass(frozen=True)
class Tested:
    """A model under test.

    Attributes:
        name: its name.
        group: label of the run it belongs to, such as "p2", "untrained" or "constructed".
        l1: penalty; NaN if none is on record.
        model: in float64.
        prompts: the distribution to test it on.
        subject: where it came from; None if it is made on the spot.
    """

    name: str
    group: str
    l1: float
    model: LinearAttentionTransformer
    prompts: PromptConfig
    subject: Subject | None = None


def run(config: Config) -> Output:
    """Look closely at one model, and classify it with the others."""
    drawn = load_subject(config.checkpoint)
    trained = _trained(config.names, drawn)
    for each in trained:
        _require_pivots(each)
    # First, since a model may have no canonical coordinates.
    coordinates = _coordinates(drawn.model, drawn.prompts, config.seed)
    tested = [*trained, *_on_common_prompts(trained), *_controls()]
    tables, rows = [], []
    for each in tqdm(tested, desc="models", leave=False):
        generator = torch.Generator().manual_seed(config.seed)
        pivots = pivot_test(
            each.model, each.prompts, n_prompts=config.n_prompts, generator=generator
        )
        rows.append(_row(each, pivots))
        tables.append(pivots.assign(model=each.name, group=each.group))
    models = pd.DataFrame(rows)
    scores = pd.concat(tables).merge(models[["model", "l1", "class", "label", "norm. MSE"]])
    shares = count(models)
    groups = list(dict.fromkeys(each.group for each in trained))
    (closely,) = (each for each in trained if each.subject is drawn)
    own = [each for each in trained if each is closely or not _is_shipped(each.subject)]
    own = [each for each in own if each.group != "p2"]
    errors, rivals = condition_errors(tested, own, models, config)
    generator = torch.Generator().manual_seed(config.seed)
    points = pivot_points(drawn.model, drawn.prompts, generator)
    pivots = scores[scores.model == closely.name]
    untrained = scores[scores.group == "untrained"]
    figures = {
        "shares": (shares_figure(*_panels(shares, groups)), shares),
        "coordinates": (coordinates_figure(coordinates), coordinates),
        "errors": (errors_figure(errors, rivals), errors),
        "pivots": (pivots_figure(pivots, points, untrained), points),
    }
    told = shares[(shares.by == "all") | (shares.group == "p2")]
    notes = [
        f"{row.group} {row.by}: {row['class']} {row.models} of {row.of} "
        f"({row.share:.0%}, 95 % {row.low:.0%} to {row.high:.0%})"
        for _, row in told[told["class"] != "neither"].iterrows()
    ]
    for name, row in contrasts(models).iterrows():
        notes.append(f"{name}: " + ", ".join(f"{kind} p = {p:.3f}" for kind, p in row.items()))
    notes.append("read-out: the order whose residuals explain the coordinates best (eliminators)")
    notes += [
        f"{each.name}: {each.prompts.n_covariates} covariates, not among the errors (of two)"
        for each in own
        if each.prompts.n_covariates != 2
    ]
    sha256 = {each.name: each.subject.sha256 for each in trained}
    sources = {each.name: each.subject.source for each in trained}
    # What each layer divides by would not fit a terminal: scores.csv holds it.
    shown = models[["model", "norm. MSE", "label", "read-out"]]
    return Output(scores, shown, figures, sha256, tuple(notes), source=sources)


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
                row = {"group": group, "by": by, "class": kind, "models": k, "of": n}
                rows.append(row | share(k, n))
    return pd.DataFrame(rows).rename(columns={"ci_low": "low", "ci_high": "high"})


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
def condition_errors(
    tested: Sequence[Tested], own: Sequence[Tested], models: pd.DataFrame, config: Config
) -> tuple[pd.DataFrame, list[str]]:
    """Error to least squares against the condition number of the covariance, p = 2.

    On prompts with correlations up to `HARD_CORRELATION`. Rivals have as many steps as the
    models layers, with parameters tuned to least squares.

    Args:
        tested: of them those of p2 by class, constructions and untrained models.
        own: models with a line each, where they have two covariates.
        models: class of each model.
        config: number of prompts and seed.

    Returns:
        DataFrame with columns who (class, "untrained", "constructed", rival or model), condition
        (geometric middle of the bin), models, error (mean over prompts and models of the squared
        error over the variance of least squares), low, high (over models); and who are rivals.
    """
    prompts = _hard_prompts(P2_PROMPTS.n_context, config)
    kinds = models.set_index("model")["class"]
    predictions: dict[str, list[Tensor]] = {}
    for each in tested:
        if each.group in ("p2", "constructed", "untrained"):
            who = each.group if each.group != "p2" else kinds[each.name]
            predictions.setdefault(who, []).append(each.model(prompts.inputs))
    depth = len(layers_of(next(each.model for each in tested if each.group == "constructed")))
    problem = NormalEquations.of(prompts)
    rivals = []
    for rival in registry.RIVALS:
        if rival.name in RIVALS:
            chosen = rival.steps.index(depth)
            parameters = tune(rival, problem, prompts.least_squares)[chosen : chosen + 1]
            steps = torch.tensor([depth])
            rivals.append(f"{rival.name}, {depth} steps")
            predictions[rivals[-1]] = [rival.predict(problem, parameters, steps)[0]]
    rows = [
        row
        for who, several in predictions.items()
        for row in _by_condition(who, torch.stack(several), prompts)
    ]
    for each in own:
        if each.prompts.n_covariates == 2:
            prompts = _hard_prompts(each.prompts.n_context, config)
            rows += _by_condition(each.name, each.model(prompts.inputs)[None], prompts)
    return pd.DataFrame(rows), rivals


def _hard_prompts(n_context: int, config: Config) -> Prompts:
    hard = {"x_correlation": HARD_CORRELATION, "n_context": n_context}
    generator = torch.Generator().manual_seed(config.seed + 1)
    return sample_prompts(P2_PROMPTS.model_copy(update=hard), 4 * config.n_prompts, generator)


def _by_condition(who: str, predictions: Tensor, prompts: Prompts) -> Iterator[dict[str, object]]:
    """Error of models, [m, b], in each bin of the condition number that holds enough prompts."""
    condition = torch.linalg.cond(prompts.x_cov)
    error = normalised_error((predictions - prompts.target).square(), prompts.target)
    for low, high in pairwise(CONDITION):
        inside = (condition >= low) & (condition < high)
        if inside.sum() < 20:
            continue
        by_model = error[:, inside].mean(1)
        spread = by_model.quantile(torch.tensor([0.0, 1.0]).double()).tolist()
        row = {"who": who, "condition": (low * high) ** 0.5, "models": len(predictions)}
        row |= {"error": float(by_model.mean())}
        yield row | dict(zip(("low", "high"), spread, strict=True))


def _panels(shares: pd.DataFrame, groups: list[str]) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Rows of the figure of shares: by penalty in one run, by run, and which run the first is."""
    penalties = {group: shares[(shares.group == group) & (shares.by != "all")] for group in groups}
    # p2 has most penalties; without it, the run that has.
    by_group = max(groups, key=lambda group: (group == "p2", penalties[group].by.nunique()))
    known = shares[(shares.by == f"l1 {EXPERIMENT_L1:g}") & shares.group.isin(GROUPS)]
    known = known.sort_values("group", key=lambda group: group.map(GROUPS.index))
    others = [group for group in groups if group not in GROUPS]
    others = shares[(shares.by == "all") & shares.group.isin(others)]
    return penalties[by_group], pd.concat([known, others]), by_group


def _trained(names: Sequence[str], drawn: Subject) -> list[Tested]:
    """The models to classify, the drawn one among them, each once."""
    if names:
        subjects = [load_subject(name) for name in names]
    else:
        shipped = (load_subject(PREFIX + name) for name in available())
        subjects = [each for each in shipped if each.prompts.n_covariates > 1]
    # The same model may be named twice, in two ways.
    once = {(each.name, each.sha256): each for each in (*subjects, drawn)}
    called = Counter(name for name, _ in once)
    trained = []
    for (name, _), each in once.items():
        label = re.sub(r"_l1_.*", "", name)
        if label in GROUPS and not _is_shipped(each):
            label = f"{label}, own"
        title = name if called[name] == 1 else each.source
        l1 = float(each.record.get("l1", "nan"))
        trained.append(Tested(title, label, l1, each.model, each.prompts, each))
    return trained


def _is_shipped(subject: Subject) -> bool:
    return subject.source.startswith(PREFIX)


def _require_pivots(each: Tested) -> None:
    try:
        require_pivots(each.model, each.prompts)
    except ValueError as error:
        raise ValueError(f"{each.name}: {error}") from None


def _on_common_prompts(trained: Sequence[Tested]) -> Iterator[Tested]:
    """Models trained on other correlations, on the prompts of p2."""
    for each in trained:
        if each.group in ("p2_corr0", "p2_corr95"):
            name, group = f"{each.name} on p2", f"{each.group} on p2"
            yield Tested(name, group, each.l1, each.model, P2_PROMPTS)


def _controls() -> Iterator[Tested]:
    """Constructions and untrained models of two covariates, on the prompts of p2."""
    prompts = P2_PROMPTS
    for name, build in CONSTRUCTED.items():
        model = build(prompts.n_context)
        yield Tested(name, "constructed", float("nan"), model, prompts)
    shape = closed_form(prompts.n_context, 2).cfg
    for seed in range(UNTRAINED):
        generator = torch.Generator().manual_seed(seed)
        model = LinearAttentionTransformer(shape, generator).double().requires_grad_(False)
        yield Tested(f"untrained {seed}", "untrained", float("nan"), model, prompts)


@torch.no_grad()
def _row(each: Tested, pivots: pd.DataFrame) -> dict:
    """One model in the printed table."""
    label = pivot_label(pivots)
    generator = torch.Generator().manual_seed(0)
    prompts = sample_prompts(each.prompts, 2000, generator)
    losses = each.prompts.loss(each.model(prompts.inputs), prompts)
    kind = "neither"
    if label is not None:
        kind = "determinant" if "determinant" in label else "elimination"
    row = {
        "model": each.name,
        "group": each.group,
        "l1": each.l1,
        "norm. MSE": float(normalised_error(losses.mean(), prompts.target)),
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
    generator = torch.Generator().manual_seed(seed)
    canonical = read_out(model, prompts, basis="canonical", generator=generator)
    rotation = canonical.attrs["rotation"]
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
