"""Several covariates: does training discover Gaussian elimination?

Every shipped checkpoint of several covariates is put to the pivot test: which pivot does each
layer norm divide by, and does the layer's output perform that step? The labels are counted by
l1 penalty, by correlation of the training prompts and by width; untrained models and the
constructions go through the same test. Figures show one model's coordinates turning into
residualised covariates, layer by layer, its scales against every pivot, and the error of each
class against the condition number of the covariates, beside rivals of the same depth.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
from probe.figures import PALETTE, TWO_COLUMNS, heatmap
from probe.ladder import FAMILIES, tune
from probe.reporting import AnalysisConfig, Output, main

CLASSES = ("elimination", "determinant", "neither")
COLOURS = dict(zip(CLASSES, PALETTE, strict=False))
RIVALS = ("GD", "GD++", "Newton")
# Runs in the order of figures; variants of p2 differ from it at one penalty.
GROUPS = ("p2_corr0", "p2", "p2_corr95", "p2_d7", "p3")
EXPERIMENT_L1 = 1e-3
# Pairs of sets of models (run, penalty) that differ in one respect.
CONTRASTS = {
    "correlation 0 against 0.95": (("p2_corr0", EXPERIMENT_L1), ("p2_corr95", EXPERIMENT_L1)),
    "correlation 0 against 0.8": (("p2_corr0", EXPERIMENT_L1), ("p2", EXPERIMENT_L1)),
    "correlation 0.8 against 0.95": (("p2", EXPERIMENT_L1), ("p2_corr95", EXPERIMENT_L1)),
    "width 5 against 7": (("p2", EXPERIMENT_L1), ("p2_d7", EXPERIMENT_L1)),
    "penalty 1e-4 against 3e-3": (("p2", 1e-4), ("p2", 3e-3)),
}
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
    controls = list(_controls(next(s.prompts for s in studied if s.prompts.n_covariates == 2)))
    tables, rows = [], []
    for each in [*studied, *controls]:
        generator = torch.Generator().manual_seed(config.seed)
        pivots = pivot_test(
            each.model, each.prompts, n_prompts=config.n_prompts, generator=generator
        )
        rows.append(_row(each, pivots))
        tables.append(pivots.assign(model=each.name, group=each.group))
    models = pd.DataFrame(rows)
    scores = pd.concat(tables).merge(models[["model", "l1", "class", "label", "norm. MSE"]])
    shares = count(models)
    errors = condition_errors([*studied, *controls], models, config)
    coordinates = _coordinates(shown_model.model, shown_model.prompts, config.seed)
    pivots = scores[scores.model == config.checkpoint]
    untrained = scores[scores.group == "untrained"]
    figures = {
        "shares": (shares_figure(shares), shares),
        "coordinates": (coordinates_figure(coordinates), coordinates),
        "errors": (errors_figure(errors), errors),
    }
    if len(pivots):
        figures["pivots"] = (pivots_figure(pivots, untrained), pivots)
    notes = [
        f"{row.group} {row.by}: {row['class']} {row.models} of {row.of} "
        f"({row.share:.0%}, 95 % {row.low:.0%} to {row.high:.0%})"
        for _, row in shares[shares["class"] != "neither"].iterrows()
    ]
    for name, row in contrasts(models).iterrows():
        notes.append(f"{name}: " + ", ".join(f"{kind} p = {p:.3f}" for kind, p in row.items()))
    notes.append("read-out: the order whose residuals explain the coordinates best (eliminators)")
    notes.append("layer k: pivot with the largest R² of its scale, R²; then R² as a step (causal)")
    sha256 = {s.name: s.sha256 for s in studied} | {config.checkpoint: shown_model.sha256}
    return Output(scores, models.drop(columns="class"), figures, sha256, tuple(notes))


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
            rows[name] = {
                kind: fisher_exact(
                    [[n := int((part["class"] == kind).sum()), len(part) - n] for part in members]
                ).pvalue
                for kind in CLASSES[:2]
            }
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
    hard = pairs[0].prompts.model_copy(update={"x_correlation": HARD_CORRELATION})
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


def shares_figure(shares: pd.DataFrame) -> Figure:
    """Shares by penalty (p2) on the left, by training distribution and width on the right."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(TWO_COLUMNS, 2.6), sharey=True)
    by_penalty = shares[(shares.group == "p2") & (shares.by != "all")]
    draw_shares(by_penalty, "by", left).set_xlabel("l1 penalty (p2)")
    one_penalty = shares[(shares.by == f"l1 {EXPERIMENT_L1:g}") & shares.group.isin(GROUPS)]
    draw_shares(one_penalty.sort_values("group", key=lambda g: g.map(GROUPS.index)), "group", right)
    right.set_xlabel(f"run (l1 {EXPERIMENT_L1:g})")
    left.set_ylabel("share of models")
    left.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.2), ncols=3)
    return drawing


def draw_shares(shares: pd.DataFrame, axis: str, ax: Axes) -> Axes:
    """Points with intervals, one colour per class, at each value of a column."""
    places = list(dict.fromkeys(shares[axis]))
    for offset, kind in zip((-0.2, 0.0, 0.2), CLASSES, strict=True):
        part = shares[shares["class"] == kind]
        x = [places.index(value) + offset for value in part[axis]]
        bars = np.abs(part[["low", "high"]].to_numpy().T - part.share.to_numpy())
        style = {"fmt": "o", "ms": 3, "lw": 1, "color": COLOURS[kind], "label": kind}
        ax.errorbar(x, part.share, yerr=bars, **style)
    counts = shares.drop_duplicates(axis).set_index(axis)["of"]
    labels = [f"{str(place).removeprefix('l1 ')}\n({counts[place]})" for place in places]
    ax.set_xticks(range(len(places)), labels)
    ax.set_ylim(-0.03, 1.03)
    return ax


def coordinates_figure(coordinates: pd.DataFrame) -> Figure:
    """Above: coordinates against residuals, layer by layer; below: what can be read at all."""
    layers = sorted(coordinates.layer.unique())
    drawing, axes = plt.subplots(
        2, len(layers), figsize=(TWO_COLUMNS, 3.6), sharey="row", height_ratios=(3, 1)
    )
    kinds = coordinates.groupby("kind")
    for column, layer in enumerate(layers):
        title = "embedding" if layer < 0 else f"after block {layer}"
        for row, (kind, value) in enumerate(
            (("coordinate", "correlation"), ("linear readout", "r2"))
        ):
            part = kinds.get_group(kind)
            wide = part[part.layer == layer].pivot(
                index="coordinate", columns="quantity", values="value"
            )
            signed = value == "correlation"
            ax = heatmap(wide, axes[row, column], signed=signed, fmt=".1f", colorbar=False)
            ax.tick_params(axis="x", rotation=90)
        axes[0, column].set_title(title)
    axes[0, 0].set_ylabel("coordinate\n(correlation)")
    axes[1, 0].set_ylabel("all (R²)")
    return drawing


def pivots_figure(pivots: pd.DataFrame, untrained: pd.DataFrame) -> Figure:
    """R² of the scale on every candidate per layer, beside the step and two controls."""
    layers = sorted(pivots.layer.unique())
    drawing, axes = plt.subplots(
        1, len(layers), figsize=(TWO_COLUMNS, 2.6), sharey=True, squeeze=False
    )
    for ax, layer in zip(axes[0], layers, strict=True):
        part = pivots[pivots.layer == layer]
        places = np.arange(len(part))
        bars = np.abs(part[["ci_low", "ci_high"]].to_numpy().T - part.r2.to_numpy())
        ax.bar(places, part.r2, yerr=bars, color=PALETTE[0], width=0.4, label="scale")
        ax.bar(places + 0.4, part.step_r2, color=PALETTE[1], width=0.4, label="step (causal)")
        controls = untrained[untrained.layer == layer].groupby("candidate").r2.max()
        if len(controls):
            highest = controls.reindex(part.candidate)
            ax.plot(places, highest, "k_", ms=8, label="untrained, largest")
        ax.plot(places, part.shuffled_r2, "x", color=PALETTE[5], ms=3, label="shuffled")
        ax.set_xticks(places + 0.2, part.candidate, rotation=60)
        best = part[part.best].candidate.tolist()
        ax.set(title=f"layer {layer}: {best[0] if best else 'none'}", ylim=(0, 1))
    axes[0, 0].set_ylabel("R²")
    axes[0, 0].legend(frameon=False, loc="upper left")
    return drawing


def errors_figure(errors: pd.DataFrame) -> Figure:
    """Error against condition number: classes solid, with the range of models, rivals dashed."""
    drawing, ax = plt.subplots(figsize=(TWO_COLUMNS / 1.6, 2.8))
    for colour, (who, line) in zip(PALETTE * 2, errors.groupby("who", sort=False), strict=False):
        rival = "steps" in who
        models = line.models.iloc[0]
        label = who if models == 1 else f"{who} ({models})"
        dashes = "--" if rival else "-"
        ax.plot(line.condition, line.error, dashes, color=colour, marker=".", lw=1, label=label)
        if models > 1:
            ax.fill_between(line.condition, line.low, line.high, color=colour, alpha=0.15, lw=0)
    ax.set(xscale="log", yscale="log", xlabel="condition number of the covariance of x")
    ax.xaxis.set_minor_formatter("")
    ax.set_ylabel("MSE / variance of target")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawing


def _trained(name: str) -> Studied:
    subject = load_subject(name)
    label = re.sub(r"_l1_.*", "", name)
    l1 = json.loads((checkpoint_folder(name) / "training.json").read_text())["l1"]
    return Studied(name, label, l1, subject.model, subject.prompts, subject.sha256)


def _n_covariates(name: str) -> int:
    return load_subject(name).prompts.n_covariates


def _controls(prompts: PromptConfig) -> Iterator[Studied]:
    """Constructions and untrained models of two covariates."""
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
    }
    for layer, part in pivots.groupby("layer"):
        top = part.loc[part.r2.idxmax()]
        mark = "*" if top.best else ""
        row[f"layer {layer}"] = f"{top.candidate}{mark} {top.r2:.2f} {top.step_r2:.2f}"
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
