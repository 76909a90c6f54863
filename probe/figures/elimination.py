"""Figures of `analyses/elimination.py`: shares, coordinates, pivots, errors.

Functions take data and return a figure; `probe.figures.style.save_figure` saves it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import PALETTE, TWO_COLUMNS, heatmap


def shares_figure(by_penalty: pd.DataFrame, by_run: pd.DataFrame, run: str = "p2") -> Figure:
    """Shares of models per class: by l1 penalty on the left, by run on the right.

    Args:
        by_penalty: columns by ("l1 0.001"), class, of, share, low, high.
        by_run: the same with group in place of by, in the order to draw.
        run: whose penalties these are. A side without rows is left out.
    """
    sides = {"by": by_penalty, "group": by_run}
    sides = {axis: rows for axis, rows in sides.items() if len(rows)}
    width = TWO_COLUMNS * len(sides) / 2
    drawing, axes = plt.subplots(1, len(sides), figsize=(width, 2.6), sharey=True, squeeze=False)
    for ax, (axis, rows) in zip(axes[0], sides.items(), strict=True):
        draw_shares(rows, axis, ax)
        ax.set_xlabel(f"l1 penalty ({run})" if axis == "by" else "run")
        if axis == "group":
            ax.tick_params(axis="x", rotation=30)
    axes[0, 0].set_ylabel("share of models")
    axes[0, 0].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.2), ncols=3)
    return drawing


def draw_shares(shares: pd.DataFrame, axis: str, ax: Axes) -> Axes:
    """Points with intervals, one colour per class, at each value of a column."""
    places = list(dict.fromkeys(shares[axis]))
    kinds = list(dict.fromkeys(shares["class"]))
    for offset, kind, colour in zip(
        np.linspace(-0.2, 0.2, len(kinds)), kinds, PALETTE, strict=False
    ):
        part = shares.loc[shares["class"] == kind]
        x = [places.index(value) + offset for value in part[axis]]
        bars = np.abs(part[["low", "high"]].to_numpy().T - part.share.to_numpy())
        style = {"fmt": "o", "ms": 3, "lw": 1, "color": colour, "label": kind}
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
            wide = part.loc[part.layer == layer].pivot(
                index="coordinate", columns="quantity", values="value"
            )
            signed = value == "correlation"
            ax = heatmap(wide, axes[row, column], signed=signed, fmt=".1f", colorbar=False)
            ax.tick_params(axis="x", rotation=90)
        axes[0, column].set_title(title)
    axes[0, 0].set_ylabel("coordinate\n(correlation)")
    axes[1, 0].set_ylabel("all (R²)")
    return drawing


def pivots_figure(pivots: pd.DataFrame, points: pd.DataFrame, untrained: pd.DataFrame) -> Figure:
    """Per layer: the scale against the pivot it follows best, and R² on every candidate.

    Args:
        pivots: `pivot_test` of one model.
        points: its `pivot_points`.
        untrained: `pivot_test` of untrained models.
    """
    layers = sorted(pivots.layer.unique())
    size = (TWO_COLUMNS, 4.4)
    drawing, axes = plt.subplots(2, len(layers), figsize=size, sharey="row", squeeze=False)
    for (above, below), layer in zip(axes.T, layers, strict=True):
        part = pivots.loc[pivots.layer == layer]
        top = part.loc[part.r2.idxmax()]
        shown = points[(points.layer == layer) & (points.candidate == top.candidate)]
        above.scatter(shown.value, shown.scale, s=2, alpha=0.4, color=PALETTE[0], lw=0)
        above.set(xscale="log", yscale="log", xlabel=top.candidate)
        above.xaxis.set_minor_formatter("")
        above.yaxis.set_minor_formatter("")
        above.set_title(f"layer {layer}, " + ("found" if top.best else "no pivot found"))
        places = np.arange(len(part))
        bars = np.abs(part[["ci_low", "ci_high"]].to_numpy().T - part.r2.to_numpy())
        below.bar(places, part.r2, yerr=bars, color=PALETTE[0], width=0.4, label="scale")
        below.bar(places + 0.4, part.step_r2, color=PALETTE[1], width=0.4, label="step (causal)")
        controls = untrained[untrained.layer == layer].groupby("candidate").r2.max()
        highest = controls.reindex(part.candidate)
        below.plot(places, highest, "k_", ms=8, label="untrained, largest")
        below.plot(places, part.shuffled_r2, "x", color=PALETTE[5], ms=3, label="shuffled")
        below.set_xticks(places + 0.2, part.candidate, rotation=60)
        below.set_ylim(0, 1)
    axes[0, 0].set_ylabel("scale / median")
    axes[1, 0].set_ylabel("R²")
    axes[1, 0].legend(frameon=False, loc="upper left")
    return drawing


def errors_figure(errors: pd.DataFrame, rivals: Collection[str]) -> Figure:
    """Error against condition number: models solid, with their range, rivals dashed.

    Args:
        errors: columns who, condition, models, error, low, high.
        rivals: who of them is a rival.
    """
    drawing, ax = plt.subplots(figsize=(TWO_COLUMNS / 1.6, 2.8))
    lines = errors.groupby("who", sort=False)
    for colour, (who, line) in zip(cycle(PALETTE), lines, strict=False):
        models = line.models.iloc[0]
        label = who if models == 1 else f"{who} ({models})"
        dashes = "--" if who in rivals else "-"
        ax.plot(line.condition, line.error, dashes, color=colour, marker=".", lw=1, label=label)
        if models > 1:
            ax.fill_between(line.condition, line.low, line.high, color=colour, alpha=0.15, lw=0)
    ax.set(xscale="log", yscale="log", xlabel="condition number of the covariance of x")
    ax.xaxis.set_minor_formatter("")
    ax.set_ylabel("MSE / variance of target")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawing
