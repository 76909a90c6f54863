"""Figures of probes, interventions and layer norm, from the tables that those return."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from probe.activations import site_label
from probe.figures import PALETTE, TWO_COLUMNS, heatmap, new_axes
from probe.linear import CONTROLS
from probe.quantities import statistic_label


def wide(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """One number of a `fit_probes` table as site x statistic, in the table's order and in words.

    Raises:
        ValueError: if sites were probed at several positions; select one row per site first.
    """
    if table.duplicated(["site", "statistic"]).any():
        raise ValueError("several positions per site; select one position per site first")
    pivoted = table.pivot(index="site", columns="statistic", values=column)
    pivoted = pivoted.loc[table["site"].unique(), table["statistic"].unique()]
    return pivoted.rename(index=site_label, columns=statistic_label)


def strongest_control(table: pd.DataFrame) -> pd.Series:
    """The largest of the three controls of each row of a `fit_probes` table."""
    return table[list(CONTROLS)].max(axis=1, skipna=False)


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
        ax.plot(at, rows["r2"], color=colour, lw=1, label=statistic_label(statistic))
        ax.fill_between(at, rows["ci_low"], rows["ci_high"], color=colour, alpha=0.25, lw=0)
        ax.plot(at, strongest_control(rows), color=colour, lw=0.7, ls=":")
    last = table["position"].nunique() - 1
    ticks = sorted({0, last // 4, last // 2, 3 * last // 4})
    ax.set_xticks([*ticks, last], [*map(str, ticks), "query"])
    ax.set(xlabel="position", ylabel="probe R² (dotted: control)", ylim=(-0.05, 1.05))
    ax.set_title(site_label(table["site"].iloc[0]))
    return ax


def position_panels(table: pd.DataFrame) -> Figure:
    """`r2_by_position` for every site of a table, side by side on one scale."""
    sites = table["site"].unique()
    figure, axes = plt.subplots(
        1, len(sites), figsize=(TWO_COLUMNS, 2.2), sharey=True, squeeze=False
    )
    for ax, site in zip(axes[0], sites, strict=True):
        r2_by_position(table[table["site"] == site], ax)
        ax.label_outer()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure


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
    ax.set_yticks(range(len(sites)), [site_label(site) for site in sites])
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
        draw(table[table["statistic"] == name], ax).set_title(statistic_label(name))
        figure.supxlabel(ax.get_xlabel(), fontsize=8)
        ax.set_xlabel("")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper right", ncols=len(handles))
    return figure


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
            scale_scatter(points[mine], ax)
    return figure


def norm_panels(table: pd.DataFrame) -> Figure:
    """Layer-norm inputs and outputs by coordinate, the model beside the construction.

    Dots are medians, thick lines the middle half, thin lines 5 % to 95 % (`norm_statistics`).
    """
    table = table[table["quantity"].isin(["input", "output"])]
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


def _bars(
    ax: Axes, at: np.ndarray, rows: pd.DataFrame, width: float, colour: str, label: str
) -> None:
    interval = np.abs(rows[["ci_low", "ci_high"]].to_numpy().T - rows["effect"].to_numpy())
    error = {"lw": 0.8, "ecolor": "0.3"}
    ax.barh(at, rows["effect"], width, xerr=interval, color=colour, label=label, error_kw=error)


def _by_site(ax: Axes, table: pd.DataFrame, xlabel: str) -> Axes:
    """One row per site, first on top."""
    ax.set_yticks(range(len(table)), [site_label(site) for site in table["site"]])
    ax.set(xlabel=xlabel, ylim=(len(table) - 0.4, -0.6))
    ax.grid(axis="y", color="0.93", lw=0.6)
    ax.set_axisbelow(True)
    return ax
