"""Copies of a model with a planted change, so that a matcher can be tested on a known answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from probe.matching.signed_permutation import permutation_matrix
from probe.symmetry.architecture import HeadMixing, ResidualBasis, Symmetry
from probe.symmetry.catalogue import families
from probe.symmetry.weights import Weights, change_basis, complement

# Size of the random step that each family of symmetries takes away from the identity.
_STEP = 0.5
_WORST_CONDITION = 30


def scrambled(weights: Weights, config: ModelConfig, generator: torch.Generator) -> Weights:
    """A random element of every family of symmetries, then a large rotation that fixes 1.

    Nearly singular matrices are drawn again: they are exact symmetries too, but what they
    shrink drowns in noise that is added afterwards.
    """
    for index in range(len(list(families(weights, config)))):
        # Built anew: what a family is free to do depends on the weights.
        family, identity = list(families(weights, config))[index]
        weights = _element(family, identity, generator).transform(weights, config)
    return rotated(weights, config, generator)


def _element(family: Callable, identity: Tensor, generator: torch.Generator) -> Symmetry:
    """A member of a family, a random step away from the identity."""
    is_scale = identity.ndim == 0 and identity == 1
    while True:
        step = _STEP * _normal(generator, *identity.shape)
        symmetry = family(step.exp() if is_scale else identity + step)
        matrix = getattr(symmetry, "matrix", None)
        if matrix is None or torch.linalg.cond(matrix) < _WORST_CONDITION:
            return symmetry


def rotated(weights: Weights, config: ModelConfig, generator: torch.Generator) -> Weights:
    """A random rotation of the residual stream that fixes 1."""
    d = config.d_model
    rest = complement(torch.ones(1, d, dtype=torch.float64))
    turn = torch.linalg.qr(_normal(generator, d - 1, d - 1)).Q
    return ResidualBasis(rest.T @ turn @ rest + 1 / d).transform(weights, config)


def relabelled(
    weights: Weights,
    config: ModelConfig,
    order: Sequence[int],
    signs: Sequence[float],
    generator: torch.Generator | None = None,
) -> Weights:
    """Coordinate order[j], times signs[j], holds what coordinate j held.

    With a generator the heads of every layer are shuffled and rescaled as well.
    """
    matrix = permutation_matrix(np.array(order), np.array(signs, dtype=float))
    weights = change_basis(weights, config, torch.from_numpy(matrix.T.copy()))
    if generator is None:
        return weights
    for layer in range(config.n_layers):
        heads = torch.eye(config.n_heads, dtype=torch.float64)
        heads = heads[torch.randperm(config.n_heads, generator=generator)]
        scales = _normal(generator, config.n_heads)
        weights = HeadMixing(layer, heads * (scales + scales.sign())).transform(weights, config)
    return weights


def noisy(weights: Weights, generator: torch.Generator, share: float = 0.01) -> Weights:
    """Normal noise on every entry, of `share` of its tensor's root mean square."""
    return {
        name: value + share * value.square().mean().sqrt() * _normal(generator, *value.shape)
        for name, value in weights.items()
    }


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
