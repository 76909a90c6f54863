"""Figures of verdicts: distance to each rival, verdicts of many models, confusion matrices."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import PALETTE, ROW_HEIGHT, TWO_COLUMNS, heatmap, new_axes, tall_heatmap
from probe.rivals.behaviour import IN_DISTRIBUTION
from probe.verdict.findings import CEILING, FLOOR

# Upper end of the scale of agreement.
DECADES = 3
_MARKERS = "s^vD<>Pp*hX"


def rival_distances(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Distance of one model to each rival, in distribution and under each shift.

    Args:
        table: rows with columns rival (in words, the order of the figure), condition, value,
            ci_low, ci_high.
        ax: where to draw; a new figure by default.
    """
    rivals = list(dict.fromkeys(table.rival))
    ax = new_axes(TWO_COLUMNS, 0.9 + 0.28 * len(rivals), ax)
    shifts = [name for name in dict.fromkeys(table.condition) if name != IN_DISTRIBUTION]
    # Above this a rival has diverged; below the floor distances are rounding.
    low, high = FLOOR, CEILING
    for index, name in enumerate([*shifts, IN_DISTRIBUTION]):
        rows = table.loc[table.condition == name]
        y = [rivals.index(rival) for rival in rows.rival]
        value, bottom, top = (
            np.clip(rows[column].to_numpy(), low, high) for column in ("value", "ci_low", "ci_high")
        )
        here = name == IN_DISTRIBUTION
        ax.errorbar(
            value,
            y,
            xerr=[np.maximum(value - bottom, 0), np.maximum(top - value, 0)] if here else None,
            fmt="o" if here else _MARKERS[index % len(_MARKERS)],
            color=PALETTE[-1] if here else PALETTE[index % (len(PALETTE) - 1)],
            markersize=6 if here else 4,
            markerfacecolor=PALETTE[-1] if here else "none",
            label=name,
        )
    ax.set(xscale="log", xlabel="distance: share of the model's variance left unexplained")
    ax.set_yticks(range(len(rivals)), rivals)
    ax.set_ylim(len(rivals) - 0.5, -0.5)
    ax.axvline(1, color="0.8", linewidth=0.8, zorder=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return ax


def agreement_panels(table: pd.DataFrame) -> Figure:
    """Distance of many models to each algorithm, in distribution and under the shifts.

    In decades below the variance of the model's predictions: 2 leaves 1 % of it unexplained.

    Args:
        table: rows with columns model, verdict, algorithm, in_distribution, shifted (log10
            distances).
    """
    titled = table.assign(model=table.model + ": " + table.verdict)
    columns, rows = table.algorithm.unique(), titled.model.unique()
    figure, axes = plt.subplots(
        1, 2, figsize=(TWO_COLUMNS + 2, 1.0 + ROW_HEIGHT * len(rows)), sharey=True
    )
    for ax, name in zip(axes, ("in_distribution", "shifted"), strict=True):
        wide = -titled.pivot(index="model", columns="algorithm", values=name)
        wide = wide.loc[rows, columns].rename(columns=lambda c: c.replace(" ", "\n"))
        last = ax is axes[-1]
        tall_heatmap(
            wide, ax, fmt=".1f", limit=DECADES, colorbar=last, colorbar_label="decades of agreement"
        )
        ax.set_title(name.replace("_", " "))
    return figure


def confusion_heatmap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Number of oracles by deserved and given verdict, shaded by share of the row.

    Args:
        table: counts, deserved verdicts in the index and given ones in the columns.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(TWO_COLUMNS, 1.2 + 0.25 * len(table), ax)
    share = table.div(table.sum(axis=1).clip(lower=1), axis=0)
    heatmap(share, ax, labels=table.astype(str), colorbar_label="share of the row")
    ax.set(xlabel="verdict", ylabel="known answer")
    plt.setp(ax.get_xticklabels(), rotation=20, ha="right", rotation_mode="anchor")
    return ax
