"""Symmetries of the architecture: frozen objects that take a model to an equivalent one.

Those that rest on the data and the readout are in `probe.symmetry.data`;
`probe.symmetry.catalogue` has the notation, the table of all of them and the proof that none is
missing.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from probe.symmetry.heads import heads
from probe.symmetry.weights import (
    Weights,
    attention,
    centring,
    change_basis,
    norm,
    require_plain_forward,
    weights_of,
)

# How far a matrix may be from having the structure a symmetry needs.
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Symmetry(abc.ABC):
    """A change of weights that keeps predictions; `apply` returns a new model.

    Attributes:
        holds: "exactly" or "as eps -> 0".
    """

    holds: ClassVar[str] = "exactly"

    def apply(self, model: LinearAttentionTransformer) -> LinearAttentionTransformer:
        """The transformed model; the argument stays as it is.

        Raises:
            ValueError: if this is no symmetry of a model of that shape or class.
        """
        require_plain_forward(model, type(self).__name__)
        self.check(model.cfg, weights_of(model))
        return model.like(self.transform(weights_of(model), model.cfg))

    @abc.abstractmethod
    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """The transformed weights, differentiable in the symmetry's own parameters."""

    def check(self, config: ModelConfig, weights: Weights) -> None:  # noqa: B027
        """Raise ValueError if this is no symmetry of such a model."""


@dataclass(frozen=True, eq=False)
class HeadBasis(Symmetry):
    """W_Q → W_Q G, W_K → W_K G⁻ᵀ: the basis inside one head's QK circuit. Exact, any G."""

    layer: int
    head: int
    matrix: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        query, key = (attention(self.layer, name) for name in ("W_Q", "W_K"))
        turned = weights[query][self.head] @ self.matrix
        against = weights[key][self.head] @ torch.linalg.inv(self.matrix).T
        return weights | {
            query: replace_head(weights[query], self.head, turned),
            key: replace_head(weights[key], self.head, against),
        }


@dataclass(frozen=True, eq=False)
class HeadMixing(Symmetry):
    """A_h → Σ_k M_hk A_k, B_h → Σ_k (M⁻ᵀ)_hk B_k for any invertible M [h, h]. Exact.

    Σ_h A_h S B_h is unchanged. Permutations, signs and A → cA, B → B/c are special cases.
    """

    layer: int
    matrix: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        value = attention(self.layer, "W_V")
        circuits = heads(weights, config).qk[self.layer]
        mixed = torch.einsum("hk,kij->hij", self.matrix, circuits)
        values = torch.einsum("kh,kij->hij", torch.linalg.inv(self.matrix), weights[value])
        return weights | factored(mixed, self.layer, weights) | {value: values}


@dataclass(frozen=True, eq=False)
class LayerScale(Symmetry):
    """B_h → c B_h for all heads of a branch-normalised layer, c > 0. Exact as eps → 0."""

    holds: ClassVar[str] = "as eps -> 0"

    layer: int
    factor: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        name = attention(self.layer, "W_V")
        return weights | {name: self.factor * weights[name]}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Positive factor, branch placement."""
        require_placement(self, config, config.norms_writes, "branch")
        if not self.factor > 0:
            raise ValueError(
                f"LayerScale factor={float(self.factor)}: layer norm keeps the sign, so only a "
                f"positive scale is a symmetry"
            )


@dataclass(frozen=True, eq=False)
class StreamScale(Symmetry):
    """Post placement: W → cW, A_h of layer 0 → A_h / c², c > 0. Exact as eps → 0.

    Layer 0 then normalises c (Q + z) instead of Q + z.
    """

    holds: ClassVar[str] = "as eps -> 0"

    factor: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        names = ("embed.W_E", "embed.b_E")
        scaled = {name: self.factor * weights[name] for name in names}
        query = attention(0, "W_Q")
        return weights | scaled | {query: weights[query] / self.factor**2}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Positive factor, post placement."""
        require_placement(self, config, config.norms_stream, "post")
        if not self.factor > 0:
            raise ValueError(f"StreamScale factor={float(self.factor)} must be positive")


@dataclass(frozen=True, eq=False)
class NullWrite(Symmetry):
    """B_h → B_h + b_h 1ᵀ, b [h, d]: what layer norm subtracts again. Exact."""

    layer: int
    vectors: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        name = attention(self.layer, "W_V")
        return weights | {name: weights[name] + self.vectors[:, :, None]}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """A layer norm that subtracts the mean."""
        require_placement(self, config, config.has_norm, "branch and post")


@dataclass(frozen=True, eq=False)
class ResidualBasis(Symmetry):
    r"""Q → Q M, with layer outputs turned to match. Exact for

    - branch: M = O + 1 mᵀ with O orthogonal, O1 = 1. The orthogonal part (permutations
      among them) commutes with layer norm; m re-encodes the component along 1, which no
      branch writes. (D-1)(D-2)/2 + D flat directions. -I is one of them (m = -2·1/D, O = -P +
      11ᵀ/D); the sign flip of one coordinate is not.
    - branch with affine map: M = Π diag(m), a permutation and a rescaling, absorbed by gain
      and bias. D flat directions. (With few layers more is possible, see
      `affine_directions`; finite elements of that family have no closed form.)
    - post: as branch with m along 1; 1 + (D-1)(D-2)/2 directions.
    - none: any invertible M, D² directions.
    """

    matrix: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        if not config.has_norm:
            return change_basis(weights, config, self.matrix)
        if not config.norm_affine:
            # On 1's complement M is O; this is O itself.
            write = centring(config.d_model) @ self.matrix + 1 / config.d_model
            return change_basis(weights, config, self.matrix, write)
        permutation = (self.matrix.abs() > 0).to(self.matrix.dtype)
        factors = self.matrix.sum(0)
        changed = change_basis(weights, config, self.matrix, permutation)
        for layer in range(config.n_layers):
            gain, bias = norm(layer, "w"), norm(layer, "b")
            changed[gain] = weights[gain] @ permutation * factors
            changed[bias] = weights[bias] @ self.matrix
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """The structure above."""
        d, matrix = config.d_model, self.matrix
        if matrix.shape != (d, d):
            raise ValueError(f"ResidualBasis matrix is {tuple(matrix.shape)}, expected ({d}, {d})")
        if torch.linalg.matrix_rank(matrix) < d:
            raise ValueError("ResidualBasis matrix is singular")
        if not config.has_norm:
            return
        if config.norm_affine:
            entries = matrix.abs() > 0
            if config.norms_stream or not (
                (entries.sum(0) == 1).all() and (entries.sum(1) == 1).all()
            ):
                raise ValueError(
                    "with an affine layer norm on the branch, ResidualBasis takes a permutation "
                    "times a diagonal matrix; with a post norm it takes none"
                )
            return
        ones = torch.ones(d, dtype=matrix.dtype)
        write = centring(d) @ matrix + 1 / d
        fixes_ones = (write @ ones - ones).abs().max() < TOLERANCE
        orthogonal = (write @ write.T - torch.eye(d)).abs().max() < TOLERANCE
        if not (fixes_ones and orthogonal):
            raise ValueError(
                "ResidualBasis needs M = O + 1 mᵀ with O orthogonal and O1 = 1: layer norm "
                "commutes with nothing else (a rotation that moves 1 and the sign flip of one "
                "coordinate are not symmetries)"
            )
        along = ones @ matrix
        if config.norms_stream and (along - along.mean()).abs().max() > TOLERANCE:
            raise ValueError("post placement: M must send 1 to a multiple of 1")


def replace_head(values: Tensor, head: int, value: Tensor) -> Tensor:
    """Values [h, ...] with one head's replaced, differentiable."""
    return torch.stack([value if h == head else values[h] for h in range(len(values))])


def require_placement(symmetry: Symmetry, config: ModelConfig, holds: bool, wanted: str) -> None:
    """Raise ValueError unless the norm stands where a symmetry needs it (`wanted`, in words)."""
    if not holds:
        raise ValueError(
            f"{type(symmetry).__name__} is a symmetry of {wanted} placement, "
            f"the model has {config.normalization!r}, norm_affine={config.norm_affine}"
        )


def factored(circuits: Tensor, layer: int, weights: Weights) -> Weights:
    """W_Q and W_K with W_Q W_Kᵀ = A: W_K stays where it is invertible, else it becomes I."""
    query, key = (attention(layer, name) for name in ("W_Q", "W_K"))
    keys = weights[key]
    if (torch.linalg.cond(keys) < 1e6).all():
        return {query: circuits @ torch.linalg.inv(keys).mT}
    eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
    return {query: circuits, key: eye.expand_as(keys).clone()}
