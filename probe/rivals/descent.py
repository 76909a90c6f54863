"""Gradient descent and GD++ as rivals.

Step sizes may grow or shrink geometrically from η e^(-s/2) at the first step to η e^(s/2)
at the last: general for k <= 2, and one parameter for every k.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.descent import gradient_descent
from probe.rivals import least_squares
from probe.rivals.algorithms import NormalEquations, descent_path
from probe.rivals.known import NOISE, Draw, Known, largest_eigenvalue, with_noise
from probe.rivals.rival import EVERY_K, Algorithm, Rival, log_grid, schedule

ALGORITHM = Algorithm("gradient descent", limit=least_squares.ALGORITHM, names="steps")


def _plain(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    sizes = parameters[:, 0].exp() * schedule(parameters[:, 1], steps)
    return descent_path(problem, sizes, torch.zeros_like(parameters[:, 0]))


def _plus_plus(problem: NormalEquations, parameters: Tensor, steps: Tensor) -> Iterator[Tensor]:
    step, gamma = parameters.exp().unbind(1)
    return descent_path(problem, step.expand(int(steps.max()), -1), gamma)


def _step_starts(problem: NormalEquations) -> Tensor:
    """Without a spread, where its derivative vanishes by symmetry, and with one."""
    steps = -log_grid(problem, -2, 5, 24)
    return torch.stack(
        [torch.stack([steps, torch.full_like(steps, spread)], 1) for spread in (0.0, 1.5)]
    )


def _step_and_gamma_starts(problem: NormalEquations) -> Tensor:
    steps, gammas = -log_grid(problem, -2, 4, 14), -log_grid(problem, -0.5, 8, 9)
    return torch.cartesian_prod(steps, gammas)[None]


def _describe_plain(parameters: Tensor) -> dict[str, float]:
    return {"eta": float(parameters[0].exp()), "spread": float(parameters[1])}


def _describe_plus_plus(parameters: Tensor) -> dict[str, float]:
    step, gamma = parameters.exp().tolist()
    return {"eta": step, "gamma": gamma}


def _plain_oracles(draw: Draw) -> Iterator[Known]:
    # Every third model has weight noise.
    for index, k in enumerate((1, 2, 3, 4, 5, 6, 8, 12) * 5):
        yield _model(draw, k, plus_plus=False, noisy=index % 3 == 0)


def _plus_plus_oracles(draw: Draw) -> Iterator[Known]:
    for index, k in enumerate((2, 3, 4, 5, 6) * 6):
        yield _model(draw, k, plus_plus=True, noisy=index % 3 == 0)


def _model(draw: Draw, k: int, plus_plus: bool, noisy: bool) -> Known:
    """GD_k or GD++_k in weights, with a step that converges on most prompts.

    Noise is on attention weights, where it changes the steps: on the readout it would be a gain
    that no algorithm has.
    """
    prompts = draw.prompts()
    largest = largest_eigenvalue(prompts)
    gamma = draw.uniform(0.05, 0.4) / largest if plus_plus else 0.0
    build = partial(
        gradient_descent,
        k,
        draw.uniform(0.3, 1.3) / largest,
        n_context=prompts.n_context,
        n_covariates=prompts.n_covariates,
        intercept=plus_plus or draw.choice(True, True, False),
        gamma=gamma,
        exclude_query=draw.choice(True, False),
    )
    noise, seed = draw.uniform(0, NOISE) * noisy, draw.integer()
    group = ("GD++ model" if plus_plus else "GD model") + noisy * ", noisy"

    def noised() -> LinearAttentionTransformer:
        return with_noise(build(), noise, seed, "attn")

    return Known(group, ALGORITHM.name, k, noised, prompts)


RIVALS = (
    Rival("GD", ALGORITHM, _plain, EVERY_K, _step_starts, _describe_plain, _plain_oracles),
    Rival(
        "GD++",
        ALGORITHM,
        _plus_plus,
        EVERY_K,
        _step_and_gamma_starts,
        _describe_plus_plus,
        _plus_plus_oracles,
    ),
)
