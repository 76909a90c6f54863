"""What a report says about one model, section by section, as blocks of a page.

The tables come from `probe.subjects.one_model`; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from models.architecture.sites import Studied
from probe.figures.circuit import circuit_panels
from probe.figures.matching import null_panel, weight_panels
from probe.figures.norms import scale_panels
from probe.figures.probes import probe_heatmaps
from probe.figures.readout import quantity_columns, read_out_panel
from probe.figures.style import TWO_COLUMNS, figure_of, heatmap, new_axes
from probe.figures.survey import training_panels
from probe.quantities.statistics import statistic_label
from probe.report.page import Block, Chart, Listing
from probe.report.script import versions
from probe.subjects.one_model import Division, Study
from probe.verdict.verdict import Verdict

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


def titles(model: Studied, names: pd.Series) -> pd.Series:
    """Names of sites as a reader says them."""
    return names.map({name: site.title for name, site in model.sites.items()})


def read_out_blocks(study: Study) -> list[Block]:
    """What each coordinate holds."""
    subject, table = study.subject, study.read_out
    quantities = quantity_columns(table)
    words = pd.DataFrame(
        {
            "site": titles(subject.model, table.site),
            "in words": table.words.str.replace(r", R² .*$", "", regex=True),
            "R²": table.r2,
        }
    )
    chart = Chart(
        "read_out",
        figure_of(read_out_panel(table)),
        table.loc[:, ["site", "coordinate", "r2", *quantities]],
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
    table: pd.DataFrame, model: Studied, n_models: int, n_train: int, n_test: int
) -> list[Block]:
    """Probes of every site with their controls.

    Args:
        table: of `probe.fit_probes`.
        model: one of the probed ones, for the names of sites.
        n_models: how many were probed.
        n_train: prompts the probes were fitted on.
        n_test: prompts they were scored on.
    """
    scored = "as many" if n_test == n_train else f"{n_test:,}"
    who = f"mean over {n_models} models" if n_models > 1 else "one model"
    best = table.loc[table.groupby("statistic", sort=False).selectivity.idxmax().dropna()]
    best = best.assign(title=titles(model, best.site))
    alt = "; ".join(
        f"{statistic_label(row.statistic)} best at {row.title}, R² {row.r2:.2f}, "
        f"selectivity {row.selectivity:.2f}"
        for row in best.itertuples()
    )
    chart = Chart(
        "probes",
        probe_heatmaps(table),
        table,
        f"R² of linear probes for each statistic at every site ({who}), the strongest of three "
        f"controls, and the difference. {n_train:,} prompts to fit, {scored} fresh ones to score; "
        "query token, head states whole.",
        "A statistic is there because of training only where selectivity (right) is high: x̄ and ȳ "
        "are linear in the prompt and easy in any network. The closed form needs V in a norm scale "
        "and C in a head state of the last layer.",
        f"Heatmaps of probe R². {alt}.",
    )
    columns = ["site", "statistic", "r2", "ci_low", "ci_high", "r2_input", "r2_untrained"]
    shown = best[[*columns, "r2_shuffled", "selectivity"]]
    words = {"site": best.title, "statistic": shown.statistic.map(statistic_label)}
    shown = shown.assign(**words)
    shown = shown.rename(columns=_HEADINGS)
    return [chart, Listing(shown, "Where each statistic is most selectively readable.")]


def division_blocks(study: Study) -> list[Block]:
    """Whether layer norm divides by V: its scale followed, and swapped between prompts."""
    found, subject, n = study.division, study.subject, study.n_prompts
    if found is None:
        return ["Not applicable: the model has no layer norm, so nothing in it divides."]
    blocks: list[Block] = [
        Chart(
            "norm_scale",
            scale_panels(found.points),
            found.points,
            f"Layer-norm scale at the query against the variance of x, {_prompts(found)} prompts, "
            f"{subject.name}.",
            "Both axes are logarithmic. A layer that divides by V follows the line of slope 1, one "
            "that only centres stays flat. A narrow cloud from left to right means that V hardly "
            "varies on these prompts.",
            "Scatter of norm scale against variance by layer; log-log slopes "
            + ", ".join(
                f"{slope:.2f} (R² {r2:.2f})"
                for slope, r2 in zip(found.law.slope, found.law.r2, strict=True)
            ),
        )
    ]
    if found.at_once is not None:
        caption = (
            f"Division test: change of the prediction when layer-norm scales are exchanged between "
            f"{n:,} pairs of prompts, against the change that division by V predicts. 1 and 1 mean "
            "that the norm divides by V; R² near 0 that it does not."
        )
        blocks.append(Listing(found.at_once.rename(columns=_HEADINGS), caption))
    if found.residual is not None:
        caption = (
            "Residual division test: the same with x′ and y′ as the stream holds them at the "
            "layer. Share: of the fit, left to the division; step: γ, where layers before have "
            "taken x to (1 − γ V)(x − x̄)."
        )
        blocks.append(Listing(found.residual.rename(columns=_HEADINGS), caption))
    if found.pivots is not None:
        blocks.append(_pivot_listing(found.pivots, found.order))
    return blocks


def _prompts(division: Division) -> int:
    """Prompts in the scatter of scales."""
    return int(division.points.prompt.nunique())


def _pivot_listing(table: pd.DataFrame, order: str | None) -> Listing:
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
    said = order or "no order of pivots is spelled out"
    caption = f"Pivot test: what the scale of each layer follows, the best four; {said}."
    return Listing(top.loc[:, columns].rename(columns=_HEADINGS), caption)


def weight_blocks(study: Study) -> list[Block]:
    """Weights and circuit beside the nearest construction."""
    subject, match = study.subject, study.match
    if match is None:
        return ["Not applicable: the construction has another size or placement of the norm."]
    found = match.alignments
    circuits = dict(
        zip((f"{subject.name}, permuted", "nearest construction"), match.edges, strict=True)
    )
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
            weight_panels(match.weights),
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
            figure_of(null_panel(list(found.values()))),
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
    conditions = distances.condition.unique()
    wide = distances.pivot_table(index="algorithm", columns="condition", values="value", sort=False)
    wide = wide.loc[best.algorithm, conditions].rename(index=label)
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
    shown = best.loc[:, ["algorithm", "family", "k", "score", "distance"]]
    columns = ["measure", "condition", "family", "value", "ci_low", "ci_high"]
    others = evidence.loc[evidence.measure != "distance", columns].fillna("")
    return [
        verdict.words,
        Chart(
            "rivals",
            figure_of(ax),
            distances.drop(columns="measure"),
            "Share of the variance of the model's predictions that the best rival of each "
            "algorithm leaves unexplained, in distribution and under shifts.",
            "Brighter is closer; 1e-03 means that a tenth of a percent of the variance is left. An "
            "algorithm is a good description if its whole row is bright.",
            "Heatmap of distances to rivals: "
            + ", ".join(
                f"{algorithm} {distance:.1e}"
                for algorithm, distance in zip(best.algorithm, best.distance, strict=True)
            ),
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
    return curves.iloc[:: max(1, len(curves) // _CURVE_POINTS)]


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
