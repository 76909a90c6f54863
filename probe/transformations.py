"""The symmetries one by one: frozen objects that take a model to an equivalent one.

`probe.symmetries` has the notation, the table of all of them and the proof that none is
missing.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.config import ModelConfig
from models.transformer import LinearAttentionTransformer
from probe.weights import (
    Weights,
    centring,
    change_basis,
    complement,
    input_map,
    weights_of,
    with_weights,
)

# How far a matrix may be from having the structure a symmetry needs.
_TOLERANCE = 1e-9


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
            ValueError: if this is no symmetry of a model of that shape.
        """
        self.check(model.cfg, weights_of(model))
        return with_weights(model, self.transform(weights_of(model), model.cfg))

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
        attn = f"blocks.{self.layer}.attn."
        query, key = weights[attn + "W_Q"], weights[attn + "W_K"]
        return weights | {
            attn + "W_Q": _replace_head(query, self.head, query[self.head] @ self.matrix),
            attn + "W_K": _replace_head(
                key, self.head, key[self.head] @ torch.linalg.inv(self.matrix).T
            ),
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
        attn = f"blocks.{self.layer}.attn."
        circuits = weights[attn + "W_Q"] @ weights[attn + "W_K"].mT
        mixed = torch.einsum("hk,kij->hij", self.matrix, circuits)
        values = torch.einsum("kh,kij->hij", torch.linalg.inv(self.matrix), weights[attn + "W_V"])
        return weights | _factored(mixed, attn, weights) | {attn + "W_V": values}


@dataclass(frozen=True, eq=False)
class LayerScale(Symmetry):
    """B_h → c B_h for all heads of a branch-normalised layer, c > 0. Exact as eps → 0."""

    holds: ClassVar[str] = "as eps -> 0"

    layer: int
    factor: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        name = f"blocks.{self.layer}.attn.W_V"
        return weights | {name: self.factor * weights[name]}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Positive factor, branch placement."""
        _require_placement(self, config, "branch")
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
        query = "blocks.0.attn.W_Q"
        return weights | scaled | {query: weights[query] / self.factor**2}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Positive factor, post placement."""
        _require_placement(self, config, "post")
        if not self.factor > 0:
            raise ValueError(f"StreamScale factor={float(self.factor)} must be positive")


@dataclass(frozen=True, eq=False)
class NullWrite(Symmetry):
    """B_h → B_h + b_h 1ᵀ, b [h, d]: what layer norm subtracts again. Exact."""

    layer: int
    vectors: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        name = f"blocks.{self.layer}.attn.W_V"
        return weights | {name: weights[name] + self.vectors[:, :, None]}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """A layer norm that subtracts the mean."""
        _require_placement(self, config, "branch", "post")


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
        if config.normalization == "none":
            return change_basis(weights, config, self.matrix)
        if not config.norm_affine:
            # On 1's complement M is O; this is O itself.
            write = centring(config.d_model) @ self.matrix + 1 / config.d_model
            return change_basis(weights, config, self.matrix, write)
        permutation = (self.matrix.abs() > 0).to(self.matrix.dtype)
        factors = self.matrix.sum(0)
        changed = change_basis(weights, config, self.matrix, permutation)
        for layer in range(config.n_layers):
            norm = f"blocks.{layer}.ln1_post."
            changed[norm + "w"] = weights[norm + "w"] @ permutation * factors
            changed[norm + "b"] = weights[norm + "b"] @ self.matrix
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """The structure above."""
        d, matrix = config.d_model, self.matrix
        if matrix.shape != (d, d):
            raise ValueError(f"ResidualBasis matrix is {tuple(matrix.shape)}, expected ({d}, {d})")
        if torch.linalg.matrix_rank(matrix) < d:
            raise ValueError("ResidualBasis matrix is singular")
        if config.normalization == "none":
            return
        if config.norm_affine:
            entries = matrix.abs() > 0
            if config.normalization == "post" or not (
                (entries.sum(0) == 1).all() and (entries.sum(1) == 1).all()
            ):
                raise ValueError(
                    "with an affine layer norm on the branch, ResidualBasis takes a permutation "
                    "times a diagonal matrix; with a post norm it takes none"
                )
            return
        ones = torch.ones(d, dtype=matrix.dtype)
        write = centring(d) @ matrix + 1 / d
        fixes_ones = (write @ ones - ones).abs().max() < _TOLERANCE
        orthogonal = (write @ write.T - torch.eye(d)).abs().max() < _TOLERANCE
        if not (fixes_ones and orthogonal):
            raise ValueError(
                "ResidualBasis needs M = O + 1 mᵀ with O orthogonal and O1 = 1: layer norm "
                "commutes with nothing else (a rotation that moves 1 and the sign flip of one "
                "coordinate are not symmetries)"
            )
        along = ones @ matrix
        if config.normalization == "post" and (along - along.mean()).abs().max() > _TOLERANCE:
            raise ValueError("post placement: M must send 1 to a multiple of 1")


@dataclass(frozen=True, eq=False)
class ConstantSplit(Symmetry):
    """W_E[0] → W_E[0] + v, b_E → b_E - v: both are multiplied by the constant 1. Exact."""

    vector: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        row = torch.cat([self.vector[None], torch.zeros_like(weights["embed.W_E"][1:])])
        return weights | {
            "embed.W_E": weights["embed.W_E"] + row,
            "embed.b_E": weights["embed.b_E"] - self.vector,
        }


@dataclass(frozen=True, eq=False)
class UnreadInput(Symmetry):
    """W_X → W_X + n g for a direction n the stream never has, X in Q, K, V. Exact on the data.

    Layer 0 sees tokens W only, p + 2 directions of D (with one layer and a query readout
    its queries see p + 1: y = 0 at the query). After a post norm without affine map the
    stream has nothing along 1.

    Attributes:
        layer: which layer.
        name: "W_Q", "W_K" or "W_V".
        directions: g [h, n, d], one row per unread direction (`unread_inputs`).
    """

    layer: int
    name: str
    directions: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        full = f"blocks.{self.layer}.attn.{self.name}"
        unread = unread_inputs(weights, config, self.layer, self.name)
        return weights | {full: weights[full] + unread.mT @ self.directions}


@dataclass(frozen=True, eq=False)
class UnreadOutput(Symmetry):
    """Directions that only the readout could see, and does not.

    Placement none: W_V of the last layer → W_V + G K, where the rows of K span what no
    readout vector reads. Post without affine map: W_U → W_U + t 1 (nothing is there). Exact.

    Attributes:
        values: none: G [h, d, n]; post: t [positions].
    """

    values: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        if config.normalization == "post":
            return weights | {"unembed.W_U": weights["unembed.W_U"] + self.values[:, None]}
        name = f"blocks.{config.n_layers - 1}.attn.W_V"
        return weights | {name: weights[name] + self.values @ complement(weights["unembed.W_U"])}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """No layer norm between the last layer and the readout, or one that blanks 1."""
        _require_placement(self, config, "none", "post")


@dataclass(frozen=True, eq=False)
class LastRotation(Symmetry):
    """W_V of the last layer → W_V O, branch placement. Exact.

    The last layer is only read by W_U, so its output may be rotated by any orthogonal O that
    fixes 1 and every readout vector. With a query readout (rank r = 1) that is O(D - 2):
    (D-2)(D-3)/2 directions; a flatten readout leaves none. With an affine map and a query
    readout O need only fix 1: the gain turns along, g → Oᵀ(g w) / w, (D-1)(D-2)/2 directions.
    """

    matrix: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        block = f"blocks.{config.n_layers - 1}."
        value = block + "attn.W_V"
        changed = weights | {value: weights[value] @ self.matrix}
        if config.norm_affine and config.readout == "query":
            readout = weights["unembed.W_U"][-1]
            gain = block + "ln1_post.w"
            changed[gain] = (weights[gain] * readout) @ self.matrix / readout
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Orthogonal, and fixes what is read."""
        _require_placement(self, config, "branch")
        fixed = fixed_by_last_rotation(weights, config)
        moved = (fixed @ self.matrix - fixed).abs().max()
        eye = torch.eye(config.d_model, dtype=torch.float64)
        if moved > _TOLERANCE or (self.matrix.T @ self.matrix - eye).abs().max() > _TOLERANCE:
            raise ValueError("LastRotation needs an orthogonal matrix that fixes 1 and the readout")


@dataclass(frozen=True, eq=False)
class SwappedState(Symmetry):
    """A_h → A_h + α b_kᵀ, A_k → A_k - α b_hᵀ with b = B w, in the last layer.

    Placement none, query readout: only z·w is read there, and α (b_kᵀ S b_h - b_hᵀ S b_k) = 0
    because S is symmetric. Exact.

    Attributes:
        heads: (h, k).
        vector: α, [d].
    """

    heads: tuple[int, int]
    vector: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        attn = f"blocks.{config.n_layers - 1}.attn."
        first, second = self.heads
        read = weights[attn + "W_V"] @ weights["unembed.W_U"][-1]
        circuits = weights[attn + "W_Q"] @ weights[attn + "W_K"].mT
        changed = _replace_head(
            circuits, first, circuits[first] + torch.outer(self.vector, read[second])
        )
        changed = _replace_head(
            changed, second, circuits[second] - torch.outer(self.vector, read[first])
        )
        return weights | _factored(changed, attn, weights)

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """A single readout vector and no layer norm."""
        _require_placement(self, config, "none")
        if config.readout != "query":
            raise ValueError("SwappedState needs the query readout")


@dataclass(frozen=True, eq=False)
class Reembedding(Symmetry):
    """W → W + U where only layer 0 can tell, D >= p + 2. Exact on the data.

    Layer 0 sees tokens through W alone, so its weights absorb W → W K, K = I + W⁺U. The skip
    path carries U further, which nobody notices if (`unseen_embeddings`)

    - the norm of layer 0 has a bias, that takes the constant row of U back: b → b - U_0;
    - the placement is post, and U = r 1ᵀ;
    - there is one branch layer: b_U takes U_0 back, and a query readout w meets y = 0 and
      only U_j·w of the other rows, which has to be 0.

    Attributes:
        change: U, [2 + covariates, d].
    """

    change: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        eye = torch.eye(config.d_model, dtype=torch.float64)
        absorb = torch.linalg.inv(eye + torch.linalg.pinv(input_map(weights)) @ self.change)
        changed = weights | {"embed.W_E": weights["embed.W_E"] + self.change}
        for name in ("W_Q", "W_K", "W_V"):
            changed["blocks.0.attn." + name] = absorb @ weights["blocks.0.attn." + name]
        if config.norm_affine:
            changed["blocks.0.ln1_post.b"] = weights["blocks.0.ln1_post.b"] - self.change[0]
        elif config.normalization == "branch":
            offset = (weights["unembed.W_U"] @ self.change[0]).sum()
            changed["unembed.b_U"] = weights["unembed.b_U"] - offset
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """U lies in the span of `unseen_embeddings`."""
        allowed = unseen_embeddings(weights, config).flatten(1)
        change = self.change.flatten()
        projected = change @ torch.linalg.pinv(allowed) @ allowed if len(allowed) else 0 * change
        if (change - projected).abs().max() > _TOLERANCE:
            raise ValueError("Reembedding: the skip path shows this change to a later layer")


@dataclass(frozen=True, eq=False)
class LastAffine(Symmetry):
    """Last layer of a branch model with affine norm. Exact.

    The bias is only read: b → b + v, b_U → b_U - Σ_p W_U[p]·v. With a query readout w the
    gain's part along 1/w meets nothing: g → g + t / w.

    Attributes:
        bias: v, [d].
        gain: t, a number; 0 with the flatten readout.
    """

    bias: Tensor
    gain: Tensor

    def transform(self, weights: Weights, config: ModelConfig) -> Weights:
        """See the class."""
        norm = f"blocks.{config.n_layers - 1}.ln1_post."
        readout = weights["unembed.W_U"]
        changed = weights | {
            norm + "b": weights[norm + "b"] + self.bias,
            "unembed.b_U": weights["unembed.b_U"] - (readout @ self.bias).sum(),
        }
        if config.readout == "query":
            changed[norm + "w"] = weights[norm + "w"] + self.gain / readout[-1]
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """An affine branch norm; a gain only with the query readout."""
        _require_placement(self, config, "branch")
        if not config.norm_affine or (config.readout == "flatten" and self.gain != 0):
            raise ValueError("LastAffine needs an affine norm, and gain=0 with the flatten readout")


def unread_inputs(weights: Weights, config: ModelConfig, layer: int, name: str) -> Tensor:
    """Orthonormal rows [n, d] that are orthogonal to every token at the entry of a layer."""
    if layer > 0:
        if config.normalization == "post" and not config.norm_affine:
            return torch.full((1, config.d_model), config.d_model**-0.5, dtype=torch.float64)
        return torch.zeros(0, config.d_model, dtype=torch.float64)
    seen = input_map(weights)
    only_query = name == "W_Q" and config.n_layers == 1 and config.readout == "query"
    return complement(seen[:-1] if only_query else seen)


def unseen_embeddings(weights: Weights, config: ModelConfig) -> Tensor:
    """Basis of the changes of W that `Reembedding` allows, [n, 2 + covariates, d]."""
    rows, d = config.n_covariates + 2, config.d_model
    units = torch.eye(rows * d, dtype=torch.float64).reshape(rows, d, rows, d)
    if d < rows:
        return units[0, :0]
    if config.normalization == "post" and not config.norm_affine:
        return units.sum(1)
    if config.normalization != "branch":
        return units[0, :0]
    if config.n_layers > 1:
        return units[0] if config.norm_affine else units[0, :0]
    if config.readout == "flatten":
        return units[0]
    unread = complement(weights["unembed.W_U"])
    covariates = torch.einsum("nd,jdab->jnab", unread, units[1:-1]).flatten(0, 1)
    return torch.cat([units[0], covariates, units[-1]])


def fixed_by_last_rotation(weights: Weights, config: ModelConfig) -> Tensor:
    """Vectors a rotation of the last layer's output has to leave alone, [n, d]."""
    ones = torch.ones(1, config.d_model, dtype=torch.float64)
    if not config.norm_affine:
        return torch.cat([ones, weights["unembed.W_U"]])
    if config.readout == "query":
        return ones
    gain = weights[f"blocks.{config.n_layers - 1}.ln1_post.w"]
    return torch.cat([ones, weights["unembed.W_U"] * gain])


def _replace_head(values: Tensor, head: int, value: Tensor) -> Tensor:
    return torch.stack([value if h == head else values[h] for h in range(len(values))])


def _require_placement(symmetry: Symmetry, config: ModelConfig, *placements: str) -> None:
    if config.normalization not in placements:
        raise ValueError(
            f"{type(symmetry).__name__} is a symmetry of {' and '.join(placements)} placement, "
            f"the model has {config.normalization!r}"
        )


def _factored(circuits: Tensor, attn: str, weights: Weights) -> Weights:
    """W_Q and W_K with W_Q W_Kᵀ = A: W_K stays where it is invertible, else it becomes I."""
    keys = weights[attn + "W_K"]
    if (torch.linalg.cond(keys) < 1e6).all():
        return {attn + "W_Q": circuits @ torch.linalg.inv(keys).mT}
    eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
    return {attn + "W_Q": circuits, attn + "W_K": eye.expand_as(keys).clone()}
