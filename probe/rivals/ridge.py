"""Ridge regression as rivals: with the intercept penalised, and with it free."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from models.constructed.elimination import closed_form
from probe.rivals import algorithms, least_squares
from probe.rivals.algorithms import NormalEquations, free_intercept_ridge_path, ridge_path
from probe.rivals.known import Draw, Known, as_function
from probe.rivals.rival import Algorithm, Rival, log_grid

# Without a penalty it is least squares.
ALGORITHM = Algorithm("ridge", limit=least_squares.ALGORITHM, names="penalty", rivals_limit=False)


def _penalised(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return ridge_path(problem, parameters[:, 0].exp())


def _free(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return free_intercept_ridge_path(problem, parameters[:, 0].exp())


def _starts(problem: NormalEquations) -> Tensor:
    return log_grid(problem, -14, 5, 40, row=0)[None, :, None]


def _describe(parameters: Tensor) -> dict[str, float]:
    return {"lambda": float(parameters[0].exp())}


def _oracles(draw: Draw) -> Iterator[Known]:
    """Ridge as a function, with and without a free intercept, and as the construction."""
    for _ in range(15):
        for free in (False, True):
            prompts = draw.prompts()
            function = as_function(algorithms.ridge, draw.log_uniform(0.02, 1), free)
            yield Known("ridge function", ALGORITHM.name, None, function, prompts)
        prompts = draw.prompts(p=1)
        ridge = draw.log_uniform(0.05, 1)
        build = partial(closed_form, prompts.n_context, scale=100.0, ridge=ridge)
        yield Known("ridge construction", ALGORITHM.name, None, build, prompts)


# One generator draws for both, with and without the intercept in turn.
RIVALS = (
    Rival("ridge", ALGORITHM, _penalised, starts=_starts, describe=_describe, oracles=_oracles),
    Rival("ridge, free intercept", ALGORITHM, _free, starts=_starts, describe=_describe),
)
