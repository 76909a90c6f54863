"""Figures of the ledger of divisions and of the gain curve."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probe.figures.style import COLUMN, PALETTE, TWO_COLUMNS, new_axes

# Measures of each panel with their words.
_ELASTICITIES = {"elasticity": "against V", "elasticity_held": "against V′"}
_SHARES = {"carried_slope": "carried", "budget_share": "of the budget"}
_ERRORS = {
    "error": "untouched",
    "replaced_held": "κ V′",
    "replaced_v": "κ V",
    "replaced_constant": "constant",
}
_MARKERS = ("o", "s", "D", "^")


def ledger_panels(table: pd.DataFrame) -> Figure:
    """Elasticity, share of the fit and error after replacement of every divisor.

    Coloured markers are the model with 95 % intervals, grey lines reach from the smallest to the
    largest untrained model (where they lie inside the panel).

    Args:
        table: of `division_ledger`.
    """
    height = 1.2 + 0.42 * len(table)
    figure, axes = plt.subplots(1, 3, figsize=(TWO_COLUMNS, height), sharey=True)
    _panel(axes[0], table, _ELASTICITIES, (0, 0.5, 1))
    axes[0].set(xlabel="elasticity, d log s / d log V", xlim=_around(table, _ELASTICITIES, 0, 1))
    _panel(axes[1], table, _SHARES, (0, 1))
    axes[1].set(xlabel="share of the fit", xlim=_around(table, _SHARES, 0, 1))
    _panel(axes[2], table, _ERRORS, ())
    ends = table[[f"{name}_{end}" for name in _ERRORS for end in ("low", "high")]].to_numpy()
    ends = ends[np.isfinite(ends) & (ends > 0)]
    low, high = (ends.min(), ends.max()) if len(ends) else (1e-3, 1)
    limits = (low / 2, max(10, min(2 * high, 1e3)))
    axes[2].set(xscale="log", xlabel="error / Var target", xlim=limits)
    axes[0].set_yticks(range(len(table)), table["label"])
    axes[0].set_ylim(len(table) - 0.5, -0.5)
    titles = ("answers to V", "carries the prediction", "error when replaced by")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, pad=24)
        handles, labels = ax.get_legend_handles_labels()
        # Markers first, the control last.
        order = sorted(range(len(labels)), key=lambda i: labels[i] == "untrained")
        ax.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            frameon=False,
            ncols=3,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            fontsize=6,
            handlelength=1.2,
            handletextpad=0.4,
            columnspacing=1,
            borderaxespad=0,
        )
    return figure


def gain_line(curve: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Gain on (C/V)(u − x̄) against V, with its interval and the range the model was trained on.

    Args:
        curve: of `gain_curve`.
        ax: where to draw; a new figure by default.
    """
    ax = new_axes(COLUMN, 2.4, ax)
    ax.axvspan(*curve.attrs["x_var_central"], color="0.93", lw=0, label="90 % of V in training")
    for tolerance, alpha in ((0.1, 0.15), (0.05, 0.25)):
        label = f"within {tolerance:.0%}".replace("%", " %")
        ax.axhspan(1 - tolerance, 1 + tolerance, color=PALETTE[2], alpha=alpha, lw=0, label=label)
    ax.fill_between(
        curve["x_var"], curve["gain_low"], curve["gain_high"], color=PALETTE[0], alpha=0.3, lw=0
    )
    ax.plot(curve["x_var"], curve["gain"], color=PALETTE[0], lw=1)
    ax.set(xscale="log", xlabel="V", ylabel="gain on (C/V)(u − x̄)")
    ax.set_xlim(curve["x_var"].iloc[0], curve["x_var"].iloc[-1])
    lowest, highest = curve.loc[:, "gain"].min(), curve.loc[:, "gain"].max()
    ax.set_ylim(min(0, lowest - 0.1), max(1.3, highest + 0.1))
    ax.set_title(f"gain within 10 % of 1: {curve.attrs['words_10']}")
    ax.legend(frameon=False, loc="lower center", fontsize=6)
    return ax


def _panel(
    ax: Axes, table: pd.DataFrame, measures: Mapping[str, str], references: tuple[float, ...]
) -> None:
    """A row per divisor, and in it a marker per measure."""
    for reference in references:
        ax.axvline(reference, color="0.8", lw=0.8, ls=":" if reference not in (0, 1) else "-")
    step = 0.7 / len(measures)
    styles = zip(measures.items(), PALETTE, _MARKERS, strict=False)
    for k, ((name, words), colour, marker) in enumerate(styles):
        at = np.arange(len(table)) + (k - (len(measures) - 1) / 2) * step
        ends = (table[f"{name}_untrained_low"], table[f"{name}_untrained_high"])
        ax.hlines(at, *ends, color="0.75", lw=2, zorder=1)
        value = table[name].to_numpy()
        reach = np.stack([value - table[f"{name}_low"], table[f"{name}_high"] - value])
        ax.errorbar(
            value, at, xerr=reach.clip(min=0), fmt=marker, ms=3.5, lw=1, color=colour, label=words
        )
    ax.plot([], [], color="0.75", lw=2, label="untrained")
    ax.grid(axis="y", visible=False)
    for row in range(1, len(table)):
        ax.axhline(row - 0.5, color="0.93", lw=0.6)


def _around(
    table: pd.DataFrame, measures: Mapping[str, str], low: float, high: float
) -> tuple[float, float]:
    """Limits that hold all intervals of the model, and at least [low, high]."""
    lows, highs = (table[[f"{name}_{end}" for name in measures]] for end in ("low", "high"))
    low, high = np.nanmin([low, lows.min().min()]), np.nanmax([high, highs.max().max()])
    margin = 0.08 * (high - low)
    return low - margin, high + margin
