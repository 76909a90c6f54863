"""Figures of probes, interventions and layer norm, from the tables that those return."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from probe.figures import TWO_COLUMNS, heatmap
from probe.linear import CONTROLS
from probe.quantities import statistic_label
from probe.sites import site_label


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
    height = 1.0 + 0.16 * table["site"].nunique()
    figure, axes = plt.subplots(1, len(panels), figsize=(TWO_COLUMNS, height), sharey=True)
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        # Annotations round; adding zero turns -0.00 into 0.00.
        values = wide(table, column).round(2) + 0.0
        heatmap(values, ax, colorbar=ax is axes[-1], colorbar_label="R² (selectivity: difference)")
        ax.set_title(title)
        ax.tick_params(left=ax is axes[0], bottom=False)
        ax.tick_params(axis="x", rotation=0)
    return figure
