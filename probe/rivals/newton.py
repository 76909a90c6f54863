"""Newton's iteration for the inverse as a rival."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from probe.rivals import algorithms, least_squares
from probe.rivals.algorithms import NormalEquations, newton_path
from probe.rivals.known import Draw, Known, as_function
from probe.rivals.rival import EVERY_K, Algorithm, Rival

# Its digits double with every step, so that within the sweep it is least squares.
ALGORITHM = Algorithm("Newton", limit=least_squares.ALGORITHM, names="steps", rivals_limit=False)


def _path(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return newton_path(problem)


def _oracles(draw: Draw) -> Iterator[Known]:
    for k in (1, 2, 3, 4, 5) * 7:
        function = as_function(algorithms.newton, k)
        yield Known("Newton function", ALGORITHM.name, k, function, draw.prompts())


RIVALS = (Rival("Newton", ALGORITHM, _path, EVERY_K, oracles=_oracles),)
