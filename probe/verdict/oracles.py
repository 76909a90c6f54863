r"""Models whose algorithm is known: what the thresholds of the verdict are calibrated on.

Every oracle comes with the verdict it deserves. Nothing here is trained on regression:
the closed form, gradient descent and ridge are written into weights, the other algorithms are
functions, and the networks are untrained or trained on targets of other prompts.

Each rival brings models that compute it (`probe.rivals.registry`). Here are those whose answer is
a matter of mechanism, and those that compute none.

Weight noise is a factor 1 + ε z on every weight. It is at most 2 %, and at most 20 % / R:
the construction carries signals of size 1/R beside constants of size 1, so noise ε moves its
prediction by about R ε, and beyond that bound it no longer computes least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.rivals import algorithms, descent, newton, preconditioned, registry, ridge
from probe.rivals.known import NOISE, Draw, Known, as_function, with_noise
from probe.symmetry.architecture import HeadBasis, HeadMixing, LayerScale, ResidualBasis
from probe.verdict.kinds import NORMALIZATION, OTHER, OTHER_MECHANISM

# Largest weight noise times R.
_NOISE_OVER_SCALE = 0.2
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
    for index, known in enumerate(_all(seed)):
        steps = f" ({known.k})" if known.k else ""
        made.append(Oracle(f"{index:03d} {known.group}{steps}", *known))
    return made


class Solver(LinearAttentionTransformer):
    """Least squares computed beside the blocks: layer norms are there, but not in use."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the blocks for their activations; predict by solving the normal equations."""
        super().forward(inputs)
        return Prompts.from_inputs(inputs).least_squares


# Rivals whose models come first, whatever the order of the registry: the generator draws for them
# in this order, and rivals that are new draw after all others.
_FIRST = (*descent.RIVALS, *preconditioned.RIVALS, *newton.RIVALS, *ridge.RIVALS)


def _all(seed: int) -> Iterator[Known]:
    draw = Draw(seed)
    # Every third model has weight noise.
    for index in range(80):
        yield _construction(draw, noisy=index % 3 == 0)
    for rival in _FIRST:
        yield from rival.oracles(draw)
    yield from _least_squares(draw)
    yield from _without_regression(draw)
    for _ in range(16):
        prompts = draw.prompts()
        build = _from_outside(draw, prompts)
        yield Known("construction from outside", OTHER_MECHANISM, None, build, prompts)
    for index in range(20):
        yield _after_gradient_steps(draw, noisy=index % 3 == 0)
    for rival in registry.RIVALS:
        if rival not in _FIRST:
            yield from rival.oracles(draw)


def _least_squares(draw: Draw) -> Iterator[Known]:
    """Least squares with no division in use, as a function and beside the blocks of a network."""
    for _ in range(15):
        prompts = draw.prompts()
        function = as_function(algorithms.least_squares)
        yield Known("least-squares function", OTHER_MECHANISM, None, function, prompts)
        solver = _network(draw, prompts, Solver)
        yield Known("solver beside blocks", OTHER_MECHANISM, None, solver, prompts)


def _without_regression(draw: Draw) -> Iterator[Known]:
    """Networks and functions that compute none of the algorithms."""
    for _ in range(40):
        prompts = draw.prompts()
        yield Known("untrained", OTHER, None, _network(draw, prompts), prompts)
    for _ in range(20):
        prompts = draw.prompts(p=1)
        build = partial(_trained_on_shuffled, draw.integer(), prompts)
        yield Known("trained on shuffled targets", OTHER, None, build, prompts)
    for function in (
        _nearest_sample,
        _last_sample,
        _halved,
        median_slope,
        algorithms.context_mean,
    ):
        for _ in range(4):
            build = as_function(function)
            yield Known("another function", OTHER, None, build, draw.prompts(p=1))


def _construction(draw: Draw, noisy: bool) -> Known:
    """Closed form: R, N, p, query row and symmetry vary."""
    prompts = draw.prompts()
    scale = draw.choice(10.0, 30.0, 100.0, 1000.0)
    noise = draw.uniform(0, min(NOISE, _NOISE_OVER_SCALE / scale)) * noisy
    size = {"n_context": prompts.n_context, "n_covariates": prompts.n_covariates}
    build = partial(closed_form, **size, scale=scale, exclude_query=draw.choice(True, False))
    seed = draw.integer()

    def moved() -> LinearAttentionTransformer:
        return _transformed(with_noise(build(), noise, seed), seed)

    return Known("construction" + noisy * ", noisy", NORMALIZATION, None, moved, prompts)


def _after_gradient_steps(draw: Draw, noisy: bool) -> Known:
    """Closed form of what one or two steps of gradient descent leave."""
    prompts = draw.prompts(p=1)
    sample = sample_prompts(prompts, 256, torch.Generator().manual_seed(0))
    largest = float(sample.x_var.quantile(0.99))
    steps = [draw.uniform(0.1, 0.5) / largest for _ in range(draw.choice(1, 2))]
    scale, seed = draw.choice(30.0, 100.0, 1000.0), draw.integer()
    noise = draw.uniform(0, min(NOISE, _NOISE_OVER_SCALE / scale)) * noisy
    exclude_query = draw.choice(True, False)

    def moved() -> LinearAttentionTransformer:
        model = closed_form(
            prompts.n_context, scale=scale, exclude_query=exclude_query, gradient_steps=steps
        )
        return _transformed(with_noise(model, noise, seed), seed)

    return Known(AFTER_GRADIENT_STEPS, NORMALIZATION, None, moved, prompts)


def _from_outside(draw: Draw, prompts: PromptConfig) -> Callable[[], Callable[[Tensor], Tensor]]:
    """A construction as a callable; R = 10 is left out, as inexact as other estimators are."""
    size = {"n_context": prompts.n_context, "n_covariates": prompts.n_covariates}
    build = partial(closed_form, **size, scale=draw.choice(30.0, 100.0, 1000.0))

    def wrapped() -> Callable[[Tensor], Tensor]:
        model = build()
        return lambda inputs: model(inputs)

    return wrapped


def _transformed(model: LinearAttentionTransformer, seed: int) -> LinearAttentionTransformer:
    """A random exact symmetry of every kind: weights change, predictions do not."""
    draw = Draw(seed)
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


def _network(draw: Draw, prompts: PromptConfig, kind: type = LinearAttentionTransformer):
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
    """300 steps of Adam on the targets of other prompts."""
    generator = torch.Generator().manual_seed(seed)
    model = LinearAttentionTransformer(ModelConfig(n_context=prompts.n_context), generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        batch = sample_prompts(prompts, 64, generator, dtype=torch.float32)
        loss = (model(batch.inputs) - batch.target.roll(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().requires_grad_(False)


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
