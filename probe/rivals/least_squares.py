"""Least squares as a rival.

How a model computes it is a question of mechanism; the oracles for that are in
`probe.verdict.oracles`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from probe.rivals.algorithms import NormalEquations
from probe.rivals.rival import Algorithm, Rival

ALGORITHM = Algorithm("least squares")


def _path(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield problem.least_squares[None]


RIVALS = (Rival("least squares", ALGORITHM, _path),)
