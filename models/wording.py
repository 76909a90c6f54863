"""Words that error messages share."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def near_matches(name: str, known: Collection[str]) -> str:
    """Text that lists the known names nearest to `name`, empty if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; near matches: {', '.join(near)}" if near else ""


def listed(names: Collection[str], limit: int = 20) -> str:
    """Names with commas; those beyond `limit` are counted, not named."""
    shown = [shortened(name) for _, name in zip(range(limit), names, strict=False)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def shortened(value: object, limit: int = 80) -> str:
    """Text of a value, its middle cut out beyond `limit` characters."""
    text = str(value)
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"
