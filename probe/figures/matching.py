"""Figures of alignments and read-outs, from what `align` and `read_out` return."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.readout import _WORTH_SHOWING
from probe.figures.style import PALETTE, TWO_COLUMNS, heatmap, new_axes
from probe.matching.alignment import Alignment


def weight_panels(tables: Mapping[str, Mapping[str, pd.DataFrame]]) -> Figure:
    """Weights of aligned models below each other, layer by layer, one colour scale, named axes.

    Every matrix is divided by its largest entry, since its scale is free. A reads from
    row and column coordinate, B sends row to column.

    Args:
        tables: label -> `weight_tables` of a model, all of one shape in the same coordinates.
    """
    first = next(iter(tables.values()))
    inputs, *circuits, readout = first
    n_coordinates = len(first[inputs].columns)
    by_layer = itertools.groupby(circuits, key=lambda title: title.rsplit(" ", 1)[0])
    layers: list[list[str | None]] = [[None, *own] for _, own in by_layer]
    # W_in stands beside the first layer, W_out beside the last.
    layers[0][0] = inputs
    layers[-1][0] = readout
    n_rows = len(layers) * len(tables)
    width = 0.26 * n_coordinates * len(layers[0])
    figure, axes = plt.subplots(
        n_rows,
        len(layers[0]),
        figsize=(max(TWO_COLUMNS, width), 0.22 * (n_coordinates + 1) * n_rows),
        squeeze=False,
    )
    rows = itertools.product(layers, tables.items())
    for row, (titles, (label, panels)) in zip(axes, rows, strict=True):
        for ax, title in zip(row, titles, strict=True):
            if title is None:
                ax.set_axis_off()
                continue
            table = panels[title]
            heatmap(table, ax, signed=True, labels=_texts(table), colorbar=ax is row[-1])
            ax.tick_params(labelsize=5)
            if label == next(iter(tables)):
                ax.set_title(title)
        row[1].set_ylabel(label.replace(", ", ",\n"), fontsize=6)
    return figure


def layer_map_panels(tables: Mapping[str, Sequence[pd.DataFrame]]) -> Figure:
    """Layer maps of aligned models side by side, one row per layer, one colour scale.

    Rows that are small in every model are left out.

    Args:
        tables: label -> `layer_map_tables` of a model, all in the same coordinates.
    """
    first = next(iter(tables.values()))
    n_layers, n_coordinates = len(first), round(len(first[0]) ** 0.5)
    shown = []
    for layer in range(n_layers):
        largest = pd.concat([maps[layer].abs().max(axis=1) for maps in tables.values()], axis=1)
        shown.append(largest.index[largest.max(axis=1) > _WORTH_SHOWING])
    heights = [len(rows) for rows in shown]
    figure, axes = plt.subplots(
        n_layers,
        len(tables),
        figsize=(TWO_COLUMNS * max(1.0, n_coordinates / 4), 0.2 * sum(heights) + 0.9 * n_layers),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for layer, rows in enumerate(shown):
        for ax, (label, maps) in zip(axes[layer], tables.items(), strict=True):
            table = maps[layer].loc[rows]
            heatmap(table, ax, signed=True, labels=_texts(table), colorbar=ax is axes[layer][-1])
            ax.set_title(f"layer {layer}, {label}")
            ax.tick_params(labelsize=5)
    return figure


def _texts(table: pd.DataFrame) -> pd.DataFrame:
    """Cells to one digit; what rounds to nothing stays empty."""
    return table.map(lambda value: f"{value:.1f}" if abs(value) >= 0.05 else "")


def null_panel(alignments: Sequence[Alignment], ax: Axes | None = None) -> Axes:
    """Scores of one model at each level, beside their null distributions."""
    frames = [one.null.assign(level=one.level) for one in alignments]
    ax = new_axes(ax=ax)
    sns.stripplot(
        pd.concat(frames),
        x="level",
        y="score",
        hue="kind",
        dodge=True,
        size=2,
        ax=ax,
        palette=list(PALETTE[1:3]),
    )
    for position, one in enumerate(alignments):
        ax.plot(position, one.score, "D", color=PALETTE[0], ms=5)
        text = f"p = {one.p_value:.3f}"
        ax.annotate(text, (position, one.score), (5, 0), textcoords="offset points", fontsize=6)
    ax.set(xlabel="", ylabel="alignment score", ylim=(-0.02, 1.08))
    ax.legend(title="", loc="lower right", frameon=False)
    return ax


def score_panels(scores: pd.DataFrame) -> Figure:
    """Scores of many alignments, one row per family, one panel per level.

    Filled where p ≤ 0.05; beside each row, how many of how many.

    Args:
        scores: columns level, score, p_value, family.
    """
    levels, families = (list(scores[name].unique()) for name in ("level", "family"))
    figure, axes = plt.subplots(
        1,
        len(levels),
        figsize=(TWO_COLUMNS, 0.8 + 0.22 * len(families)),
        sharey=True,
        squeeze=False,
    )
    for ax, level, color in zip(axes[0], levels, PALETTE, strict=False):
        for height, family in enumerate(families):
            mine = scores.loc[(scores["level"] == level) & (scores["family"] == family)]
            y = height + np.linspace(-0.25, 0.25, len(mine) + 2)[1:-1]
            significant = (mine["p_value"] <= 0.05).to_numpy()
            faces = np.where(significant, color, "none")
            ax.scatter(mine["score"], y, s=9, facecolors=faces, edgecolors=color, linewidths=0.6)
            count = f"{significant.sum()}/{len(mine)}"
            ax.annotate(count, (1.02, height), fontsize=6, va="center", annotation_clip=False)
        ax.set(title=level, xlabel="score", xlim=(-0.02, 1.02))
        ax.grid(axis="y", lw=0.3)
    axes[0][0].set_yticks(range(len(families)), families)
    axes[0][0].invert_yaxis()
    return figure


def pair_panels(pairs: pd.DataFrame) -> Figure:
    """Scores of every model (row) aligned to every other (column), one panel per level."""
    levels = list(pairs["level"].unique())
    size = pairs["checkpoint"].nunique()
    width = max(TWO_COLUMNS, 0.3 * size * len(levels))
    figure, axes = plt.subplots(
        1, len(levels), figsize=(width, width / len(levels) + 0.8), squeeze=False, sharey=True
    )
    for ax, level in zip(axes[0], levels, strict=True):
        mine = pairs[pairs["level"] == level]
        table = mine.pivot(index="checkpoint", columns="reference", values="score")
        marks = mine.pivot(index="checkpoint", columns="reference", values="p_value")
        texts = marks.map(lambda p: "" if np.isnan(p) else "*" if p <= 0.05 else "")
        last = ax is axes[0][-1]
        heatmap(table, ax, labels=texts, colorbar=last, colorbar_label="score (*: p ≤ 0.05)")
        ax.set_title(level)
        ax.set_xlabel("reference")
    axes[0][0].set_ylabel("model")
    return figure
