"""Preconditioned gradient descent as a rival.

P = L Lᵀ grows or shrinks geometrically over the steps, as the step sizes of
`probe.rivals.descent` do, with one spread per feature, on the rows of L.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.constructed.published import ahn_optimum, from_ahn, from_zhang, zhang_optimum
from models.tasks.config import PromptConfig
from probe.rivals import descent
from probe.rivals.algorithms import NormalEquations, preconditioned_path
from probe.rivals.known import Draw, Known
from probe.rivals.rival import Rival, schedule

# The rival with the most parameters; beyond 8 steps, neighbours predict alike.
_FEWER_K = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def _path(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    n_features = len(problem.moment)
    spreads, factor = parameters[:, :n_features], _lower_triangular(parameters[:, n_features:])
    factors = schedule(spreads, steps[:, None]).sqrt()[..., None] * factor
    return preconditioned_path(problem, factors @ factors.mT)


def _lower_triangular(entries: Tensor) -> Tensor:
    """[K, f (f+1) / 2] -> [K, f, f]."""
    size = int(((8 * entries.shape[1] + 1) ** 0.5 - 1) / 2)
    result = entries.new_zeros(len(entries), size, size)
    rows, columns = torch.tril_indices(size, size)
    result[:, rows, columns] = entries
    return result


def _starts(problem: NormalEquations) -> Tensor:
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


def _describe(parameters: Tensor) -> dict[str, float]:
    # f spreads and f (f + 1) / 2 entries.
    n_features = int(((8 * len(parameters) + 9) ** 0.5 - 3) / 2)
    factor = _lower_triangular(parameters[None, n_features:])[0]
    matrix = factor @ factor.mT
    rows, columns = torch.tril_indices(*matrix.shape).tolist()
    entries = {f"P_{i}{j}": float(matrix[i, j]) for i, j in zip(rows, columns, strict=True)}
    spreads = {f"spread_{i}": float(parameters[i]) for i in range(n_features)}
    return {**entries, **spreads}


def _oracles(draw: Draw) -> Iterator[Known]:
    """One preconditioned step, as Ahn et al. and Zhang et al. train it."""
    for length, p, (optimum, load) in itertools.product(
        (10, 20, 40), (1, 2), ((ahn_optimum, from_ahn), (zhang_optimum, from_zhang))
    ):
        covariance = torch.diag(torch.tensor([draw.uniform(0.5, 2) for _ in range(p)]))
        prompts = PromptConfig(n_context=length, n_covariates=p)

        def build(optimum=optimum, load=load, covariance=covariance, length=length) -> Any:
            return load(*optimum(covariance, length), n_context=length)

        yield Known("published optimum", descent.ALGORITHM.name, 1, build, prompts)


RIVALS = (
    Rival("preconditioned GD", descent.ALGORITHM, _path, _FEWER_K, _starts, _describe, _oracles),
)
