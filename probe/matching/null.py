"""What an alignment score is worth: its distribution over models that did not learn it.

Two kinds of models of the learned model's own class and shape are aligned to the same reference
in the same way: freshly initialised ones, and ones whose weights hold another algorithm (gradient
descent, GD++ and preconditioned gradient descent with random step sizes, in a random residual
basis, with noise). A score has one p-value per kind, (1 + k) / (1 + n) with k of n null models
scoring at least as much; the larger one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.descent import gradient_descent
from probe.symmetry.architecture import ResidualBasis
from probe.symmetry.weights import Weights, complement, weights_of

# Draws per kind: p-values go down to 0.005, or to 0.01 where a draw is expensive.
DRAWS, FEW_DRAWS = 199, 99
_NOISE = 0.1

Scorer = Callable[[Sequence[Weights]], np.ndarray]
_cache: dict[tuple, pd.DataFrame] = {}


def untrained(model: LinearAttentionTransformer, generator: torch.Generator) -> Weights:
    """Weights as training starts from them, for a model of the same class and shape."""
    return weights_of(model.untrained(generator))


def other_algorithm(config: ModelConfig, generator: torch.Generator) -> Weights:
    """Gradient-descent weights in the given shape, with random steps, basis and noise.

    Raises:
        ValueError: if d_model has no room for the covariates and the residual.
    """
    p, d, n_layers = config.n_covariates, config.d_model, config.n_layers

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    intercept = d >= p + 2 and bool(uniform(0, 1) < 0.75)
    features = p + intercept
    steps = uniform(0.1, 1.5, n_layers)
    gamma = uniform(0, 0.5, n_layers) * float(uniform(0, 1) < 0.5)
    if not gamma.any() and uniform(0, 1) < 0.5:
        mixing = uniform(-0.5, 0.5, n_layers, features, features)
        steps = steps[:, None, None] * (torch.eye(features, dtype=torch.float64) + mixing)
    source = gradient_descent(
        n_layers,
        steps,
        n_context=max(config.n_context, p + 2),
        n_covariates=p,
        intercept=intercept,
        initial_weights=uniform(-0.3, 0.3, features),
        gamma=gamma.tolist(),
    )
    weights = {}
    for name, value in weights_of(source).items():
        target = torch.zeros(config.parameter_shapes()[name], dtype=torch.float64)
        if name == "unembed.W_U":
            target[-1, : value.shape[1]] = value[-1]
        else:
            target[tuple(slice(n) for n in value.shape)] = value
        weights[name] = target
    for name, shape in config.parameter_shapes().items():
        weights.setdefault(name, torch.full(shape, float(name.endswith("w")), dtype=torch.float64))
    if config.has_norm and not config.norm_affine and uniform(0, 1) < 0.5:
        rest = complement(torch.ones(1, d, dtype=torch.float64))
        random = torch.randn(d - 1, d - 1, generator=generator, dtype=torch.float64)
        turn = rest.T @ torch.linalg.qr(random).Q @ rest + 1 / d
        weights = ResidualBasis(turn).transform(weights, config)
    for name, value in weights.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        weights[name] = value + _NOISE * value.square().mean().sqrt() * noise
    return weights


def null_models(
    model: LinearAttentionTransformer, draws: int, generator: torch.Generator
) -> dict[str, list[Weights]]:
    """Weights of `draws` models of each kind, for models of the class and shape of `model`."""
    config = model.cfg
    models = {"untrained": [untrained(model, generator) for _ in range(draws)]}
    if config.d_model >= config.n_covariates + 1:
        models["other algorithm"] = [other_algorithm(config, generator) for _ in range(draws)]
    return models


def progress(models: Iterable[Weights]) -> Iterable[Weights]:
    """The same models under a progress bar, for the slow loop of a scorer."""
    return tqdm(models, desc="models without the circuit", disable=None, leave=False)


def null_scores(
    scorer: Scorer, model: LinearAttentionTransformer, seed: int, draws: int, key: tuple
) -> pd.DataFrame:
    """Scores of null models, computed once per `key` in a process.

    Args:
        scorer: aligns models of the shape of `model` to the reference and returns their scores.
        model: the learned model.
        seed: of the null models.
        draws: how many of each kind.
        key: everything the scorer depends on: level, reference (`weights_hash`), settings.

    Returns:
        DataFrame with columns kind, score.
    """
    full_key = (type(model), model.cfg.model_dump_json(), seed, draws, *key)
    if full_key not in _cache:
        generator = torch.Generator().manual_seed(seed)
        frames = [
            pd.DataFrame({"kind": kind, "score": scorer(models)})
            for kind, models in null_models(model, draws, generator).items()
        ]
        _cache[full_key] = pd.concat(frames, ignore_index=True)
    return _cache[full_key]


def p_value(score: float, null: pd.DataFrame) -> float:
    """(1 + k) / (1 + n), the larger of the kinds."""
    return max(
        float((1 + (kind["score"].to_numpy() >= score).sum()) / (1 + len(kind)))
        for _, kind in null.groupby("kind")
    )
