r"""Models whose algorithm is known: what the thresholds of the verdict are calibrated on.

Every oracle comes with the verdict it deserves. Nothing here is trained on regression:
the closed form, gradient descent and ridge are written into weights, the other algorithms are
functions, and the networks are untrained or trained on targets of other prompts.

Weight noise is a factor 1 + ε z on every weight. It is at most 2 %, and at most 20 % / R:
the construction carries signals of size 1/R beside constants of size 1, so noise ε moves its
prediction by about R ε, and beyond that bound it no longer computes least squares. Gradient
descent has it on its attention weights, where it changes the steps: on the readout it would be a
gain that no algorithm has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig, PromptConfig
from models.constructed import closed_form, gradient_descent
from models.prompts import Prompts, prompts_from_arrays, sample_prompts
from models.published import ahn_optimum, from_ahn, from_zhang, zhang_optimum
from models.transformer import LinearAttentionTransformer
from probe import algorithms
from probe.transformations import HeadBasis, HeadMixing, LayerScale, ResidualBasis
from probe.verdict import DESCENT, NEWTON, NORMALIZATION, OTHER, OTHER_MECHANISM, RIDGE

# Largest weight noise, and largest weight noise times R.
_NOISE, _NOISE_OVER_SCALE = 0.02, 0.2
AFTER_GRADIENT_STEPS = "construction after gradient steps"


@dataclass(frozen=True)
class Oracle:
    """A model with a known answer.

    Attributes:
        name: unique, in words.
        group: how it was made, for the confusion matrix.
        kind: the verdict it deserves, without k or λ.
        k: number of steps, where the verdict names one.
        build: makes the model.
        prompts: the distribution to judge it on.
    """

    name: str
    group: str
    kind: str
    k: int | None
    build: Callable[[], Any]
    prompts: PromptConfig


def oracles(seed: int = 0) -> list[Oracle]:
    """At least 300 oracles, the same for the same seed; models are built on demand."""
    made = []
    for index, (group, kind, k, build, prompts) in enumerate(_all(seed)):
        steps = f" ({k})" if k else ""
        made.append(Oracle(f"{index:03d} {group}{steps}", group, kind, k, build, prompts))
    return made


class Solver(LinearAttentionTransformer):
    """Least squares computed beside the blocks: layer norms are there, but not in use."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the blocks for their activations; predict by solving the normal equations."""
        super().forward(inputs)
        return as_prompts(inputs).least_squares


def as_prompts(inputs: Tensor) -> Prompts:
    """Prompts from what a model sees, [b, N+1, 2+p]."""
    return prompts_from_arrays(inputs[:, :-1, 1:-1], inputs[:, :-1, -1], inputs[:, -1, 1:-1])


def _all(seed: int) -> Iterator[tuple[str, str, int | None, Callable[[], Any], PromptConfig]]:
    """Every oracle as (group, kind, k, build, prompts)."""
    draw = _Draw(seed)
    # Every third model has weight noise.
    for index in range(80):
        yield from _constructions(draw, noisy=index % 3 == 0)
    for index, k in enumerate((1, 2, 3, 4, 5, 6, 8, 12) * 5):
        yield from _descents(draw, k, plus_plus=False, noisy=index % 3 == 0)
    for index, k in enumerate((2, 3, 4, 5, 6) * 6):
        yield from _descents(draw, k, plus_plus=True, noisy=index % 3 == 0)
    for length in (10, 20, 40):
        yield from _published(draw, length)
    for k in (1, 2, 3, 4, 5) * 7:
        prompts = draw.prompts()
        yield "Newton function", NEWTON, k, partial(_function, algorithms.newton, k), prompts
    for _ in range(15):
        yield from _ridges(draw)
    for _ in range(15):
        prompts = draw.prompts()
        least_squares = partial(_function, algorithms.least_squares)
        yield "least-squares function", OTHER_MECHANISM, None, least_squares, prompts
        yield (
            "solver beside blocks",
            OTHER_MECHANISM,
            None,
            _network(draw, prompts, Solver),
            prompts,
        )
    for _ in range(40):
        prompts = draw.prompts()
        yield "untrained", OTHER, None, _network(draw, prompts), prompts
    for _ in range(20):
        prompts = draw.prompts(p=1)
        build = partial(_trained_on_shuffled, draw.integer(), prompts)
        yield "trained on shuffled targets", OTHER, None, build, prompts
    for function in (
        _nearest_sample,
        _last_sample,
        _halved,
        median_slope,
        algorithms.context_mean,
    ):
        for _ in range(4):
            yield "another function", OTHER, None, partial(_function, function), draw.prompts(p=1)
    for _ in range(16):
        prompts = draw.prompts()
        build = _from_outside(draw, prompts)
        yield "construction from outside", OTHER_MECHANISM, None, build, prompts
    for index in range(20):
        yield from _after_gradient_steps(draw, noisy=index % 3 == 0)


class _Draw:
    """Random choices from one generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def log_uniform(self, low: float, high: float) -> float:
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def choice(self, *values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=self.generator))]

    def integer(self) -> int:
        return int(torch.randint(2**31, (), generator=self.generator))

    def prompts(self, p: int | None = None) -> PromptConfig:
        p = p or self.choice(1, 1, 1, 2, 3)
        n_context = self.choice(10, 20, 50, 100) if p == 1 else self.choice(20, 50, 100)
        if self.choice(True, False):
            return PromptConfig(n_context=n_context, n_covariates=p)
        return PromptConfig(n_context=n_context, n_covariates=p, x_mean_std=1.0, x_log_scale=0.7)


def _constructions(draw: _Draw, noisy: bool) -> Iterator[tuple]:
    """Closed form: R, N, p, query row and symmetry vary."""
    prompts = draw.prompts()
    scale = draw.choice(10.0, 30.0, 100.0, 1000.0)
    noise = draw.uniform(0, min(_NOISE, _NOISE_OVER_SCALE / scale)) * noisy
    size = {"n_context": prompts.n_context, "n_covariates": prompts.n_covariates}
    build = partial(closed_form, **size, scale=scale, exclude_query=draw.choice(True, False))
    seed = draw.integer()

    def moved() -> LinearAttentionTransformer:
        return _transformed(_with_noise(build(), noise, seed), seed)

    yield "construction" + noisy * ", noisy", NORMALIZATION, None, moved, prompts


def _after_gradient_steps(draw: _Draw, noisy: bool) -> Iterator[tuple]:
    """Closed form of what one or two steps of gradient descent leave."""
    prompts = draw.prompts(p=1)
    sample = sample_prompts(prompts, 256, torch.Generator().manual_seed(0))
    largest = float(sample.x_var.quantile(0.99))
    steps = [draw.uniform(0.1, 0.5) / largest for _ in range(draw.choice(1, 2))]
    scale, seed = draw.choice(30.0, 100.0, 1000.0), draw.integer()
    noise = draw.uniform(0, min(_NOISE, _NOISE_OVER_SCALE / scale)) * noisy
    exclude_query = draw.choice(True, False)

    def moved() -> LinearAttentionTransformer:
        model = closed_form(
            prompts.n_context, scale=scale, exclude_query=exclude_query, gradient_steps=steps
        )
        return _transformed(_with_noise(model, noise, seed), seed)

    yield AFTER_GRADIENT_STEPS, NORMALIZATION, None, moved, prompts


def _from_outside(draw: _Draw, prompts: PromptConfig) -> Callable[[], Callable[[Tensor], Tensor]]:
    """A construction as a callable; R = 10 is left out, as inexact as other estimators are."""
    size = {"n_context": prompts.n_context, "n_covariates": prompts.n_covariates}
    build = partial(closed_form, **size, scale=draw.choice(30.0, 100.0, 1000.0))

    def wrapped() -> Callable[[Tensor], Tensor]:
        model = build()
        return lambda inputs: model(inputs)

    return wrapped


def _with_noise(
    model: LinearAttentionTransformer, noise: float, seed: int, part: str = ""
) -> LinearAttentionTransformer:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        z = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.mul_(1 + noise * (part in name) * z)
    return model


def _transformed(model: LinearAttentionTransformer, seed: int) -> LinearAttentionTransformer:
    """A random exact symmetry of every kind: weights change, predictions do not."""
    draw = _Draw(seed)
    d = model.cfg.d_model
    for layer in range(model.cfg.n_layers):
        mixing = torch.eye(2) + 0.4 * torch.randn(2, 2, generator=draw.generator)
        basis = torch.eye(d) + 0.2 * torch.randn(d, d, generator=draw.generator)
        scale = torch.tensor(draw.log_uniform(0.5, 2), dtype=torch.float64)
        model = HeadMixing(layer, mixing.double()).apply(model)
        model = HeadBasis(layer, 0, basis.double()).apply(model)
        model = LayerScale(layer, scale).apply(model)
    order = torch.randperm(d, generator=draw.generator)
    return ResidualBasis(torch.eye(d, dtype=torch.float64)[order]).apply(model)


def _descents(draw: _Draw, k: int, plus_plus: bool, noisy: bool) -> Iterator[tuple]:
    """GD_k or GD++_k with a step that converges on most prompts."""
    prompts = draw.prompts()
    largest = _largest_eigenvalue(prompts)
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
    noise, seed = draw.uniform(0, _NOISE) * noisy, draw.integer()
    group = ("GD++ model" if plus_plus else "GD model") + noisy * ", noisy"
    yield group, DESCENT, k, lambda: _with_noise(build(), noise, seed, "attn"), prompts


def _published(draw: _Draw, length: int) -> Iterator[tuple]:
    """One preconditioned step, as Ahn et al. and Zhang et al. train it."""
    for p, (optimum, load) in itertools.product(
        (1, 2), ((ahn_optimum, from_ahn), (zhang_optimum, from_zhang))
    ):
        covariance = torch.diag(torch.tensor([draw.uniform(0.5, 2) for _ in range(p)]))
        prompts = PromptConfig(n_context=length, n_covariates=p)

        def build(optimum=optimum, load=load, covariance=covariance, length=length) -> Any:
            return load(*optimum(covariance, length), n_context=length)

        yield "published optimum", DESCENT, 1, build, prompts


def _ridges(draw: _Draw) -> Iterator[tuple]:
    """Ridge as a function, with and without a free intercept, and as the construction."""
    for free in (False, True):
        prompts = draw.prompts()
        penalty = draw.log_uniform(0.02, 1)
        function = partial(_function, algorithms.ridge, penalty, free)
        yield "ridge function", RIDGE, None, function, prompts
    prompts = draw.prompts(p=1)
    ridge = draw.log_uniform(0.05, 1)
    build = partial(closed_form, prompts.n_context, scale=100.0, ridge=ridge)
    yield "ridge construction", RIDGE, None, build, prompts


def _network(draw: _Draw, prompts: PromptConfig, kind: type = LinearAttentionTransformer):
    """A network with random weights and shape."""
    config = ModelConfig(
        d_model=draw.choice(4, 6, 8),
        n_layers=draw.choice(1, 2, 3),
        n_heads=draw.choice(1, 2, 4),
        n_context=prompts.n_context,
        n_covariates=prompts.n_covariates,
        normalization=draw.choice("branch", "branch", "post", "none"),
        readout=draw.choice("flatten", "query"),
        exclude_query=draw.choice(True, False),
    )
    return partial(_build_network, kind, config, draw.integer())


def _build_network(kind: type, config: ModelConfig, seed: int) -> LinearAttentionTransformer:
    generator = torch.Generator().manual_seed(seed)
    return kind(config, generator).double().requires_grad_(False)


def _trained_on_shuffled(seed: int, prompts: PromptConfig) -> LinearAttentionTransformer:
    """300 steps of Adam on the least-squares predictions of other prompts."""
    generator = torch.Generator().manual_seed(seed)
    model = LinearAttentionTransformer(ModelConfig(n_context=prompts.n_context), generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        batch = sample_prompts(prompts, 64, generator, dtype=torch.float32)
        loss = (model(batch.inputs) - batch.least_squares.roll(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().requires_grad_(False)


def _function(algorithm: Callable, *settings: Any) -> Callable[[Tensor], Tensor]:
    """An algorithm on prompts as a callable on inputs."""
    return lambda inputs: algorithm(as_prompts(inputs), *settings)


def _nearest_sample(prompts: Prompts) -> Tensor:
    """y of the sample whose x is nearest to the query."""
    nearest = (prompts.x - prompts.query[:, None]).abs().sum(2).argmin(1)
    return prompts.y[torch.arange(len(prompts)), nearest]


def _last_sample(prompts: Prompts) -> Tensor:
    return prompts.y[:, -1]


def _halved(prompts: Prompts) -> Tensor:
    return 0.5 * prompts.least_squares


def median_slope(prompts: Prompts) -> Tensor:
    """Theil-Sen: the median slope over pairs of samples, through the medians."""
    first, second = torch.triu_indices(prompts.n_context, prompts.n_context, offset=1)
    x, y = prompts.x[..., 0], prompts.y
    slope = ((y[:, first] - y[:, second]) / (x[:, first] - x[:, second])).median(1).values
    at_query = prompts.query[:, 0] - x.median(1).values
    return y.median(1).values + slope * at_query


def _largest_eigenvalue(prompts: PromptConfig) -> float:
    """90th percentile over prompts of the largest eigenvalue of G."""
    sample = sample_prompts(prompts, 256, torch.Generator().manual_seed(0))
    largest = algorithms.Problem.of(sample).eigenvalues[-1]
    return float(largest.quantile(0.9))
