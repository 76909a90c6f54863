"""The words a verdict is made of."""

from __future__ import annotations

from probe.rivals import descent, least_squares, newton, ridge
from probe.rivals.registry import compared

NORMALIZATION = "closed form by normalization"
OTHER_MECHANISM = "closed form, other mechanism"
OTHER, UNDECIDED = "other", "undecided"
LEAST_SQUARES = least_squares.ALGORITHM.name
DESCENT, NEWTON, RIDGE = descent.ALGORITHM.name, newton.ALGORITHM.name, ridge.ALGORITHM.name
# Least squares is named by its mechanism, every other algorithm by its name.
_NAMED = [a.name for a in compared().values() if not a.trivial and a.name != LEAST_SQUARES]
KINDS = (NORMALIZATION, OTHER_MECHANISM, *sorted(_NAMED, key=str.casefold), OTHER, UNDECIDED)
