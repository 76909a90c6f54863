"""Shares of a number of trials, with their intervals."""

from __future__ import annotations

from scipy.stats import binomtest

from probe.stats.bootstrap import CONFIDENCE


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson interval of a share at `CONFIDENCE`.

    Args:
        successes: of n independent trials.
        n: at least 1.

    Returns:
        Lower and upper bound of successes / n.

    Raises:
        ValueError: unless 0 <= successes <= n and n >= 1.
    """
    if not (n >= 1 and 0 <= successes <= n):
        raise ValueError(f"{successes} of {n} is no share; give 0 <= successes <= n and n >= 1")
    interval = binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)
