r"""The rival ladder: every algorithm with its free parameters fitted to a model.

A `Family` is a rival of `probe.algorithms` with free parameters. `tune` fits them to given
predictions for every number of steps at once, so that each rival explains a model as
well as it can; `climb` does so for all families, with and without the query row
among the samples, and returns the `Ladder` of fitted rivals.

Step sizes may grow or shrink geometrically from η e^(-s/2) at the first step to η e^(s/2)
at the last: general for k <= 2, and one parameter for every k. Preconditioners P = L Lᵀ do so
with one spread per feature, on the rows of L.

Shapes: b batch, K parameter sets, P parameters, R rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pandas as pd
import torch
from torch import Tensor

from models.prompts import Prompts
from probe.algorithms import (
    Problem,
    descent_path,
    free_intercept_ridge_path,
    newton_path,
    preconditioned_path,
    ridge_path,
    with_query_row,
)

_EVERY_K = tuple(range(1, 33))
# Preconditioners have the most parameters; beyond 8 steps, neighbours predict alike.
_FEWER_K = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
# Predictions beyond this are a divergence; capped so that distances stay numbers.
_CAP = 1e30
_ROUNDS = 15
_DIFFERENCE = 1e-6
# Refinement ends after this many rounds without a relative gain beyond that.
_PATIENCE, _NEGLIGIBLE = 3, 1e-3

# From parameter sets [K, P] and the number of steps each is meant to run [K], predictions
# [K, b] after 1, 2, ... steps.
Path = Callable[[Problem, Tensor, Tensor], Iterator[Tensor]]


@dataclass(frozen=True)
class Family:
    """A rival with free parameters.

    Attributes:
        name: key of tables.
        steps: the values of k in a sweep; (1,) if the rival is not iterative.
        path: its predictions, step by step.
        starts: groups of parameter sets to tune from, [groups, K, P].
        describe: readable values of one parameter set [P].
    """

    name: str
    steps: tuple[int, ...]
    path: Path
    starts: Callable[[Problem], Tensor]
    describe: Callable[[Tensor], dict[str, float]]

    def predict(self, problem: Problem, parameters: Tensor, steps: Tensor) -> Tensor:
        """Predictions of parameter sets [K, P], each after its own number of steps [K]: [K, b].

        A rival that diverges predicts a large finite number.
        """
        result = problem.y_mean.new_empty(len(parameters), len(problem.y_mean))
        path = self.path(problem, parameters, steps)
        for k, prediction in enumerate(islice(path, int(steps.max())), 1):
            chosen = steps == k
            if chosen.any():
                result[chosen] = prediction.expand(len(steps), -1)[chosen]
        return torch.nan_to_num(result, nan=_CAP).clamp(-_CAP, _CAP)


def tune(family: Family, problem: Problem, targets: Tensor) -> Tensor:
    """Fit a family to predictions, for every k of its sweep.

    Of each group of starting points the best one for each k is refined by
    Levenberg-Marquardt, all k in parallel; the best result stays.

    Args:
        family: which rival.
        problem: the prompts to fit on.
        targets: predictions to explain, [b].

    Returns:
        Parameters, [number of steps, P].
    """
    steps = torch.tensor(family.steps)
    candidates, errors = [], []
    for starts in family.starts(problem):
        parameters = _best_starts(family, problem, targets, starts)
        if parameters.shape[1]:
            parameters = _refine(family, problem, targets, parameters, steps)
        candidates.append(parameters)
        errors.append(_mean_square(family.predict(problem, parameters, steps) - targets))
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
    # One entry per family and query row, or per rival: family, query row, parameters [K, P],
    # steps [K]; in the order of `index`.
    _fitted: tuple[tuple[Family, bool, Tensor, Tensor], ...]

    def predict(self, prompts: Prompts) -> Tensor:
        """Predictions of every rival in the order of `index`, [R, b]."""
        problems = {
            query_row: Problem.of(with_query_row(prompts) if query_row else prompts)
            for query_row in {entry[1] for entry in self._fitted}
        }
        return torch.cat(
            [
                family.predict(problems[query_row], parameters, steps)
                for family, query_row, parameters, steps in self._fitted
            ]
        )

    def take(self, rows: Sequence[int]) -> Ladder:
        """The rivals at these rows of `index`, in this order."""
        singles = [
            (family, query_row, parameters[i : i + 1], steps[i : i + 1])
            for family, query_row, parameters, steps in self._fitted
            for i in range(len(steps))
        ]
        index = self.index.iloc[list(rows)].reset_index(drop=True)
        return Ladder(index, tuple(singles[row] for row in rows))


def climb(prompts: Prompts, targets: Tensor) -> Ladder:
    """Fit every family to the predictions `targets` [b] of a model on `prompts`."""
    problems = {False: Problem.of(prompts), True: Problem.of(with_query_row(prompts))}
    rows, fitted = [], []
    for family in FAMILIES:
        for query_row, problem in problems.items():
            parameters = tune(family, problem, targets)
            fitted.append((family, query_row, parameters, torch.tensor(family.steps)))
            for k, values in zip(family.steps, parameters, strict=True):
                row = {"family": family.name, "k": k, "query_row": query_row}
                rows.append({**row, "parameters": family.describe(values)})
    return Ladder(pd.DataFrame(rows), tuple(fitted))


def _refine(
    family: Family, problem: Problem, targets: Tensor, parameters: Tensor, steps: Tensor
) -> Tensor:
    """Levenberg-Marquardt from parameters [K, P]."""
    damping = parameters.new_full((len(steps),), 1e-2)
    residual = family.predict(problem, parameters, steps) - targets
    idle = 0
    for _ in range(_ROUNDS):
        jacobian = _jacobian(family, problem, parameters, steps, residual + targets)
        curvature = jacobian @ jacobian.mT
        diagonal = curvature.diagonal(dim1=1, dim2=2)
        floor = 1e-12 * diagonal.amax(1, keepdim=True) + 1e-100
        curvature = curvature + torch.diag_embed(damping[:, None] * diagonal + floor)
        gradient = (jacobian @ residual[..., None])[..., 0]
        move, _ = torch.linalg.solve_ex(curvature, gradient)
        # Most parameters are logarithms: a factor of e is far enough for one round.
        tried = parameters - torch.nan_to_num(move).clamp(-1, 1)
        tried_residual = family.predict(problem, tried, steps) - targets
        gain = 1 - _mean_square(tried_residual) / _mean_square(residual).clamp(min=1e-300)
        better = gain > 0
        parameters = torch.where(better[:, None], tried, parameters)
        residual = torch.where(better[:, None], tried_residual, residual)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-10, 1e6)
        idle = 0 if (gain > _NEGLIGIBLE).any() else idle + 1
        if idle == _PATIENCE:
            break
    return parameters


def _best_starts(family: Family, problem: Problem, targets: Tensor, starts: Tensor) -> Tensor:
    """The best of starting points [K, P] for each k, [number of steps, P]."""
    chosen = []
    for k in family.steps:
        # Step sizes that change along the way depend on k, so each k has its own path.
        steps = torch.full((len(starts),), k)
        error = _mean_square(family.predict(problem, starts, steps) - targets)
        chosen.append(starts[error.argmin()])
    return torch.stack(chosen)


def _jacobian(
    family: Family, problem: Problem, parameters: Tensor, steps: Tensor, predictions: Tensor
) -> Tensor:
    """Forward differences of predictions by parameters, [K, P, b]."""
    n_sets, n_parameters = parameters.shape
    eye = torch.eye(n_parameters, dtype=parameters.dtype)
    moved = (parameters[:, None] + _DIFFERENCE * eye).reshape(-1, n_parameters)
    result = family.predict(problem, moved, steps.repeat_interleave(n_parameters))
    change = result.reshape(n_sets, n_parameters, -1) - predictions[:, None]
    return (change / _DIFFERENCE).clamp(-_CAP, _CAP)


def _mean_square(error: Tensor) -> Tensor:
    return error.square().mean(-1)


def _nothing(problem: Problem) -> Tensor:
    return problem.y_mean.new_zeros(1, 1, 0)


def _least_squares(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield problem.least_squares[None]


def _context_mean(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield problem.y_mean[None]


def _zero(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield torch.zeros_like(problem.y_mean)[None]


def _newton(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return newton_path(problem)


def _ridge(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return ridge_path(problem, parameters[:, 0].exp())


def _free_ridge(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    return free_intercept_ridge_path(problem, parameters[:, 0].exp())


def _descent(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    sizes = parameters[:, 0].exp() * _schedule(parameters[:, 1], steps)
    return descent_path(problem, sizes, torch.zeros_like(parameters[:, 0]))


def _descent_pp(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    step, gamma = parameters.exp().unbind(1)
    return descent_path(problem, step.expand(int(steps.max()), -1), gamma)


def _preconditioned(problem: Problem, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    n_features = len(problem.moment)
    spreads, factor = parameters[:, :n_features], _lower_triangular(parameters[:, n_features:])
    schedule = _schedule(spreads, steps[:, None]).sqrt()
    factors = schedule[..., None] * factor
    return preconditioned_path(problem, factors @ factors.mT)


def _schedule(spread: Tensor, steps: Tensor) -> Tensor:
    """Geometric factors of each step, from e^(-spread/2) to e^(spread/2), [max steps, ...]."""
    position = torch.arange(int(steps.max()), dtype=spread.dtype)
    position = position.reshape(-1, *(1,) * spread.ndim)
    last = (steps - 1).clamp(min=1)
    # Beyond a set's own number of steps its predictions are not used.
    return (spread * ((position / last).clamp(max=1) - 0.5) * (steps > 1)).exp()


def _lower_triangular(entries: Tensor) -> Tensor:
    """[K, f (f+1) / 2] -> [K, f, f]."""
    size = int(((8 * entries.shape[1] + 1) ** 0.5 - 1) / 2)
    result = entries.new_zeros(len(entries), size, size)
    rows, columns = torch.tril_indices(size, size)
    result[:, rows, columns] = entries
    return result


def _log_grid(problem: Problem, low: float, high: float, size: int, row: int = -1) -> Tensor:
    """Logarithms from `low` to `high` below or above a typical eigenvalue's, [size]."""
    typical = problem.eigenvalues[row].median().log()
    return torch.linspace(low, high, size, dtype=typical.dtype) + typical


def _step_starts(problem: Problem) -> Tensor:
    """Without a spread, where its derivative vanishes by symmetry, and with one."""
    steps = -_log_grid(problem, -2, 5, 24)
    return torch.stack(
        [torch.stack([steps, torch.full_like(steps, spread)], 1) for spread in (0.0, 1.5)]
    )


def _step_and_gamma_starts(problem: Problem) -> Tensor:
    steps, gammas = -_log_grid(problem, -2, 4, 14), -_log_grid(problem, -0.5, 8, 9)
    return torch.cartesian_prod(steps, gammas)[None]


def _penalty_starts(problem: Problem) -> Tensor:
    return _log_grid(problem, -14, 5, 40, row=0)[None, :, None]


def _preconditioner_starts(problem: Problem) -> Tensor:
    """Multiples of I, of the inverse mean Gram matrix, and of I without the intercept."""
    mean = problem.gram.mean(2)
    eye = torch.eye(len(mean), dtype=mean.dtype)
    slopes = eye.clone()
    # Small but not zero: at zero the derivative by this entry vanishes.
    slopes[0, 0] = 0.03
    typical = problem.eigenvalues[-1].median().sqrt()
    whitening = torch.linalg.cholesky(torch.linalg.inv(mean))
    shapes = torch.stack([eye / typical, slopes / typical, whitening])
    sizes = torch.linspace(-2.5, 1, 12, dtype=mean.dtype).exp()
    factors = (sizes[:, None, None, None] * shapes).reshape(-1, *eye.shape)
    rows, columns = torch.tril_indices(*eye.shape)
    entries = factors[:, rows, columns]
    starts = [torch.cat([torch.full((len(entries), len(eye)), s), entries], 1) for s in (0.0, 1.0)]
    return torch.stack(starts)


def _describe_nothing(parameters: Tensor) -> dict[str, float]:
    return {}


def _describe_ridge(parameters: Tensor) -> dict[str, float]:
    return {"lambda": float(parameters[0].exp())}


def _describe_descent(parameters: Tensor) -> dict[str, float]:
    return {"eta": float(parameters[0].exp()), "spread": float(parameters[1])}


def _describe_descent_pp(parameters: Tensor) -> dict[str, float]:
    step, gamma = parameters.exp().tolist()
    return {"eta": step, "gamma": gamma}


def _describe_preconditioned(parameters: Tensor) -> dict[str, float]:
    # f spreads and f (f + 1) / 2 entries.
    n_features = int(((8 * len(parameters) + 9) ** 0.5 - 3) / 2)
    factor = _lower_triangular(parameters[None, n_features:])[0]
    matrix = factor @ factor.mT
    rows, columns = torch.tril_indices(*matrix.shape).tolist()
    entries = {f"P_{i}{j}": float(matrix[i, j]) for i, j in zip(rows, columns, strict=True)}
    spreads = {f"spread_{i}": float(parameters[i]) for i in range(n_features)}
    return {**entries, **spreads}


# Fewest free parameters first: the order in which ties are resolved.
FAMILIES = (
    Family("least squares", (1,), _least_squares, _nothing, _describe_nothing),
    Family("context mean", (1,), _context_mean, _nothing, _describe_nothing),
    Family("zero", (1,), _zero, _nothing, _describe_nothing),
    Family("Newton", _EVERY_K, _newton, _nothing, _describe_nothing),
    Family("ridge", (1,), _ridge, _penalty_starts, _describe_ridge),
    Family("ridge, free intercept", (1,), _free_ridge, _penalty_starts, _describe_ridge),
    Family("GD", _EVERY_K, _descent, _step_starts, _describe_descent),
    Family("GD++", _EVERY_K, _descent_pp, _step_and_gamma_starts, _describe_descent_pp),
    Family(
        "preconditioned GD",
        _FEWER_K,
        _preconditioned,
        _preconditioner_starts,
        _describe_preconditioned,
    ),
)
