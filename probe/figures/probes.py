"""Figures of linear probes, from the tables of `fit_probes`."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import PALETTE, TWO_COLUMNS, heatmap, new_axes, site_title
from probe.probing.linear import strongest_control
from probe.quantities.statistics import statistic_label


def wide(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """One number of a `fit_probes` table as site x statistic, in the table's order and in words.

    Raises:
        ValueError: if sites were probed at several positions; select one row per site first.
    """
    if table.duplicated(["site", "statistic"]).any():
        raise ValueError("several positions per site; select one position per site first")
    pivoted = table.pivot(index="site", columns="statistic", values=column)
    pivoted = pivoted.loc[table["site"].unique(), table["statistic"].unique()]
    return pivoted.rename(index=lambda site: site_title(table, site), columns=statistic_label)


def probe_heatmaps(table: pd.DataFrame) -> Figure:
    """R² by site and statistic beside its strongest control and its selectivity, one scale."""
    table = table.assign(control=strongest_control(table))
    panels = {"r2": "probe R²", "control": "strongest control R²", "selectivity": "selectivity"}
    # Room for six annotated columns a panel on a page, more where there are more.
    width = TWO_COLUMNS * max(1, table["statistic"].nunique() / 6)
    height = 1.0 + 0.16 * table["site"].nunique()
    figure, axes = plt.subplots(1, len(panels), figsize=(width, height), sharey=True)
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        # Annotations round; adding zero turns -0.00 into 0.00.
        values = wide(table, column).round(2) + 0.0
        heatmap(values, ax, colorbar=ax is axes[-1], colorbar_label="R² (selectivity: difference)")
        ax.set_title(title)
        ax.tick_params(left=ax is axes[0], bottom=False)
        ax.tick_params(axis="x", rotation=0)
    return figure


def r2_by_position(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """R² of one site against the context position, one line per statistic with its interval.

    Args:
        table: rows of `fit_probes` for one site at context positions and the query (last).
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(ax=ax)
    for (statistic, rows), colour in zip(
        table.groupby("statistic", sort=False), cycle(PALETTE), strict=False
    ):
        at = range(len(rows))
        ax.plot(at, rows["r2"], color=colour, lw=1, label=statistic_label(str(statistic)))
        ax.fill_between(at, rows["ci_low"], rows["ci_high"], color=colour, alpha=0.25, lw=0)
        ax.plot(at, strongest_control(rows), color=colour, lw=0.7, ls=":")
    last = table.loc[:, "position"].nunique() - 1
    ticks = sorted({0, last // 4, last // 2, 3 * last // 4})
    ax.set_xticks([*ticks, last], [*map(str, ticks), "query"])
    ax.set(xlabel="position", ylabel="probe R² (dotted: control)", ylim=(-0.05, 1.05))
    ax.set_title(site_title(table, table["site"].iloc[0]))
    return ax


def position_panels(table: pd.DataFrame) -> Figure:
    """`r2_by_position` for every site of a table, side by side on one scale."""
    sites = table["site"].unique()
    figure, axes = plt.subplots(
        1, len(sites), figsize=(TWO_COLUMNS, 2.2), sharey=True, squeeze=False
    )
    for ax, site in zip(axes[0], sites, strict=True):
        r2_by_position(table.loc[table["site"] == site], ax)
        ax.label_outer()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure
