"""What a report says about one model, section by section, as blocks of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from markupsafe import Markup

from models.config import PromptConfig
from models.transformer import LinearAttentionTransformer
from probe.activations import site_label
from probe.circuit import circuit_edges, circuit_panels
from probe.division import division_test, residual_division_test
from probe.figures import TWO_COLUMNS, heatmap, new_axes
from probe.linear import fit_probes
from probe.match_figures import null_panel, quantity_columns, read_out_panel, weight_panels
from probe.matching import align
from probe.nearest import ConstructionFamily
from probe.norms import scale_law, scale_points
from probe.page import Block, Chart, Listing
from probe.pivots import pivot_label, pivot_test
from probe.plots import probe_heatmaps, scale_panels
from probe.quantities import statistic_label
from probe.readout import read_out
from probe.reporting import versions
from probe.subject import Subject
from probe.survey import has_construction
from probe.survey_plots import training_panels
from probe.verdict import Verdict

_LEVELS = ("signed_permutation", "gauge", "functional")
# Points kept of a scatter: enough to see its shape, few enough for the page.
_POINTS = 1000
_CURVE_POINTS = 50
_RIVAL = ["family", "k", "query_row"]
_HEADINGS = {
    "r2": "R²",
    "ci_low": "low",
    "ci_high": "high",
    "slope_low": "slope low",
    "slope_high": "slope high",
    "r2_input": "raw input",
    "r2_untrained": "untrained",
    "r2_shuffled": "shuffled",
    "swap_r2": "swap R²",
}


def facts(rows: Mapping[str, object], caption: str) -> Listing:
    """A two-column table of names and values."""
    table = pd.DataFrame([(key, str(value)) for key, value in rows.items()], columns=["", "value"])
    return Listing(table, caption)


def prompts_in_words(prompts: PromptConfig) -> str:
    """A prompt distribution as a sentence."""
    low, high = (f"{math.exp(sign * prompts.x_log_scale):.2f}" for sign in (-1, 1))
    law = "N(0, 1)"
    if prompts.x_distribution == "uniform":
        law = f"U({prompts.x_bounds[0]:g}, {prompts.x_bounds[1]:g})"
    scale = f"scaled per prompt by {low} to {high}" if prompts.x_log_scale else "unscaled"
    mean = (
        f"shifted per prompt by N(0, {prompts.x_mean_std:g}²)"
        if prompts.x_mean_std
        else "unshifted"
    )
    p = prompts.n_covariates
    return (
        f"{prompts.n_context} samples of {p} covariate{'s' * (p > 1)}, x ~ {law}, {scale}, {mean}; "
        f"noise {prompts.noise_std:g} on y"
    )


def model_in_words(model: LinearAttentionTransformer) -> str:
    """A model's shape as a sentence."""
    config = model.cfg
    return (
        f"{config.n_layers} layers, {config.n_heads} heads, {config.d_model} dimensions, "
        f"{config.normalization} norm, {config.readout} readout, {config.n_parameters} parameters"
    )


def read_out_blocks(subject: Subject, seed: int) -> list[Block]:
    """What each coordinate holds."""
    table = read_out(subject.model, subject.prompts, seed=seed)
    quantities = quantity_columns(table)
    words = pd.DataFrame(
        {
            "site": table.site.map(site_label),
            "in words": table.words.str.replace(r", R² .*$", "", regex=True),
            "R²": table.r2,
        }
    )
    chart = Chart(
        "read_out",
        read_out_panel(table).figure,
        table[["site", "coordinate", "r2", *quantities]],
        f"Coefficients of named quantities in every coordinate of {subject.name}, after each "
        "block and at each layer-norm output.",
        "A row is a coordinate at a site. Numbers are regression coefficients, colours their share "
        "of the row's largest; blank: not among the quantities tried there. Trust rows of high R².",
        f"Heatmap of read-out coefficients; R² of the rows from {table.r2.min():.2f} to "
        f"{table.r2.max():.2f}.",
    )
    caption = f"The same in words; R² of {subject.name} on fresh prompts."
    return [chart, Listing(words, caption)]


def probe_blocks(
    models: Sequence[LinearAttentionTransformer], prompts: PromptConfig, n: int, seed: int
) -> list[Block]:
    """Probes of every site with their controls."""
    generator = torch.Generator().manual_seed(seed)
    table = fit_probes(models, prompts, n_train=n, n_test=n, n_untrained=2, generator=generator)
    who = f"mean over {len(models)} models" if len(models) > 1 else "one model"
    best = table.loc[table.groupby("statistic", sort=False).selectivity.idxmax().dropna()]
    alt = "; ".join(
        f"{statistic_label(row.statistic)} best at {site_label(row.site)}, R² {row.r2:.2f}, "
        f"selectivity {row.selectivity:.2f}"
        for row in best.itertuples()
    )
    chart = Chart(
        "probes",
        probe_heatmaps(table),
        table,
        f"R² of linear probes for each statistic at every site ({who}), the strongest of three "
        f"controls, and the difference. {n:,} prompts to fit, as many fresh ones to score; query "
        "token, head states whole.",
        "A statistic is there because of training only where selectivity (right) is high: x̄ and ȳ "
        "are linear in the prompt and easy in any network. The closed form needs V in a norm scale "
        "and C in a head state of the last layer.",
        f"Heatmaps of probe R². {alt}.",
    )
    columns = ["site", "statistic", "r2", "ci_low", "ci_high", "r2_input", "r2_untrained"]
    shown = best[[*columns, "r2_shuffled", "selectivity"]]
    words = {"site": shown.site.map(site_label), "statistic": shown.statistic.map(statistic_label)}
    shown = shown.assign(**words)
    shown = shown.rename(columns=_HEADINGS)
    return [chart, Listing(shown, "Where each statistic is most selectively readable.")]


def division_blocks(subject: Subject, n: int, seed: int) -> list[Block]:
    """Whether layer norm divides by V: its scale followed, and swapped between prompts."""
    model, prompts = subject.model, subject.prompts
    if model.cfg.normalization == "none":
        return ["Not applicable: the model has no layer norm, so nothing in it divides."]
    generator = torch.Generator().manual_seed(seed)
    points = scale_points(model, prompts, n_prompts=_POINTS, generator=generator)
    law = scale_law(points, generator)
    blocks: list[Block] = [
        Chart(
            "norm_scale",
            scale_panels(points),
            points,
            f"Layer-norm scale at the query against the variance of x, {_POINTS} prompts, "
            f"{subject.name}.",
            "Both axes are logarithmic. A layer that divides by V follows the line of slope 1, one "
            "that only centres stays flat. A narrow cloud from left to right means that V hardly "
            "varies on these prompts.",
            "Scatter of norm scale against variance by layer; log-log slopes "
            + ", ".join(f"{row.slope:.2f} (R² {row.r2:.2f})" for row in law.itertuples()),
        )
    ]
    if prompts.n_covariates == 1:
        table = division_test(model, prompts, n_prompts=n, generator=generator)
        caption = (
            f"Division test: change of the prediction when layer-norm scales are exchanged between "
            f"{n:,} pairs of prompts, against the change that division by V predicts. 1 and 1 mean "
            "that the norm divides by V; R² near 0 that it does not."
        )
        blocks.append(Listing(table.rename(columns=_HEADINGS), caption))
        if model.cfg.normalization != "branch":
            return blocks
        table = residual_division_test(model, prompts, n_prompts=n, generator=generator)
        caption = (
            "Residual division test: the same with x′ and y′ as the stream holds them at the "
            "layer. Share: of the fit, left to the division; step: γ, where layers before have "
            "taken x to (1 − γ V)(x − x̄)."
        )
        return [*blocks, Listing(table.rename(columns=_HEADINGS), caption)]
    table = pivot_test(model, prompts, n_prompts=n, generator=generator)
    found = pivot_label(table) or "no order of pivots is spelled out"
    columns = [
        "layer",
        "candidate",
        "r2",
        "ci_low",
        "ci_high",
        "slope",
        "margin",
        "swap_r2",
        "best",
    ]
    top = table.sort_values(["layer", "r2"], ascending=[True, False]).groupby("layer").head(4)
    caption = f"Pivot test: what the scale of each layer follows, the best four; {found}."
    return [*blocks, Listing(top[columns].rename(columns=_HEADINGS), caption)]


def weight_blocks(subject: Subject, seed: int) -> list[Block]:
    """Weights and circuit beside the nearest construction."""
    model = subject.model
    if not has_construction(model):
        return ["Not applicable: the construction has another size or placement of the norm."]
    family = ConstructionFamily.for_model(model.cfg)
    found = {
        level: align(model, family, level, prompt_config=subject.prompts, seed=seed)
        for level in _LEVELS
    }
    permuted, gauge = found["signed_permutation"], found["gauge"]
    circuits = {
        f"{subject.name}, permuted": circuit_edges(permuted.model, family.names),
        "nearest construction": circuit_edges(permuted.reference, family.names),
    }
    panels = {
        "permuted": permuted.model,
        "all symmetries": gauge.model,
        "construction": gauge.reference,
    }
    scores = ", ".join(
        f"{level.replace('_', ' ')} {one.score:.2f} (p = {one.p_value:.3f})"
        for level, one in found.items()
    )
    weights = pd.concat([one.table.assign(level=level) for level, one in found.items()])
    table = pd.DataFrame(
        {
            "level": level.replace("_", " "),
            "score": one.score,
            "p": one.p_value,
            "null, 95 %": float(one.null.groupby("kind").score.quantile(0.95).max()),
            "mapping": "; ".join(one.words),
        }
        for level, one in found.items()
    )
    return [
        Chart(
            "circuit",
            circuit_panels(circuits),
            pd.concat([edges.assign(model=title) for title, edges in circuits.items()]),
            f"The forward pass of {subject.name}, its coordinates renamed and flipped to match, "
            "beside the nearest construction.",
            "Left to right: the prompt's columns enter lanes, heads read lanes (query, keys, "
            "values) and write through layer norm, the last lane is read out. Line width is the "
            "weight relative to the widest of its kind; pale heads contribute less than 2 % of "
            "their layer.",
            "Circuit diagrams of the learned model and the construction side by side.",
        ),
        Chart(
            "weights",
            weight_panels(panels, family.names),
            weights,
            "Embedding, heads and readout after renaming coordinates, after the best symmetry of "
            "the weights, and of the nearest construction, each matrix over its largest entry.",
            "Compare rows: equal colours in equal places mean equal weights. A (reading) acts from "
            "row to column coordinate, B (writing) sends row to column. The construction leaves "
            "freedom in what stands for the constant, so that raw weights may differ where the "
            "computation does not.",
            f"Heatmaps of weights; alignment scores: {scores}.",
        ),
        Chart(
            "null",
            null_panel(list(found.values())).figure,
            pd.concat([one.null.assign(level=level) for level, one in found.items()]),
            "Alignment score at each level (diamond) beside scores of models that did not learn "
            "the construction.",
            "A diamond far above both clouds is an agreement that chance and other algorithms do "
            "not give. 1 means identical at that level.",
            f"Alignment scores with null distributions: {scores}.",
        ),
        Listing(table, "Alignment with the nearest construction; p against the null models."),
    ]


def rival_blocks(verdict: Verdict) -> list[Block]:
    """The verdict with its evidence."""
    best, evidence = verdict.findings.best, verdict.evidence
    distances = evidence[evidence.measure == "distance"].merge(
        best[["algorithm", *_RIVAL]], on=_RIVAL
    )
    names = best.algorithm + [f" ({k})" if k > 1 else "" for k in best.k]
    label = dict(zip(best.algorithm, names, strict=True))
    columns = distances.condition.unique()
    wide = distances.pivot_table(index="algorithm", columns="condition", values="value", sort=False)
    wide = wide.loc[best.algorithm, columns].rename(index=label)
    ax = new_axes(TWO_COLUMNS, 0.9 + 0.26 * len(wide))
    agreement = -np.log10(wide.clip(1e-6, 1))
    heatmap(
        agreement,
        ax,
        limit=6,
        labels=wide.map(lambda value: f"{value:.0e}"),
        colorbar_label="decades of agreement",
    )
    ax.tick_params(axis="x", rotation=35)
    shown = best[["algorithm", "family", "k", "score", "distance"]]
    others = evidence[evidence.measure != "distance"]
    others = others[["measure", "condition", "family", "value", "ci_low", "ci_high"]].fillna("")
    return [
        verdict.words,
        Chart(
            "rivals",
            ax.figure,
            distances.drop(columns="measure"),
            "Share of the variance of the model's predictions that the best rival of each "
            "algorithm leaves unexplained, in distribution and under shifts.",
            "Brighter is closer; 1e-03 means that a tenth of a percent of the variance is left. An "
            "algorithm is a good description if its whole row is bright.",
            "Heatmap of distances to rivals: "
            + ", ".join(f"{row.algorithm} {row.distance:.1e}" for row in best.itertuples()),
        ),
        Listing(
            shown, "Best rival of each algorithm; score: mean log10 distance, lower is closer."
        ),
        Listing(
            others.rename(columns=_HEADINGS),
            "Further measurements, with 95 % intervals where they apply.",
        ),
    ]


def curves_of(name: str, family: str, record: Mapping[str, Any]) -> pd.DataFrame:
    """Training curves of one model from its training.json; empty if it holds none."""
    loss, sparsity = record.get("loss_curve"), record.get("sparsity_curve")
    if not loss or not sparsity:
        return pd.DataFrame(columns=["model", "family", "step", "loss", "zero"])
    columns = {"step": loss["step"], "loss": loss["loss"], "zero": sparsity["zero"]}
    curves = pd.DataFrame({"model": name, "family": family, **columns})
    return curves[:: max(1, len(curves) // _CURVE_POINTS)]


def training_chart(curves: pd.DataFrame) -> Chart:
    """Loss and sparsity along training."""
    return Chart(
        "training",
        training_panels(curves),
        curves,
        "Training loss and share of weights that are exactly zero, one line per model.",
        "Axes of steps are logarithmic. The penalty grows over the first part of training; zeros "
        "are exact because the optimizer's step is proximal.",
        f"Training curves of {curves.model.nunique()} model(s).",
    )


def method_blocks() -> list[Block]:
    """How everything was measured."""
    return [Markup((Path(__file__).parent / "report_method.html").read_text(encoding="utf-8"))]


def provenance_blocks(hashes: Mapping[str, str], seed: int) -> list[Block]:
    """Versions, seed and hashes."""
    table = pd.DataFrame(hashes.items(), columns=["checkpoint", "SHA-256 of its files"])
    return [
        facts({"seed": seed, **versions()}, "Seed and versions."),
        Listing(table, "The checkpoint's configuration and weights."),
    ]
