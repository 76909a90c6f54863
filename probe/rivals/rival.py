"""What a rival is: an algorithm, and one family of free parameters in which it is fitted.

A rival lives in a file of its own, which holds all that the verdict needs to know of it;
`probe.rivals.registry` lists them.

Shapes: b batch, K parameter sets, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from probe.rivals.algorithms import NormalEquations
from probe.rivals.known import Draw, Known

# Numbers of steps of an iterative rival.
EVERY_K = tuple(range(1, 33))
# Predictions beyond this are a divergence; capped so that distances stay numbers.
DIVERGED = 1e30

# From parameter sets [K, P] and the number of steps each is meant to run [K], predictions
# [K, b] after 1, 2, ... steps.
Path = Callable[[NormalEquations, Tensor, Tensor], Iterator[Tensor]]


@dataclass(frozen=True)
class Algorithm:
    """What the verdict names; several rivals may stand for one algorithm.

    Attributes:
        name: the verdict, without k or λ.
        limit: the algorithm it converges to, and can therefore always come close to: it is named
            only where it beats its limit by a lead.
        names: what the verdict gives beside the name: the number of steps k, or the penalty λ,
            which `Rival.describe` has to call "lambda".
        rivals_limit: whether a model that its limit describes counts as undecided where this
            algorithm describes it as well. Not so where few steps or a small penalty are the limit
            itself.
        trivial: predicts without regression; a model that it describes is "other".
    """

    name: str
    limit: Algorithm | None = None
    names: Literal["steps", "penalty"] | None = None
    rivals_limit: bool = True
    trivial: bool = False


def no_parameters(problem: NormalEquations) -> Tensor:
    """Starts of a rival without free parameters, [1, 1, 0]."""
    return problem.y_mean.new_zeros(1, 1, 0)


def describe_nothing(parameters: Tensor) -> dict[str, float]:
    """Description of a rival without free parameters."""
    return {}


def no_oracles(draw: Draw) -> Iterator[Known]:
    """Models of a rival that is no verdict of its own."""
    return iter(())


@dataclass(frozen=True)
class Rival:
    """An algorithm with free parameters that are fitted to a model.

    Attributes:
        name: family, the key of tables.
        algorithm: what it stands for.
        path: its predictions, step by step.
        steps: the values of k in a sweep; (1,) if it is not iterative.
        starts: groups of parameter sets to tune from, [groups, K, P].
        describe: readable values of one parameter set [P].
        oracles: models that compute it, to calibrate the verdict on.
    """

    name: str
    algorithm: Algorithm
    path: Path
    steps: tuple[int, ...] = (1,)
    starts: Callable[[NormalEquations], Tensor] = no_parameters
    describe: Callable[[Tensor], dict[str, float]] = describe_nothing
    oracles: Callable[[Draw], Iterator[Known]] = no_oracles

    def predict(self, problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Tensor:
        """Predictions of parameter sets [K, P], each after its own number of steps [K]: [K, b].

        A rival that diverges predicts a large finite number.
        """
        result = problem.y_mean.new_empty(len(parameters), len(problem.y_mean))
        path = self.path(problem, parameters, steps)
        for k, prediction in enumerate(islice(path, int(steps.max())), 1):
            chosen = steps == k
            if chosen.any():
                result[chosen] = prediction.expand(len(steps), -1)[chosen]
        return torch.nan_to_num(result, nan=DIVERGED).clamp(-DIVERGED, DIVERGED)


def schedule(spread: Tensor, steps: Tensor) -> Tensor:
    """Geometric factors of each step, from e^(-spread/2) to e^(spread/2), [max steps, ...]."""
    position = torch.arange(int(steps.max()), dtype=spread.dtype)
    position = position.reshape(-1, *(1,) * spread.ndim)
    last = (steps - 1).clamp(min=1)
    # Beyond a set's own number of steps its predictions are not used.
    return (spread * ((position / last).clamp(max=1) - 0.5) * (steps > 1)).exp()


def log_grid(problem: NormalEquations, low: float, high: float, size: int, row: int = -1) -> Tensor:
    """Logarithms from `low` to `high` below or above a typical eigenvalue's, [size]."""
    typical = problem.eigenvalues[row].median().log()
    return torch.linspace(low, high, size, dtype=typical.dtype) + typical
