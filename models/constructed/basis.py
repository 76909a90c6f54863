"""Residual directions with names, and how constructions read and write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer

# Layer-norm inputs are written at this size times V, so that even V = 1e-3 puts
# their square ten orders above the default norm_eps.
HEADROOM = 1e6


def coordinate_names(n_covariates: int = 1) -> tuple[str, ...]:
    """Names of the residual coordinates of `closed_form`, in order."""
    return (*covariate_names(n_covariates), "y", "const", "spare")


class Basis:
    """Directions of the residual stream by coordinate name.

    Attributes:
        d_model: D, the number of names.
        gain: sqrt(D/2), what layer norm makes of a constant that dominates its input.
        half_difference: h, reads (const - spare) / 2.
        divisor: what is written to divide: opposite signs on const and spare.
    """

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self.d_model = len(self._names)
        self.gain = math.sqrt(self.d_model / 2)
        self._eye = torch.eye(self.d_model, dtype=torch.float64)
        self.divisor = self["const"] - self["spare"]
        self.half_difference = self.divisor / 2

    def __getitem__(self, name: str) -> Tensor:
        """Reads a coordinate, [d]."""
        return self._eye[self._names.index(name)]

    def write(self, name: str) -> Tensor:
        """Writes a coordinate, balanced on const and spare so that it sums to zero, [d]."""
        return self[name] - (self["const"] + self["spare"]) / 2


def centre(model: LinearAttentionTransformer, basis: Basis, scale: float) -> None:
    """Write the embedding (signals over `scale`, constants 1 and -1) and layer 0, which centres."""
    signals = (*covariate_names(model.cfg.n_covariates), "y")
    for row, name in enumerate(signals, start=1):
        model.embed.W_E[row] = basis[name] / scale
    model.embed.b_E[:] = basis.divisor
    value = torch.outer(basis.half_difference, basis.divisor)
    for name in signals:
        value -= torch.outer(basis[name], basis.write(name)) / basis.gain
    size = HEADROOM / n_keys(model)
    half_difference = basis.half_difference
    set_head(
        model.blocks[0].attn, 0, query=half_difference, key=half_difference, value=size * value
    )


def n_keys(model: LinearAttentionTransformer) -> int:
    """Number of rows among the keys."""
    return model.cfg.n_context + (not model.cfg.exclude_query)


def covariate_names(n_covariates: int) -> tuple[str, ...]:
    """Names of the covariates, x_1 .. x_p."""
    return tuple(f"x_{j + 1}" for j in range(n_covariates))


def blank(config: ModelConfig) -> LinearAttentionTransformer:
    """A float64 model with all weights zero, to be written in place."""
    model = LinearAttentionTransformer(config).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    return model


def set_head(attn, head: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Give a head the QK circuit Σ_i query_i key_iᵀ and a value map [d, d].

    A matrix applied from the right reads a row vector through its rows, so directions, [d]
    or [n, d], stand in the first columns.
    """
    query, key = torch.atleast_2d(query), torch.atleast_2d(key)
    attn.W_Q[head, :, : len(query)] = query.T
    attn.W_K[head, :, : len(key)] = key.T
    attn.W_V[head] = value
