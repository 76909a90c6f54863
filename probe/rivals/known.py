"""Models whose algorithm is known, and the random choices they are made of.

Weight noise is a factor 1 + ε z on every weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.rivals.algorithms import NormalEquations

# Largest weight noise ε.
NOISE = 0.02


class Known(NamedTuple):
    """A model with a known answer.

    Attributes:
        group: how it was made.
        kind: the verdict it deserves, without k or λ.
        k: number of steps, where the verdict names one.
        build: makes the model.
        prompts: the distribution to judge it on.
    """

    group: str
    kind: str
    k: int | None
    build: Callable[[], Any]
    prompts: PromptConfig


class Draw:
    """Random choices from one generator, seeded with `seed`."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float) -> float:
        """A number between `low` and `high`."""
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def log_uniform(self, low: float, high: float) -> float:
        """A number whose logarithm is uniform."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def choice(self, *values: Any) -> Any:
        """One of some values."""
        return values[int(torch.randint(len(values), (), generator=self.generator))]

    def integer(self) -> int:
        """A seed."""
        return int(torch.randint(2**31, (), generator=self.generator))

    def prompts(self, p: int | None = None) -> PromptConfig:
        """A distribution of prompts, with `p` covariates or a number that is drawn."""
        n_covariates = p or self.choice(1, 1, 1, 2, 3)
        n_context = self.choice(10, 20, 50, 100) if n_covariates == 1 else self.choice(20, 50, 100)
        if self.choice(True, False):
            return PromptConfig(n_context=n_context, n_covariates=n_covariates)
        return PromptConfig(
            n_context=n_context, n_covariates=n_covariates, x_mean_std=1.0, x_log_scale=0.7
        )


def as_function(
    algorithm: Callable[..., Tensor], *settings: Any
) -> Callable[[], Callable[[Tensor], Tensor]]:
    """Makes a callable on inputs that is an algorithm on prompts with some settings."""

    def build() -> Callable[[Tensor], Tensor]:
        return lambda inputs: algorithm(Prompts.from_inputs(inputs), *settings)

    return build


def with_noise(
    model: LinearAttentionTransformer, noise: float, seed: int, part: str = ""
) -> LinearAttentionTransformer:
    """The model with every weight of a name that holds `part` times 1 + `noise` z, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        z = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.mul_(1 + noise * (part in name) * z)
    return model


def largest_eigenvalue(prompts: PromptConfig) -> float:
    """90th percentile over prompts of the largest eigenvalue of G."""
    sample = sample_prompts(prompts, 256, torch.Generator().manual_seed(0))
    largest = NormalEquations.of(sample).eigenvalues[-1]
    return float(largest.quantile(0.9))
