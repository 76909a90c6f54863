"""A model as a dict of float64 weights, and the algebra that matching does on it.

What is read off weights holds for the forward pass of `LinearAttentionTransformer`; a class with
another one is refused (`require_plain_forward`).

Shapes: h head, d d_model. Matrices act on row vectors from the right.
"""

from __future__ import annotations

import hashlib
from typing import TypeGuard

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer

Weights = dict[str, Tensor]


def weights_of(model: LinearAttentionTransformer) -> Weights:
    """Float64 copies of a model's parameters by name."""
    return {name: value.detach().double().clone() for name, value in model.named_parameters()}


def attention(layer: int, name: str) -> str:
    """Full name of "W_Q", "W_K" or "W_V" of a layer."""
    return f"blocks.{layer}.attn.{name}"


def norm(layer: int, name: str) -> str:
    """Full name of the gain "w" or the bias "b" of a layer's norm."""
    return f"blocks.{layer}.ln1_post.{name}"


def has_plain_forward(model: object) -> TypeGuard[LinearAttentionTransformer]:
    """Whether weights say what a model computes: its own class declares `plain_forward`."""
    return bool(type(model).__dict__.get("plain_forward", False))


def require_plain_forward(model: object, what: str) -> None:
    """Refuse a model whose weights do not say what it computes.

    Args:
        model: any model.
        what: what is asked of it, in words.

    Raises:
        ValueError: naming the class, the rule and what can be done instead.
    """
    if not has_plain_forward(model):
        raise ValueError(
            f"{what} is mathematics of the weights under the forward pass of "
            f"LinearAttentionTransformer; {type(model).__qualname__} may compute something else "
            f"with them. Compare what is computed (level='functional', symmetry_count), or write "
            f"plain_forward = True in the body of the class if its forward pass is the same"
        )


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
        for name in ("W_Q", "W_K"):
            read = attention(layer, name)
            changed[read] = inverse @ weights[read]
        value = attention(layer, "W_V")
        changed[value] = inverse @ weights[value] @ write
    changed["unembed.W_U"] = weights["unembed.W_U"] @ inverse.T
    return changed


def complement(rows: Tensor) -> Tensor:
    """Orthonormal rows spanning what is orthogonal to `rows`."""
    _, values, right = torch.linalg.svd(rows, full_matrices=True)
    rank = int((values > 1e-10 * values.max()).sum()) if len(values) else 0
    return right[rank:]


def weights_hash(weights: Weights, config: ModelConfig) -> str:
    """SHA-256 of a model: its config, then its weights in the order of the forward pass."""
    digest = hashlib.sha256(config.model_dump_json().encode())
    for name in config.parameter_shapes():
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
