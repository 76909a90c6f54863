"""A model as a dict of float64 weights, and the algebra that matching does on it.

Shapes: h head, d d_model. Matrices act on row vectors from the right.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from models.config import ModelConfig
from models.transformer import LinearAttentionTransformer

Weights = dict[str, Tensor]


def weights_of(model: LinearAttentionTransformer) -> Weights:
    """Float64 copies of a model's parameters by name."""
    return {name: value.detach().double().clone() for name, value in model.named_parameters()}


def with_weights(
    model: LinearAttentionTransformer, weights: Weights, **changes: object
) -> LinearAttentionTransformer:
    """A new model of the same shape, or with `changes` to its config, that holds `weights`."""
    config = ModelConfig(**(model.cfg.model_dump() | changes))
    twin = LinearAttentionTransformer(config).double().requires_grad_(False)
    twin.load_state_dict(weights)
    return twin.to(model.embed.W_E.dtype)


def centring(d_model: int) -> Tensor:
    """P = I - 11ᵀ/d, the projection layer norm applies, [d, d]."""
    return torch.eye(d_model, dtype=torch.float64) - 1 / d_model


def input_map(weights: Weights) -> Tensor:
    """What a token [1, x, y] is sent to: W_E with b_E on its constant row, [2 + covariates, d]."""
    constant = weights["embed.W_E"][:1] + weights["embed.b_E"]
    return torch.cat([constant, weights["embed.W_E"][1:]])


def change_basis(
    weights: Weights, config: ModelConfig, matrix: Tensor, write: Tensor | None = None
) -> Weights:
    """Rewrite every weight for the stream Q M, with layer outputs turned by `write`.

    W_E M, M⁻¹ W_Q, M⁻¹ W_K, M⁻¹ W_V N, W_U M⁻ᵀ. Whether this is a symmetry depends on M and
    on N = `write` (M itself by default): `ResidualBasis` knows.
    """
    write = matrix if write is None else write
    inverse = torch.linalg.inv(matrix)
    changed = dict(weights)
    for name in ("embed.W_E", "embed.b_E"):
        changed[name] = weights[name] @ matrix
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn."
        for name in ("W_Q", "W_K"):
            changed[attn + name] = inverse @ weights[attn + name]
        changed[attn + "W_V"] = inverse @ weights[attn + "W_V"] @ write
    changed["unembed.W_U"] = weights["unembed.W_U"] @ inverse.T
    return changed


def complement(rows: Tensor) -> Tensor:
    """Orthonormal rows spanning what is orthogonal to `rows`."""
    _, values, right = torch.linalg.svd(rows, full_matrices=True)
    rank = int((values > 1e-10 * values.max()).sum()) if len(values) else 0
    return right[rank:]


def fingerprint(weights: Weights) -> str:
    """Hash of a model's weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
