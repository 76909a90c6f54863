"""Verdicts of many models, counted."""

from __future__ import annotations

from typing import cast

import pandas as pd

from probe.stats.proportions import wilson
from probe.verdict.kinds import KINDS, NORMALIZATION


def share(found: int, n: int) -> dict[str, float]:
    """found / n as share, with its 95 % Wilson interval as ci_low and ci_high."""
    low, high = wilson(found, n)
    return {"share": found / n, "ci_low": low, "ci_high": high}


def verdict_counts(scores: pd.DataFrame) -> pd.DataFrame:
    """Verdicts by distribution and penalty.

    Args:
        scores: a row per model with distribution, l1, verdict.

    Returns:
        DataFrame with distribution, l1, models, one column per verdict that occurs, and share,
        ci_low, ci_high (Wilson, 95 %) of "closed form by normalization".
    """
    rows = []
    for key, group in scores.groupby(["distribution", "l1"], sort=False):
        distribution, l1 = cast(tuple, key)
        kinds = group.verdict.value_counts()
        row = {"distribution": distribution, "l1": l1, "models": len(group)}
        row |= {kind: int(kinds.get(kind, 0)) for kind in KINDS if kind in set(scores.verdict)}
        rows.append(row | share(int(kinds.get(NORMALIZATION, 0)), len(group)))
    return pd.DataFrame(rows)


def normalization_shares(scores: pd.DataFrame) -> pd.DataFrame:
    """Models in "closed form by normalization" by distribution.

    Args:
        scores: a row per model with distribution and verdict.

    Returns:
        DataFrame with distribution, models, found, share, ci_low, ci_high (Wilson, 95 %).
    """
    rows = []
    for distribution, group in scores.groupby("distribution", sort=False):
        found, n = int((group.verdict == NORMALIZATION).sum()), len(group)
        rows.append({"distribution": distribution, "models": n, "found": found, **share(found, n)})
    return pd.DataFrame(rows)


def typical(scores: pd.DataFrame) -> int:
    """Position of the model shown in detail.

    Of the models in closed form by normalization (of all, if there are none), the one whose
    division test is the median.
    """
    chosen = scores[scores.verdict == NORMALIZATION]
    ranked = (chosen if len(chosen) else scores).division_r2.sort_values(kind="stable")
    return int(ranked.index[len(ranked) // 2])
