"""Figures of alignments and read-outs, from what `align` and `read_out` return."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.transformer import LinearAttentionTransformer
from probe.activations import site_label
from probe.figures import PALETTE, TWO_COLUMNS, heatmap, new_axes
from probe.matching import Alignment
from probe.weights import input_map, weights_of

# Rows of layer maps whose entries stay below this share of the largest are not drawn.
_WORTH_SHOWING = 0.1


def weight_panels(models: dict[str, LinearAttentionTransformer], names: Sequence[str]) -> Figure:
    """Weights of aligned models below each other, layer by layer, one colour scale, named axes.

    Every matrix is divided by its largest entry, since its scale is free. A reads from
    row and column coordinate, B sends row to column.

    Args:
        models: label -> model, all in the same coordinates.
        names: the coordinates.
    """
    tables = {label: weight_tables(model, names) for label, model in models.items()}
    config = next(iter(models.values())).cfg
    # W_in stands beside the first layer, W_out beside the last.
    outer = {0: "W_in", config.n_layers - 1: "W_out"}
    heads = range(config.n_heads)
    layers = [
        [outer.get(layer), *(f"layer {layer} {part}{head}" for head in heads for part in "AB")]
        for layer in range(config.n_layers)
    ]
    width = 0.26 * len(names) * len(layers[0])
    figure, axes = plt.subplots(
        config.n_layers * len(models),
        len(layers[0]),
        figsize=(max(TWO_COLUMNS, width), 0.22 * (len(names) + 1) * config.n_layers * len(models)),
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


def weight_tables(
    model: LinearAttentionTransformer, names: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """W, every A_h and B_h, and the query's W_U as named tables, largest entry 1."""
    weights, config = weights_of(model), model.cfg
    p = config.n_covariates
    inputs = ["1", *(f"x_{j + 1}" for j in range(p)), "y"]
    tables = {"W_in": (input_map(weights), inputs)}
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn."
        circuits = weights[attn + "W_Q"] @ weights[attn + "W_K"].mT
        values = weights[attn + "W_V"]
        # What layer norm subtracts is not shown.
        values = values - values.mean(-1, keepdim=True) * (config.normalization != "none")
        for head in range(config.n_heads):
            tables[f"layer {layer} A{head}"] = (circuits[head], names)
            tables[f"layer {layer} B{head}"] = (values[head], names)
    tables["W_out"] = (weights["unembed.W_U"][-1:], ["query"])
    return {
        title: pd.DataFrame(
            (value / value.abs().max().clamp(min=1e-300)).numpy(), index=rows, columns=names
        )
        for title, (value, rows) in tables.items()
    }


def layer_map_panels(models: dict[str, LinearAttentionTransformer], names: Sequence[str]) -> Figure:
    """Layer maps of aligned models side by side, one row per layer, one colour scale.

    Rows that are small in every model are left out.

    Args:
        models: label -> model, all in the same coordinates.
        names: the coordinates.
    """
    tables = {label: layer_map_tables(model, names) for label, model in models.items()}
    n_layers = len(next(iter(tables.values())))
    shown = []
    for layer in range(n_layers):
        largest = pd.concat([maps[layer].abs().max(axis=1) for maps in tables.values()], axis=1)
        shown.append(largest.index[largest.max(axis=1) > _WORTH_SHOWING])
    heights = [len(rows) for rows in shown]
    figure, axes = plt.subplots(
        n_layers,
        len(models),
        figsize=(TWO_COLUMNS * max(1.0, len(names) / 4), 0.2 * sum(heights) + 0.9 * n_layers),
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


def layer_map_tables(model: LinearAttentionTransformer, names: Sequence[str]) -> list[pd.DataFrame]:
    """Per layer, what coordinate i of a token times S_jk adds to coordinate l, largest entry 1.

    Rows "i→l", columns "S[j,k]". Unlike A_h and B_h this is the same for all ways to
    split the layer into heads, and for exchanged keys and values (S is symmetric).
    """
    weights, config = weights_of(model), model.cfg
    first, second = torch.triu_indices(config.d_model, config.d_model)
    columns = [f"S[{names[j]},{names[k]}]" for j, k in zip(first, second, strict=True)]
    rows = [f"{one}→{other}" for one in names for other in names]
    tables = []
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn."
        circuits = weights[attn + "W_Q"] @ weights[attn + "W_K"].mT
        values = weights[attn + "W_V"]
        values = values - values.mean(-1, keepdim=True) * (config.normalization != "none")
        tensor = torch.einsum("hij,hkl->iljk", circuits, values)
        tensor = (tensor + tensor.mT)[..., first, second] / (1 + (first == second))
        tensor = tensor / tensor.abs().max().clamp(min=1e-300)
        tables.append(pd.DataFrame(tensor.flatten(0, 1).numpy(), index=rows, columns=columns))
    return tables


def _texts(table: pd.DataFrame) -> pd.DataFrame:
    """Cells to one digit; what rounds to nothing stays empty."""
    return table.map(lambda value: f"{value:.1f}" if abs(value) >= 0.05 else "")


def read_out_panel(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Read-out as a heatmap: coefficients as text, colour by share of the row's largest."""
    quantities = quantity_columns(table)
    values = table[quantities].copy()
    values.index = [
        f"{site_label(site)}, {c}   R² {r2:.2f}"
        for site, c, r2 in zip(table["site"], table["coordinate"], table["r2"], strict=True)
    ]
    ax = new_axes(TWO_COLUMNS, 0.22 * len(values) + 0.8, ax)
    shares = values.div(values.abs().max(axis=1), axis=0)
    texts = values.map(lambda value: "" if np.isnan(value) else f"{value:.2f}")
    heatmap(shares, ax, signed=True, labels=texts, colorbar_label="coefficient / row's largest")
    ax.xaxis.tick_top()
    return ax


def quantity_columns(table: pd.DataFrame) -> list[str]:
    """Names of the quantities in a `read_out` table."""
    columns = list(table.columns)
    return [c for c in columns if f"{c}_low" in columns and f"{c}_high" in columns]


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
            mine = scores[(scores["level"] == level) & (scores["family"] == family)]
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
