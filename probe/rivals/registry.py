"""All rivals that a model is compared with.

A new rival is a file beside this one, and its line in `RIVALS`: what it stands for, how it is
fitted, what its verdict is called and what that is calibrated on are attributes of it.
"""

from __future__ import annotations

from probe.rivals import descent, least_squares, newton, preconditioned, ridge, trivial
from probe.rivals.rival import Algorithm, Rival

# Fewest free parameters first: the order in which ties are resolved.
RIVALS: tuple[Rival, ...] = (
    *least_squares.RIVALS,
    *trivial.RIVALS,
    *newton.RIVALS,
    *ridge.RIVALS,
    *descent.RIVALS,
    *preconditioned.RIVALS,
)


def compared() -> dict[str, Algorithm]:
    """The algorithms that rivals stand for by name, trivial ones last."""
    found = dict.fromkeys(rival.algorithm for rival in RIVALS)
    return {algorithm.name: algorithm for algorithm in sorted(found, key=lambda a: a.trivial)}
