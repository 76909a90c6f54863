"""Figures of many models, from the tables of `probe.subjects.survey`."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import PALETTE, TWO_COLUMNS, new_axes

# Measure -> (axis label, whether its axis is logarithmic, measure of its control).
MEASURES = {
    "normalised_mse": ("MSE / variance of target", True, None),
    "zero_share": ("share of exact zeros", False, None),
    "active_heads": ("active heads, all layers", False, None),
    "probe_V": ("probe R² of V, norm scale", False, "probe_V_control"),
    "probe_C": ("probe R² of C, head state", False, "probe_C_control"),
    "division_r2": ("division test R²", False, None),
    "division_slope": ("division test slope", False, None),
    "residual_r2": ("residual division R²", False, None),
    "residual_slope": ("residual division slope", False, None),
    "alignment": ("functional alignment", False, None),
}
MARKERS = "osD^v"
# Spread of the points of one group, so that they do not hide one another.
_JITTER = np.random.default_rng(0).uniform(-0.12, 0.12, 1000)


def path_panels(scores: pd.DataFrame) -> Figure:
    """One panel per measure along the l1 weight."""
    figure, axes = plt.subplots(2, 5, figsize=(TWO_COLUMNS + 1, 3.6), sharex=True)
    for ax, measure in zip(axes.flat, MEASURES, strict=True):
        path(scores, measure, ax)
    figure.supxlabel("l1 weight", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def path(scores: pd.DataFrame, measure: str, ax: Axes | None = None) -> Axes:
    """One measure along the l1 weight: a point per model, a line through the medians.

    Args:
        scores: a row per model.
        measure: one of `MEASURES`.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(ax=ax)
    label, logarithmic, control = MEASURES[measure]
    groups = scores.groupby("distribution", sort=False)
    styles = zip(cycle(PALETTE), cycle(MARKERS), strict=False)
    for k, ((distribution, group), (colour, marker)) in enumerate(
        zip(groups, styles, strict=False)
    ):
        # Groups side by side, so that points do not hide one another.
        shift = 1.06 ** (k - (groups.ngroups - 1) / 2)
        dots = {"marker": marker, "color": colour, "s": 9, "lw": 0, "alpha": 0.6}
        ax.scatter(group.l1 * shift, group[measure], label=distribution, **dots)
        median = group.groupby("l1")[measure].median()
        ax.plot(median.index * shift, median, color=colour, lw=1)
        if control:
            at = group.groupby("l1")[control].median()
            ax.plot(at.index * shift, at, color=colour, lw=1, ls=":", marker="x", ms=3)
    ax.set_xscale("log")
    ax.set_xticks(np.sort(scores.l1.unique()), [f"{l1:g}" for l1 in np.sort(scores.l1.unique())])
    ax.minorticks_off()
    ax.tick_params(axis="x", rotation=45)
    ax.set_title(label, fontsize=7)
    if logarithmic:
        ax.set_yscale("log")
    elif measure.endswith("_slope"):
        ax.set_yscale("symlog")  # linear up to 1; single models overshoot tenfold
        ax.set_yticks([-1, 0, 1, 10], ["−1", "0", "1", "10"])
    elif measure == "active_heads":
        most = int(scores.loc[:, measure].max())
        ax.set(yticks=range(most + 1), ylim=(-0.2, most + 0.3))
    else:
        ax.set_ylim(min(-0.05, ax.get_ylim()[0]), 1.05)
    return ax


def verdict_strips(scores: pd.DataFrame) -> Figure:
    """R² of both division tests of each model with its interval, by family, marked by verdict.

    Args:
        scores: rows with family, verdict and, for division and residual, _r2, _low, _high.
    """
    figure, axes = plt.subplots(2, 1, figsize=(TWO_COLUMNS, 4.4), sharex=True)
    for ax, test in zip(axes, ("division", "residual"), strict=True):
        verdict_strip(scores, test, ax)
    axes[0].legend(title="verdict", frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    return figure


def verdict_strip(scores: pd.DataFrame, test: str, ax: Axes) -> Axes:
    """One panel of `verdict_strips`."""
    families = list(scores["family"].unique())
    verdicts = sorted(scores["verdict"].unique())
    for k, verdict in enumerate(verdicts):
        rows = scores.loc[(scores["verdict"] == verdict) & scores[f"{test}_r2"].notna()]
        at = rows["family"].map(families.index) + _JITTER[rows.index]
        reach = (rows[[f"{test}_low", f"{test}_high"]].T - rows[f"{test}_r2"]).abs()
        ax.errorbar(
            at,
            rows[f"{test}_r2"],
            reach,
            fmt=MARKERS[k % len(MARKERS)],
            color=PALETTE[k % len(PALETTE)],
            ms=4,
            elinewidth=0.6,
            label=verdict,
        )
    ax.set_xticks(range(len(families)), families)
    label = {"division": "division test R²", "residual": "residual division R²"}[test]
    ax.set(ylabel=label, ylim=(-0.03, 1.03), xlim=(-0.5, len(families) - 0.5))
    return ax


def training_panels(curves: pd.DataFrame) -> Figure:
    """Loss and share of zero weights along training, one line per model, coloured by family.

    Args:
        curves: columns model, family, step, loss, zero.
    """
    figure, axes = plt.subplots(1, 2, figsize=(TWO_COLUMNS, 2.4))
    styles = dict(zip(curves["family"].unique(), cycle(PALETTE), strict=False))
    for ax, measure in zip(axes, ("loss", "zero"), strict=True):
        for _, line in curves.groupby(["family", "model"], sort=False):
            family = line["family"].iloc[0]
            ax.plot(line["step"], line[measure], color=styles[family], lw=0.6, label=family)
        ax.set(xlabel="step", xscale="log")
    axes[0].set(ylabel="training loss, penalty not counted", yscale="log")
    axes[1].set(ylabel="share of exact zeros", ylim=(-0.02, 1.02))
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return figure
