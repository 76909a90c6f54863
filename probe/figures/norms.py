"""Figures of what layer norm receives, divides by and returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from probe.figures.style import PALETTE, TWO_COLUMNS, new_axes
from probe.quantities.statistics import statistic_label


def scale_scatter(points: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Layer-norm scale against V, log-log, with the construction's line.

    Args:
        points: `scale_points` of one layer and one statistic.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(ax=ax)
    layer, statistic = int(points["layer"].iloc[0]), points["statistic"].iloc[0]
    ax.scatter(points["variance"], points["scale"], s=2, alpha=0.3, lw=0, rasterized=True)
    # The construction centres in layer 0 and divides by the variance of x_k in layer k; the
    # height of its line is free.
    covariate = int(statistic.rpartition("_")[2]) if statistic[-1].isdigit() else 1
    if layer in (0, covariate):
        ends = points["variance"].min(), points["variance"].max()
        middle = points[["variance", "scale"]].median()
        slope = int(layer > 0)
        line = [middle["scale"] * (end / middle["variance"]) ** slope for end in ends]
        ax.plot(ends, line, color=PALETTE[5], lw=1, label=f"construction: slope {slope}")
        ax.legend(frameon=False)
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    ax.set(title=f"layer {layer}", ylabel="norm scale / median")
    ax.set_xlabel(statistic_label(statistic))
    return ax


def scale_panels(points: pd.DataFrame) -> Figure:
    """`scale_scatter` for every layer (rows: statistics), on one scale."""
    layers, statistics = points["layer"].unique(), points["statistic"].unique()
    figure, axes = plt.subplots(
        len(statistics),
        len(layers),
        figsize=(TWO_COLUMNS, 2.4 * len(statistics)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, statistic in zip(axes, statistics, strict=True):
        for ax, layer in zip(row, layers, strict=True):
            mine = (points["layer"] == layer) & (points["statistic"] == statistic)
            scale_scatter(points.loc[mine], ax)
    return figure


def norm_panels(table: pd.DataFrame) -> Figure:
    """Layer-norm inputs and outputs by coordinate, the model beside the construction.

    Dots are medians, thick lines the middle half, thin lines 5 % to 95 % (`norm_statistics`).
    """
    table = table.loc[table["quantity"].isin(["input", "output"])]
    layers = sorted(table["layer"].unique())
    width = TWO_COLUMNS * max(1, len(layers) / 2)
    figure, axes = plt.subplots(
        2, 2 * len(layers), figsize=(width, 3.4), sharey="row", squeeze=False
    )
    for row, quantity in zip(axes, ("input", "output"), strict=True):
        panels = [(layer, source) for layer in layers for source in ("model", "construction")]
        for ax, (layer, source) in zip(row, panels, strict=True):
            mine = table.query("quantity == @quantity and layer == @layer and source == @source")
            at = np.arange(len(mine))
            ax.axhline(0, color="0.8", lw=0.6)
            ax.vlines(at, mine["q05"], mine["q95"], color=PALETTE[0], lw=0.8)
            ax.vlines(at, mine["q25"], mine["q75"], color=PALETTE[0], lw=3)
            ax.plot(at, mine["q50"], "o", color=PALETTE[1], ms=3)
            ax.set_xticks(at, mine["coordinate"], rotation=45 if source == "construction" else 0)
            if quantity == "input":
                ax.set_title(f"layer {layer}, {source}")
        row[0].set_ylabel("input / median scale" if quantity == "input" else "output")
    figure.supxlabel("coordinate", fontsize=8)
    return figure
