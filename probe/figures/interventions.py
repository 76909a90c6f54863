"""Figures of ablations and interchanges, from the tables that those return."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import PALETTE, TWO_COLUMNS, new_axes, site_title
from probe.quantities.statistics import statistic_label


def ablation_bars(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effect of ablating each site, with intervals, one colour per mode (`ablate` tables)."""
    sites = table["site"].unique()
    ax = new_axes(height=0.8 + 0.17 * len(sites), ax=ax)
    modes = table["mode"].unique()
    width = 0.8 / len(modes)
    for k, (mode, colour) in enumerate(zip(modes, PALETTE, strict=False)):
        rows = table[table["mode"] == mode].set_index("site").reindex(sites)
        at = np.arange(len(sites)) + (k - (len(modes) - 1) / 2) * width
        _bars(ax, at, rows, width, colour, mode)
    ax.set_yticks(range(len(sites)), [site_title(table, site) for site in sites])
    ax.set(xlabel="increase of the loss / Var ŷ", ylim=(len(sites) - 0.4, -0.6))
    ax.legend(title="replaced by", frameon=False)
    return ax


def direction_bars(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effect of removing one statistic's direction by site, beside random directions.

    Args:
        table: rows of `ablate_direction` for one statistic; sites without a direction stay empty.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(height=0.8 + 0.17 * len(table), ax=ax)
    at = np.arange(len(table))
    _bars(ax, at, table, 0.7, PALETTE[0], "probe direction")
    ends = table[["random_low", "random_high"]].to_numpy().T
    reach = np.abs(ends - table["random_effect"].to_numpy())
    style = {"fmt": "o", "ms": 2, "lw": 0.8, "color": PALETTE[1]}
    ax.errorbar(table["random_effect"], at, xerr=reach, label="random directions", **style)
    return _by_site(ax, table, "increase of the loss / Var ŷ")


def interchange_slopes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Slope of the prediction's change on that of least squares, by site.

    Args:
        table: rows of `interchange` for one statistic; sites that cannot be written stay empty.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(height=0.8 + 0.17 * len(table), ax=ax)
    for expected, line in ((0, "-"), (1, ":")):
        ax.axvline(expected, color="0.7", lw=0.8, ls=line)
    ends = table[["slope_low", "slope_high"]].to_numpy().T
    reach = np.abs(ends - table["slope"].to_numpy())
    ax.errorbar(table["slope"], np.arange(len(table)), xerr=reach, fmt="o", ms=2.5, lw=0.8)
    return _by_site(ax, table, "slope (1: used as in least squares)")


def statistic_panels(table: pd.DataFrame, draw: Callable[[pd.DataFrame, Axes], Axes]) -> Figure:
    """`direction_bars` or `interchange_slopes`, one panel per statistic on one scale."""
    names = table["statistic"].unique()
    height = 1.0 + 0.16 * table["site"].nunique()
    figure, axes = plt.subplots(
        1, len(names), figsize=(TWO_COLUMNS, height), sharex=True, sharey=True, squeeze=False
    )
    for ax, name in zip(axes[0], names, strict=True):
        draw(table.loc[table["statistic"] == name], ax).set_title(statistic_label(name))
        figure.supxlabel(ax.get_xlabel(), fontsize=8)
        ax.set_xlabel("")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper right", ncols=len(handles))
    return figure


def _bars(
    ax: Axes, at: np.ndarray, rows: pd.DataFrame, width: float, colour: str, label: str
) -> None:
    interval = np.abs(rows[["ci_low", "ci_high"]].to_numpy().T - rows["effect"].to_numpy())
    error = {"lw": 0.8, "ecolor": "0.3"}
    ax.barh(at, rows["effect"], width, xerr=interval, color=colour, label=label, error_kw=error)


def _by_site(ax: Axes, table: pd.DataFrame, xlabel: str) -> Axes:
    """One row per site, first on top."""
    ax.set_yticks(range(len(table)), [site_title(table, site) for site in table["site"]])
    ax.set(xlabel=xlabel, ylim=(len(table) - 0.4, -0.6))
    ax.grid(axis="y", color="0.93", lw=0.6)
    ax.set_axisbelow(True)
    return ax
