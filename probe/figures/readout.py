"""Figure of the read-out of coordinates in named quantities."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from probe.figures.style import TWO_COLUMNS, heatmap, new_axes, site_title

# Rows of layer maps whose entries stay below this share of the largest are not drawn.
_WORTH_SHOWING = 0.1


def read_out_panel(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Read-out as a heatmap: coefficients as text, colour by share of the row's largest."""
    quantities = quantity_columns(table)
    values = table.loc[:, quantities].copy()
    values.index = [
        f"{site_title(table, site)}, {c}   R² {r2:.2f}"
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
