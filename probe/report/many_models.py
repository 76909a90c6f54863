"""What a report says about many models, as blocks of a page (tables: `probe.subjects`)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from probe.figures.style import figure_of, tall_heatmap
from probe.figures.survey import path_panels, verdict_strips
from probe.figures.verdict import DECADES
from probe.report.page import Chart, Listing
from probe.report.words import model_in_words, prompts_in_words
from probe.subjects.counts import normalization_shares
from probe.subjects.survey import Trained
from probe.verdict.kinds import KINDS, NORMALIZATION
from probe.verdict.thresholds import THRESHOLDS
from probe.verdict.verdict import Verdict


def zoo_claim(scores: pd.DataFrame) -> str:
    """The result in one sentence, with a Wilson interval per distribution."""
    parts = [
        f"{row['found']} of {row['models']} on “{row['distribution']}” prompts "
        f"({row['ci_low']:.0%} to {row['ci_high']:.0%})"
        for row in normalization_shares(scores).to_dict("records")
    ]
    return (
        f"Models that compute least squares in closed form, with layer norm doing the division by "
        f"the variance (of x, or of what a step of gradient descent has left of it): "
        f"{', '.join(parts)}; ranges are 95 % intervals of the share."
    )


def explanation(scores: pd.DataFrame) -> str:
    """What the other verdicts are, in a sentence."""
    rest = scores[scores.verdict != NORMALIZATION].verdict.value_counts()
    kinds = ", ".join(f"{count} “{kind}”" for kind, count in rest.items()) or "none"
    found = len(scores) - rest.sum()
    return (
        f"Of the {len(scores)} models, {found} are “{NORMALIZATION}”; the others: {kinds}. "
        "“Undecided” means that a measurement lies between the threshold at which a "
        "finding is accepted and the one at which it is rejected."
    )


def studied(zoo: Sequence[Trained], scores: pd.DataFrame) -> list[str | Listing]:
    """Models and prompts, one row per distribution."""
    rows = []
    for distribution, group in scores.groupby("distribution", sort=False):
        own = [each for each in zoo if each.distribution == distribution]
        rows.append(
            {
                "distribution": distribution,
                "prompts": prompts_in_words(own[0].subject.prompts),
                "models": len(group),
                "training steps": ", ".join(
                    sorted({str(each.subject.record.get("steps", "–")) for each in own})
                ),
                "median MSE / variance": group.normalised_mse.median(),
                "worst": group.normalised_mse.max(),
            }
        )
    caption = "Models by prompt distribution; the error is against least squares, fresh prompts."
    shapes = {model_in_words(each.subject.model) for each in zoo}
    return [f"Shape: {'; '.join(sorted(shapes))}.", Listing(pd.DataFrame(rows), caption)]


def read_out_chart(zoo: Sequence[Trained], read: pd.DataFrame, scores: pd.DataFrame) -> Chart:
    """R² of the read-out of every model at every site.

    Args:
        zoo: the models.
        read: of `probe.subjects.survey.read_outs`.
        scores: a row per model with its verdict.
    """
    verdict_of = dict(zip(scores.name, scores.verdict, strict=True))
    data = read.assign(verdict=read.model.map(verdict_of))
    data = data.loc[:, ["model", "verdict", "site", "mean_r2"]]
    order = scores.assign(kind=scores.verdict.map(KINDS.index))
    order = order.sort_values(["kind", "division_r2"], ascending=[True, False]).name
    wide = data.pivot(index="model", columns="site", values="mean_r2")
    sites = {name: site for each in zoo for name, site in each.subject.model.sites.items()}
    wide = wide.loc[order, data.site.unique()].rename(columns=lambda name: sites[name].title)
    wide = wide.rename(index=lambda name: f"{name} ({_SHORT[verdict_of[name]]})")
    ax = tall_heatmap(wide, fmt=".2f", colorbar_label="mean R² over coordinates")
    return Chart(
        "read_out_all",
        figure_of(ax),
        data,
        "How well named quantities describe the coordinates of every model, after each block and "
        "at each layer-norm output: R² on fresh prompts, mean over coordinates.",
        "Models are sorted by verdict (n: closed form by normalization, m: closed form by another "
        "mechanism, u: undecided, o: anything else), then by division test. Rows that stay bright "
        "through the last layer hold what the construction would hold; coordinates that hardly "
        "vary lower the mean.",
        "Heatmap of read-out R² by model and site.",
    )


def strip_chart(scores: pd.DataFrame) -> Chart:
    """The division test of all models."""
    columns = ["name", "family", "verdict"]
    for test in ("division", "residual"):
        columns += [f"{test}_{end}" for end in ("r2", "low", "high", "slope", "layer")]
    columns += ["residual_share", "residual_step"]
    return Chart(
        "division_all",
        verdict_strips(scores),
        scores.loc[:, columns].replace("\n", ", ", regex=True),
        "R² of both division tests at their best layer for every model, with 95 % intervals, by "
        "distribution and penalty; marks are verdicts.",
        "Above, 1: exchanging layer-norm scales between prompts moves predictions as a division by "
        "the V of the samples would; 0: it does not. Below, the same with the variance of x as the "
        "stream holds it at that layer, after a step of gradient descent before it. Spread within "
        "a column is between seeds.",
        "Strip plot of division test R²; medians "
        + ", ".join(
            f"{str(family).replace(chr(10), ' ')} {group.division_r2.median():.2f}"
            for family, group in scores.groupby("family", sort=False)
        ),
    )


def rival_chart(zoo: Sequence[Trained], verdicts: Sequence[Verdict]) -> Chart:
    """Score of the best rival of each algorithm for every model."""
    frames = [
        verdict.findings.best.assign(model=each.subject.name, verdict=verdict.kind)
        for each, verdict in zip(zoo, verdicts, strict=True)
    ]
    columns = ["model", "verdict", "algorithm", "family", "k", "score", "distance"]
    data = pd.concat(frames).loc[:, columns]
    wide = -data.pivot(index="model", columns="algorithm", values="score")
    wide = wide.loc[[each.subject.name for each in zoo], data.algorithm.unique()]
    ax = tall_heatmap(wide, fmt=".1f", limit=DECADES, colorbar_label="decades of agreement")
    return Chart(
        "rivals_all",
        figure_of(ax),
        data,
        "Agreement with the best rival of each algorithm: minus log10 of the share of variance it "
        "leaves unexplained, mean over prompts in distribution and shifted.",
        "At 2 a rival leaves 1 % unexplained; brighter cells are closer. Newton, ridge and "
        "gradient descent approach least squares in a limit and come as close as it where they "
        "have converged; they are "
        f"named only where they beat it by {THRESHOLDS['lead']:.1f} decades.",
        "Heatmap of agreement by model; least squares has median "
        f"{wide['least squares'].median():.1f}.",
    )


def every_model(scores: pd.DataFrame) -> Listing:
    """One row per model."""
    shown = pd.DataFrame(
        {
            "model": scores.name,
            "verdict": scores.verdict,
            "MSE": scores.normalised_mse,
            "zeros": scores.zero_share,
            "heads": scores.active_heads,
            "V": scores.probe_V,
            "C": scores.probe_C,
            "division R²": scores.division_r2,
            "low": scores.division_low,
            "high": scores.division_high,
            "slope": scores.division_slope,
            "residual R²": scores.residual_r2,
            "residual slope": scores.residual_slope,
            "left": scores.residual_share,
            "alignment": scores.alignment,
            "p": scores.alignment_p,
        }
    )
    caption = (
        "Every model: error over variance of the target, share of exact zeros, active heads, "
        "probe R² of V in the norm scale and C in the head state, division test with 95 % "
        "interval, residual division test with the share of the fit left to it, functional "
        "alignment with the nearest construction."
    )
    return Listing(shown, caption)


def path_chart(scores: pd.DataFrame) -> Chart:
    """What the penalty does."""
    varied = scores.groupby("distribution").l1.nunique().idxmax()
    medians = scores[scores.distribution == varied].groupby("l1").zero_share.median()
    return Chart(
        "l1_path",
        path_panels(scores),
        scores.drop(columns="family"),
        "Error, exact zeros, active heads, probes, division test and alignment of every model "
        "along its l1 weight; lines join medians over seeds, dotted lines are controls.",
        "Read each panel from left to right: what changes with the penalty, and how much seeds "
        "differ at one penalty.",
        f"Ten panels; the median share of zeros on {varied} prompts is "
        + ", ".join(f"{value:.2f} at {l1:g}" for l1, value in medians.items()),
    )


_SHORT = dict.fromkeys(KINDS, "o") | {
    NORMALIZATION: "n",
    "closed form, other mechanism": "m",
    "undecided": "u",
}
