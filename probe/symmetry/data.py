"""Symmetries that rest on what tokens look like and on what the readout sees.

Every row of a prompt starts with 1 and the query has y = 0; tokens span p + 2 directions; the
last layer is only read. `probe.symmetry.catalogue` has the notation and the table of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from probe.symmetry.architecture import (
    TOLERANCE,
    Symmetry,
    factored,
    replace_head,
    require_placement,
)
from probe.symmetry.heads import heads
from probe.symmetry.weights import Weights, attention, complement, input_map, norm


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
        full = attention(self.layer, self.name)
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
        if config.stream_is_centred:
            return weights | {"unembed.W_U": weights["unembed.W_U"] + self.values[:, None]}
        name = attention(config.n_layers - 1, "W_V")
        return weights | {name: weights[name] + self.values @ complement(weights["unembed.W_U"])}

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """No layer norm between the last layer and the readout, or one that blanks 1."""
        holds = not config.has_norm or config.stream_is_centred
        require_placement(self, config, holds, "none and (without affine map) post")


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
        last = config.n_layers - 1
        value = attention(last, "W_V")
        changed = weights | {value: weights[value] @ self.matrix}
        if config.norm_affine and config.readout == "query":
            readout = weights["unembed.W_U"][-1]
            gain = norm(last, "w")
            changed[gain] = (weights[gain] * readout) @ self.matrix / readout
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Orthogonal, and fixes what is read."""
        require_placement(self, config, config.norms_writes, "branch")
        fixed = fixed_by_last_rotation(weights, config)
        moved = (fixed @ self.matrix - fixed).abs().max()
        eye = torch.eye(config.d_model, dtype=torch.float64)
        if moved > TOLERANCE or (self.matrix.T @ self.matrix - eye).abs().max() > TOLERANCE:
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
        last = config.n_layers - 1
        first, second = self.heads
        read = weights[attention(last, "W_V")] @ weights["unembed.W_U"][-1]
        circuits = heads(weights, config).qk[last]
        changed = replace_head(
            circuits, first, circuits[first] + torch.outer(self.vector, read[second])
        )
        changed = replace_head(
            changed, second, circuits[second] - torch.outer(self.vector, read[first])
        )
        return weights | factored(changed, last, weights)

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """A single readout vector and no layer norm."""
        require_placement(self, config, not config.has_norm, "none")
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
            full = attention(0, name)
            changed[full] = absorb @ weights[full]
        if config.norm_affine:
            changed[norm(0, "b")] = weights[norm(0, "b")] - self.change[0]
        elif config.norms_writes:
            offset = (weights["unembed.W_U"] @ self.change[0]).sum()
            changed["unembed.b_U"] = weights["unembed.b_U"] - offset
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """U lies in the span of `unseen_embeddings`."""
        allowed = unseen_embeddings(weights, config).flatten(1)
        change = self.change.flatten()
        projected = change @ torch.linalg.pinv(allowed) @ allowed if len(allowed) else 0 * change
        if (change - projected).abs().max() > TOLERANCE:
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
        gain, bias = (norm(config.n_layers - 1, name) for name in "wb")
        readout = weights["unembed.W_U"]
        changed = weights | {
            bias: weights[bias] + self.bias,
            "unembed.b_U": weights["unembed.b_U"] - (readout @ self.bias).sum(),
        }
        if config.readout == "query":
            changed[gain] = weights[gain] + self.gain / readout[-1]
        return changed

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """An affine branch norm; a gain only with the query readout."""
        require_placement(self, config, config.norms_writes, "branch")
        if not config.norm_affine or (config.readout == "flatten" and self.gain != 0):
            raise ValueError("LastAffine needs an affine norm, and gain=0 with the flatten readout")


def unread_inputs(weights: Weights, config: ModelConfig, layer: int, name: str) -> Tensor:
    """Orthonormal rows [n, d] that are orthogonal to every token at the entry of a layer."""
    if layer > 0:
        if config.stream_is_centred:
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
    if config.stream_is_centred:
        return units.sum(1)
    if not config.norms_writes:
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
    gain = weights[norm(config.n_layers - 1, "w")]
    return torch.cat([ones, weights["unembed.W_U"] * gain])
