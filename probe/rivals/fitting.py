"""Every rival fitted to a model, for every number of steps at once.

`tune` fits one rival to given predictions, so that it explains a model as well as it
can; `climb` does so for all of them, with and without the query row among the samples, and
returns the `Ladder` of fitted rivals.

Shapes: b batch, K parameter sets, P parameters, R rivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from models.tasks.linear_regression import Prompts
from probe.rivals import registry
from probe.rivals.algorithms import NormalEquations, with_query_row
from probe.rivals.rival import DIVERGED, Rival

_ROUNDS = 15
_DIFFERENCE = 1e-6
# Refinement ends after this many rounds without a relative gain beyond that.
_PATIENCE, _NEGLIGIBLE = 3, 1e-3


def tune(rival: Rival, problem: NormalEquations, targets: Tensor) -> Tensor:
    """Fit a rival to predictions, for every k of its sweep.

    Of each group of starting points the best one for each k is refined by
    Levenberg-Marquardt, all k in parallel; the best result stays.

    Args:
        rival: which one.
        problem: the prompts to fit on.
        targets: predictions to explain, [b].

    Returns:
        Parameters, [number of steps, P].
    """
    steps = torch.tensor(rival.steps)
    candidates, errors = [], []
    for starts in rival.starts(problem):
        parameters = _best_starts(rival, problem, targets, starts)
        if parameters.shape[1]:
            parameters = _refine(rival, problem, targets, parameters, steps)
        candidates.append(parameters)
        errors.append(_mean_square(rival.predict(problem, parameters, steps) - targets))
    best = torch.stack(errors).argmin(0)
    return torch.stack(candidates)[best, torch.arange(len(steps))]


@dataclass(frozen=True)
class Ladder:
    """Fitted rivals.

    Attributes:
        index: one row per rival: family, k, query_row (whether the query row counts as a
            sample), parameters (readable).
    """

    index: pd.DataFrame
    # One entry per rival and query row, or per k: rival, query row, parameters [K, P],
    # steps [K]; in the order of `index`.
    _fitted: tuple[tuple[Rival, bool, Tensor, Tensor], ...]

    def predict(self, prompts: Prompts) -> Tensor:
        """Predictions of every rival in the order of `index`, [R, b]."""
        problems = {
            query_row: NormalEquations.of(with_query_row(prompts) if query_row else prompts)
            for query_row in {entry[1] for entry in self._fitted}
        }
        return torch.cat(
            [
                rival.predict(problems[query_row], parameters, steps)
                for rival, query_row, parameters, steps in self._fitted
            ]
        )

    def take(self, rows: Sequence[int]) -> Ladder:
        """The rivals at these rows of `index`, in this order."""
        singles = [
            (rival, query_row, parameters[i : i + 1], steps[i : i + 1])
            for rival, query_row, parameters, steps in self._fitted
            for i in range(len(steps))
        ]
        index = self.index.iloc[list(rows)].reset_index(drop=True)
        return Ladder(index, tuple(singles[row] for row in rows))


def climb(prompts: Prompts, targets: Tensor) -> Ladder:
    """Fit every rival to the predictions `targets` [b] of a model on `prompts`."""
    problems = {
        False: NormalEquations.of(prompts),
        True: NormalEquations.of(with_query_row(prompts)),
    }
    rows, fitted = [], []
    for rival in registry.RIVALS:
        for query_row, problem in problems.items():
            parameters = tune(rival, problem, targets)
            fitted.append((rival, query_row, parameters, torch.tensor(rival.steps)))
            for k, values in zip(rival.steps, parameters, strict=True):
                row = {"family": rival.name, "k": k, "query_row": query_row}
                rows.append({**row, "parameters": rival.describe(values)})
    return Ladder(pd.DataFrame(rows), tuple(fitted))


def _refine(
    rival: Rival, problem: NormalEquations, targets: Tensor, parameters: Tensor, steps: Tensor
) -> Tensor:
    """Levenberg-Marquardt from parameters [K, P]."""
    damping = parameters.new_full((len(steps),), 1e-2)
    residual = rival.predict(problem, parameters, steps) - targets
    idle = 0
    for _ in range(_ROUNDS):
        jacobian = _jacobian(rival, problem, parameters, steps, residual + targets)
        curvature = jacobian @ jacobian.mT
        diagonal = curvature.diagonal(dim1=1, dim2=2)
        floor = 1e-12 * diagonal.amax(1, keepdim=True) + 1e-100
        curvature = curvature + torch.diag_embed(damping[:, None] * diagonal + floor)
        gradient = (jacobian @ residual[..., None])[..., 0]
        move, _ = torch.linalg.solve_ex(curvature, gradient)
        # Most parameters are logarithms: a factor of e is far enough for one round.
        tried = parameters - torch.nan_to_num(move).clamp(-1, 1)
        tried_residual = rival.predict(problem, tried, steps) - targets
        gain = 1 - _mean_square(tried_residual) / _mean_square(residual).clamp(min=1e-300)
        better = gain > 0
        parameters = torch.where(better[:, None], tried, parameters)
        residual = torch.where(better[:, None], tried_residual, residual)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-10, 1e6)
        idle = 0 if (gain > _NEGLIGIBLE).any() else idle + 1
        if idle == _PATIENCE:
            break
    return parameters


def _best_starts(rival: Rival, problem: NormalEquations, targets: Tensor, starts: Tensor) -> Tensor:
    """The best of starting points [K, P] for each k, [number of steps, P]."""
    chosen = []
    for k in rival.steps:
        # Step sizes that change along the way depend on k, so each k has its own path.
        steps = torch.full((len(starts),), k)
        error = _mean_square(rival.predict(problem, starts, steps) - targets)
        chosen.append(starts[error.argmin()])
    return torch.stack(chosen)


def _jacobian(
    rival: Rival, problem: NormalEquations, parameters: Tensor, steps: Tensor, predictions: Tensor
) -> Tensor:
    """Forward differences of predictions by parameters, [K, P, b]."""
    n_sets, n_parameters = parameters.shape
    eye = torch.eye(n_parameters, dtype=parameters.dtype)
    moved = (parameters[:, None] + _DIFFERENCE * eye).reshape(-1, n_parameters)
    result = rival.predict(problem, moved, steps.repeat_interleave(n_parameters))
    change = result.reshape(n_sets, n_parameters, -1) - predictions[:, None]
    return (change / _DIFFERENCE).clamp(-DIVERGED, DIVERGED)


def _mean_square(error: Tensor) -> Tensor:
    return error.square().mean(-1)
