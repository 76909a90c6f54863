"""Figure style and saving, shared by all figures.

Figure functions elsewhere take data and an optional `Axes`, return the `Axes`, and
neither save nor show; `save_figure` writes PDF, PNG and the data as CSV, the same
bytes for the same figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from PIL import Image

# Text width of one and two journal columns, in inches.
COLUMN, TWO_COLUMNS = 3.4, 7.0
# Of a heatmap with one row per model.
ROW_HEIGHT = 0.15
# Okabe-Ito: colour-blind safe, ordered so that neighbours differ in grey too.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
# Diverging map for signed values centred at 0, sequential map for shares.
DIVERGING, SEQUENTIAL = "vlag", "cividis"

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    # Text stays text in PDF, with its font embedded.
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    # DejaVu Sans ships with matplotlib, so that every machine draws the same.
    "font.family": "DejaVu Sans",
}


@contextmanager
def style() -> Iterator[None]:
    """Context in which figures are drawn and saved; global settings stay as they were."""
    with mpl.rc_context(_STYLE), plt.ioff():
        yield


def new_axes(width: float = COLUMN, height: float = 2.4, ax: Axes | None = None) -> Axes:
    """`ax` itself, or the axes of a new figure of that size in inches."""
    return plt.figure(figsize=(width, height)).add_subplot() if ax is None else ax


def figure_of(ax: Axes) -> Figure:
    """The figure that axes are in; no figure here has subfigures."""
    return cast(Figure, ax.figure)


def site_title(table: pd.DataFrame, site: str) -> str:
    """Words for a site of a table that measuring made; its name where the table has none."""
    return table.attrs.get("titles", {}).get(site, site)


def heatmap(
    table: pd.DataFrame,
    ax: Axes,
    *,
    signed: bool = False,
    limit: float = 1.0,
    fmt: str = ".2f",
    colorbar: bool = True,
    colorbar_label: str = "",
    labels: pd.DataFrame | None = None,
) -> Axes:
    """Annotated heatmap of a wide table on a fixed scale.

    The scale is [0, limit] or, signed, [-limit, limit], so that panels compare. Missing
    cells stay blank. `labels` has the text of each cell, the values themselves by default.
    """
    values = table.to_numpy(dtype=float)
    palette = sns.color_palette(DIVERGING if signed else SEQUENTIAL, as_cmap=True)
    # Not sns.heatmap, which draws the whole figure once per heatmap to see if labels overlap.
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        vmin=-limit if signed else 0,
        vmax=limit,
        cmap=palette,
        edgecolors="white",
        linewidth=0.3,
    )
    n_rows, n_columns = values.shape
    if labels is None and n_rows <= 40:
        labels = table.map(lambda value: "" if pd.isna(value) else format(value, fmt))
    if labels is not None:
        shades = mesh.get_array()
        assert shades is not None  # it was drawn from values
        _write_cells(ax, labels.to_numpy(), mesh.to_rgba(shades))
    ax.set(xlim=(0, n_columns), ylim=(n_rows, 0), xlabel="", ylabel="")
    ax.set_yticks(np.arange(n_rows) + 0.5, table.index)
    ax.set_xticks(np.arange(n_columns) + 0.5, table.columns, rotation=_rotation(ax, table.columns))
    ax.spines[:].set_visible(False)
    if colorbar:
        bar = ax.figure.colorbar(mesh, ax=ax, label=colorbar_label)
        bar.outline.set_visible(False)
    return ax


def tall_heatmap(table: pd.DataFrame, ax: Axes | None = None, *, fmt: str, **settings: Any) -> Axes:
    """`heatmap` with a low row and a small label for each of many models.

    Args:
        table: one row per model.
        ax: where to draw; a new figure of the right height by default.
        fmt: of the numbers in cells.
        settings: of `heatmap`.
    """
    ax = new_axes(TWO_COLUMNS, 1.0 + ROW_HEIGHT * len(table), ax)
    heatmap(table, ax, labels=table.map(f"{{:{fmt}}}".format), **settings)
    ax.tick_params(axis="y", labelsize=5)
    ax.tick_params(axis="x", rotation=0)
    return ax


def _write_cells(ax: Axes, texts: np.ndarray, colours: np.ndarray) -> None:
    """Text in the middle of each cell, dark on light and light on dark."""
    luminance = colours.reshape(*texts.shape, 4)[..., :3] @ (0.2126, 0.7152, 0.0722)
    for (i, j), text in np.ndenumerate(texts):
        ink = "0.15" if luminance[i, j] > 0.45 else "white"
        ax.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=ink, size=6)


def _rotation(ax: Axes, names: pd.Index) -> int:
    """Upright if the longest name is wider than a column (a letter takes about .05 inches)."""
    column = ax.get_position().width * figure_of(ax).get_figwidth() / max(1, len(names))
    return 90 if 0.05 * max(len(str(name)) for name in names) > column else 0


def save_figure(figure: Figure, folder: Path, name: str, data: pd.DataFrame) -> list[Path]:
    """Write `<name>.pdf`, `<name>.png` (300 dpi) and `<name>.csv`, then close the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("pdf", "png", "csv")]
    # Dates and version strings out, so that a rerun gives the same bytes.
    figure.savefig(paths[0], metadata={"CreationDate": None, "Creator": None, "Producer": None})
    paths[1].write_bytes(png_bytes(figure, dpi=300))
    data.to_csv(paths[2], index=False, float_format="%.10g")
    plt.close(figure)
    return paths


def png_bytes(figure: Figure, dpi: int) -> bytes:
    """A figure as PNG in 256 colours of its own: a third of the size, to the eye the same."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    image = Image.open(full).convert("RGB")
    reduced = image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    reduced.save(small, "png", optimize=True, dpi=(dpi, dpi))
    return small.getvalue()
