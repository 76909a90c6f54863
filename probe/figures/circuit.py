"""The forward pass of a model as a picture.

One lane per residual coordinate runs from the prompt to the prediction. Each head

    q A S B,  A = W_Q W_Kᵀ,  B = W_V,  S = QᵀQ

taps the lanes three times and writes back through layer norm: rows of A say what the query
reads, columns of A what keys read, rows of B what values read, columns of B what is written.
Line widths are the norms of those rows and columns relative to the largest of the tap, because
the scale of a head's factors is free. Where a layer norm follows, B counts without its row
means, which it subtracts.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from probe.figures.style import PALETTE, TWO_COLUMNS, new_axes

# Taps of a head in the order they are drawn: colour and dashes, told apart in grey too.
TAPS = {
    "query": (PALETTE[0], "-"),
    "key": (PALETTE[1], (0, (4, 1.2))),
    "value": (PALETTE[2], (0, (1.2, 1.2))),
    "write": (PALETTE[6], "-"),
}
_HIDDEN = 0.05  # lines of less than this share of the widest are left out
_WIDEST = 2.6  # points
_PALE = 0.02  # a head that contributes less than this share of its layer is drawn pale


def circuit(edges: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw one model.

    Args:
        edges: of `circuit_edges`.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(height=3.0, ax=ax)
    names = list(edges["coordinate"].unique())
    lanes = {name: -float(k) for k, name in enumerate(names)}
    heads = edges.loc[edges["stage"] == "head"]
    n_layers = int(heads["layer"].max()) + 1
    end = _column(n_layers)
    for y in lanes.values():
        ax.plot([-1.3, end], [y, y], color="0.75", lw=0.8, zorder=1)
    _embed(ax, edges.loc[edges["stage"] == "embed"], lanes)
    for layer, own in heads.groupby("layer"):
        x = _column(int(layer))
        _norm(ax, x + 2.6, lanes, int(layer))
        for head, lines in own.groupby("head"):
            _head(ax, x, int(head), lines, lanes)
    _readout(ax, end, edges.loc[edges["stage"] == "readout"], lanes)
    n_above = (int(heads["head"].max()) + 2) // 2
    bottom = -len(names) - 1.2 * ((int(heads["head"].max()) + 1) // 2) - 0.1
    ax.set(xlim=(-2.6, end + 1.5), ylim=(bottom, 1.2 * n_above + 0.75))
    ax.axis("off")
    return ax


def circuit_panels(models: Mapping[str, pd.DataFrame]) -> Figure:
    """Circuits side by side: title -> edges."""
    tallest = max(edges["coordinate"].nunique() for edges in models.values())
    figure, axes = plt.subplots(
        1, len(models), figsize=(TWO_COLUMNS, 1.6 + 0.32 * tallest), squeeze=False
    )
    for ax, (title, edges) in zip(axes[0], models.items(), strict=True):
        circuit(edges, ax).set_title(title)
    handles = [
        Line2D([], [], color=colour, ls=style, lw=1.6, label=_MEANING[tap])
        for tap, (colour, style) in TAPS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


_MEANING = {
    "query": "read by the query",
    "key": "read by keys",
    "value": "read by values",
    "write": "written",
}


def _column(layer: int) -> float:
    """Where a layer begins."""
    return 0.3 + 3.4 * layer


def _head(ax: Axes, x: float, head: int, lines: pd.DataFrame, lanes: dict[str, float]) -> None:
    """A box outside the lanes, even heads above, odd ones below, with its taps."""
    side = 1 if head % 2 == 0 else -1
    edge = max(lanes.values()) if side > 0 else min(lanes.values())
    y = edge + side * 1.2 * (head // 2 + 1) - side * 0.1
    pale = 0.25 if lines["contribution"].iloc[0] < _PALE else 1.0
    _box(ax, x + 1.25, y, 1.5, f"head {head}", pale)
    for k, (tap, (colour, style)) in enumerate(TAPS.items()):
        port = (x + 0.7 + 0.37 * k, y - side * 0.33)
        for row in lines.loc[(lines["tap"] == tap) & (lines["weight"] >= _HIDDEN)].itertuples():
            lane = lanes[row.coordinate]
            outer = (x + 2.6 - 0.12, lane) if tap == "write" else (x + 0.16 * k, lane)
            _wire(ax, outer, port, row.weight, colour, style, pale)


def _norm(ax: Axes, x: float, lanes: dict[str, float], layer: int) -> None:
    low, high = min(lanes.values()), max(lanes.values())
    style = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "fc": "0.93", "ec": "0.5", "lw": 0.6}
    ax.add_patch(FancyBboxPatch((x - 0.12, low - 0.3), 0.34, high - low + 0.6, zorder=2, **style))
    ax.text(x + 0.05, (low + high) / 2, "layer norm", rotation=90, ha="center", va="center", size=6)
    ax.text(x + 0.05, high + 0.42, f"layer {layer}", ha="center", va="bottom", size=6)


def _embed(ax: Axes, edges: pd.DataFrame, lanes: dict[str, float]) -> None:
    columns = list(edges["tap"].unique())
    middle = (max(lanes.values()) + min(lanes.values())) / 2
    for k, column in enumerate(columns):
        y = middle - (k - (len(columns) - 1) / 2) * 0.9
        ax.text(-2.3, y, _symbol(column), ha="center", va="center")
        for row in edges.loc[(edges["tap"] == column) & (edges["weight"] >= _HIDDEN)].itertuples():
            _wire(ax, (-2.1, y), (-1.3, lanes[row.coordinate]), row.weight, "0.35", "-", 1.0)
    for name, y in lanes.items():
        label = {"ha": "right", "va": "center", "size": 7}
        ax.text(-0.1, y, _symbol(name), bbox={"fc": "white", "ec": "none", "pad": 1}, **label)


def _readout(ax: Axes, x: float, edges: pd.DataFrame, lanes: dict[str, float]) -> None:
    middle = (max(lanes.values()) + min(lanes.values())) / 2
    ax.text(x + 1.2, middle, "ŷ", ha="center", va="center")
    for row in edges.loc[edges["weight"] >= _HIDDEN].itertuples():
        _wire(ax, (x, lanes[row.coordinate]), (x + 1.0, middle), row.weight, "0.35", "-", 1.0)


def _wire(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    weight: float,
    colour: str,
    style: object,
    alpha: float,
) -> None:
    """A curve that leaves both ends horizontally on lanes and vertically at head boxes."""
    (x0, y0), (x1, y1) = start, end
    if colour == "0.35":  # prompt and readout: a plain S
        middle = (x0 + x1) / 2
        points = [start, (middle, y0), (middle, y1), end]
    else:
        points = [start, ((x0 + 3 * x1) / 4, y0), (x1, (y0 + y1) / 2), end]
    path = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    width = 0.3 + (_WIDEST - 0.3) * weight
    look = {"fc": "none", "ec": colour, "lw": width, "ls": style, "alpha": 0.85 * alpha}
    ax.add_patch(PathPatch(path, capstyle="butt", zorder=3, **look))


def _box(ax: Axes, x: float, y: float, width: float, text: str, alpha: float) -> None:
    style = {"boxstyle": "round,pad=0.02,rounding_size=0.1", "fc": "white", "ec": "0.3", "lw": 0.8}
    ax.add_patch(
        FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, zorder=4, alpha=alpha, **style)
    )
    ax.text(x, y, text, ha="center", va="center", size=6, zorder=5, alpha=max(alpha, 0.5))


def _symbol(name: str) -> str:
    """x_1 as x₁; other names as they are."""
    base, _, number = name.partition("_")
    subscript = number.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
    return base + subscript if number.isdigit() else name
