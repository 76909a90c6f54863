"""Predictions without regression as rivals: the mean of the context's y, and zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from probe.rivals.algorithms import NormalEquations
from probe.rivals.rival import Algorithm, Rival

MEAN = Algorithm("context mean", trivial=True)
ZERO = Algorithm("zero", trivial=True)


def _context_mean(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield problem.y_mean[None]


def _zero(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    yield torch.zeros_like(problem.y_mean)[None]


RIVALS = (Rival("context mean", MEAN, _context_mean), Rival("zero", ZERO, _zero))
