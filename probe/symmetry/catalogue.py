r"""Changes of the weights that leave every prediction as it is.

Two models that compute the same function may look nothing alike; this file lists the
reasons. Notation: Q [p, d] residual stream, W = W_E with b_E added to its constant row,
A_h = W_Q W_Kᵀ, B_h = W_V, S = QᵀQ (symmetric), layer output z = Σ_h Q A_h S B_h,
P = I - 11ᵀ/d. Layer norm returns sqrt(d) · zP / |zP|; it never sees the part of z along
1 = (1, .., 1), and adds nothing along it.

| symmetry | placement | flat directions | holds |
|---|---|---|---|
| `HeadBasis` | all | d² per head | exactly |
| `HeadMixing` | all | H² per layer | exactly |
| `LayerScale` | branch | 1 per layer | as eps → 0 |
| `StreamScale` | post, no affine | 1 | as eps → 0 |
| `NullWrite` | branch, post | H d per layer | exactly |
| `ResidualBasis` | all | see the class | exactly |
| `ConstantSplit` | all | d | exactly, since every row starts with 1 |
| `UnreadInput` | all | see the class | exactly, on the data |
| `UnreadOutput` | none; post, no affine | see the class | exactly |
| `LastRotation` | branch | see the class | exactly |
| `SwappedState` | none, query readout | d per pair of heads | exactly, since S is symmetric |
| `Reembedding` | branch, post | see the class | exactly, on the data |
| `LastAffine` | branch, affine | d (+ 1) | exactly |

`known_directions` stacks their tangents; `symmetry_count` measures the number of flat
directions without knowing the list. The two agree at random weights for branch (affine or
not), post (not affine) and none from two layers on, and for branch with one where
D >= p + 2: the list is complete there. It presumes that the heads of layer 0 together write
all D - 1 directions, H (p + 2) >= D - 1 (a direction of the stream that nothing writes can be
re-encoded like 1), and D > 3 with a post norm (on a circle more is free). A model with
sparse weights, such as a construction, has more flat directions than a random one.

Near misses that are *not* symmetries: a negative layer scale, the sign flip of one
coordinate, a rotation that moves 1. The classes refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from probe.symmetry.architecture import (
    HeadBasis,
    HeadMixing,
    LayerScale,
    NullWrite,
    ResidualBasis,
    StreamScale,
)
from probe.symmetry.count import parameter_sizes
from probe.symmetry.data import (
    ConstantSplit,
    LastAffine,
    LastRotation,
    Reembedding,
    SwappedState,
    UnreadInput,
    UnreadOutput,
    fixed_by_last_rotation,
    unread_inputs,
    unseen_embeddings,
)
from probe.symmetry.weights import (
    Weights,
    attention,
    centring,
    complement,
    norm,
    require_plain_forward,
    weights_of,
)


def families(weights: Weights, config: ModelConfig) -> Iterator[tuple[Callable, Tensor]]:
    """Every symmetry of a model as (parameters -> Symmetry, parameters of the identity).

    `known_directions` differentiates these at the identity.
    """
    d, heads = config.d_model, config.n_heads
    eye, one = torch.eye(d, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    branch, affine = config.norms_writes, config.norm_affine
    query = config.readout == "query"

    yield ConstantSplit, _zeros(d)
    for layer in range(config.n_layers):
        for head in range(heads):
            yield (lambda m, layer=layer, head=head: HeadBasis(layer, head, m)), eye
        yield (lambda m, layer=layer: HeadMixing(layer, m)), torch.eye(heads, dtype=torch.float64)
        if branch:
            yield (lambda c, layer=layer: LayerScale(layer, c)), one
        if config.has_norm:
            yield (lambda b, layer=layer: NullWrite(layer, b)), _zeros(heads, d)
        for name in ("W_Q", "W_K", "W_V"):
            unread = len(unread_inputs(weights, config, layer, name))
            if unread:
                start = _zeros(heads, unread, d)
                yield (lambda g, layer=layer, name=name: UnreadInput(layer, name, g)), start
    if not affine:
        yield from _basis_families(config)
    if config.stream_is_centred:
        yield UnreadOutput, _zeros(len(weights["unembed.W_U"]))
        yield StreamScale, one
    if not config.has_norm:
        unread = len(complement(weights["unembed.W_U"]))
        if unread:
            yield UnreadOutput, _zeros(heads, d, unread)
        if query:
            for pair in torch.combinations(torch.arange(heads)).tolist():
                yield (lambda a, pair=tuple(pair): SwappedState(pair, a)), _zeros(d)
    if branch:
        free = complement(fixed_by_last_rotation(weights, config))
        if len(free) > 1:
            yield (lambda t, free=free: LastRotation(_rotation(t, free))), _no_turn(len(free))
    if branch and affine:
        yield (lambda v: LastAffine(v, 0 * one)), _zeros(d)
        if query:
            yield (lambda t: LastAffine(_zeros(d), t)), 0 * one
    unseen = unseen_embeddings(weights, config)
    if len(unseen):
        yield (
            lambda c: Reembedding(torch.einsum("n,nij->ij", c, unseen)),
            _zeros(len(unseen)),
        )


def _basis_families(config: ModelConfig) -> Iterator[tuple[Callable, Tensor]]:
    """Families of `ResidualBasis` without an affine norm."""
    d = config.d_model
    eye, ones = torch.eye(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64)
    if not config.has_norm:
        yield ResidualBasis, eye
        return
    free = complement(ones[None])
    yield (lambda t: ResidualBasis(_rotation(t, free))), _no_turn(d - 1)
    if config.norms_writes:
        yield (lambda m: ResidualBasis(eye + torch.outer(ones, m))), 0 * ones
    else:
        yield (lambda c: ResidualBasis(eye + c * torch.outer(ones, ones))), 0 * ones[0]


def affine_directions(weights: Weights, config: ModelConfig) -> list[Weights]:
    r"""Tangents of the residual re-encodings of a branch model with affine norm.

    Layer l writes ẑ G_l + b_l with ẑ orthogonal to 1. Q → Q(I + μ) is a symmetry if every
    layer that is read by another can write into the new basis, with gains G_l(1 + δ_l) and
    outputs turned by antisymmetric ω_l, ω_l 1 = 0:

        P (G_l μ G_l⁻¹ - ω_l - δ_l) = 0.

    Diagonal μ always solves this. With one such layer there are about D² / 2 solutions more, with
    two layers two more, with three or more none in general. The last layer of a query readout
    writes to one vector only and always follows.

    Returns:
        Parameter changes by name, one dict per independent solution.
    """
    d, n_layers = config.d_model, config.n_layers
    query = config.readout == "query"
    turns = antisymmetric_basis(d - 1)
    free = complement(torch.ones(1, d, dtype=torch.float64))
    turns = torch.einsum("tij,ia,jb->tab", turns, free, free)
    constrained = range(n_layers - 1 if query else n_layers)
    gains = [weights[norm(layer, "w")] for layer in constrained]

    # Unknowns: μ [d, d], then per constrained layer turns and δ [d].
    eye = torch.eye(d, dtype=torch.float64)
    units = torch.eye(d * d, dtype=torch.float64).reshape(d * d, d, d)
    per_layer = len(turns) + d
    rows = []
    for index, gain in enumerate(gains):
        block = torch.zeros(d * d + per_layer * len(gains), d, d, dtype=torch.float64)
        block[: d * d] = units * gain[:, None] / gain
        start = d * d + index * per_layer
        block[start : start + len(turns)] = -turns
        block[start + len(turns) : start + per_layer] = -torch.diag_embed(eye)
        rows.append((centring(d) @ block).flatten(1))
    system = torch.cat(rows, 1).T if rows else torch.zeros(0, d * d, dtype=torch.float64)

    directions = []
    for solution in complement(system):
        basis = solution[: d * d].reshape(d, d)
        change = {name: torch.zeros_like(value) for name, value in weights.items()}
        for name in ("embed.W_E", "embed.b_E"):
            change[name] = weights[name] @ basis
        change["unembed.W_U"] = -weights["unembed.W_U"] @ basis.T
        for layer in range(n_layers):
            value, gain, bias = attention(layer, "W_V"), norm(layer, "w"), norm(layer, "b")
            for read in (attention(layer, "W_Q"), attention(layer, "W_K"), value):
                change[read] = -basis @ weights[read]
            change[bias] = weights[bias] @ basis
            if layer in constrained:
                start = d * d + layer * per_layer
                turn = torch.einsum("t,tij->ij", solution[start : start + len(turns)], turns)
                change[value] = change[value] + weights[value] @ turn
                rate = solution[start + len(turns) : start + per_layer]
                change[gain] = weights[gain] * rate
            else:
                # g w is what ẑ meets; keep it while w changes.
                readout = weights["unembed.W_U"][-1]
                change[gain] = -weights[gain] * change["unembed.W_U"][-1] / readout
        directions.append(change)
    return directions


def known_directions(model: LinearAttentionTransformer) -> Tensor:
    """Tangents of all listed symmetries at a model, [directions, parameters].

    In the units of `prediction_jacobian`. They may depend on one another: the number of known
    flat directions is the rank.

    Raises:
        ValueError: on a class of model with a forward pass of its own.
    """
    require_plain_forward(model, "the list of symmetries")
    weights, config = weights_of(model), model.cfg
    rows = []
    for family, identity in families(weights, config):

        def moved(parameters: Tensor, family: Callable = family) -> Weights:
            return family(parameters).transform(weights, config)

        tangents = torch.func.jacfwd(moved)(identity)
        parts = [
            tangents[name].reshape(value.numel(), -1)
            if name in tangents
            else torch.zeros(value.numel(), identity.numel(), dtype=torch.float64)
            for name, value in weights.items()
        ]
        rows.append(torch.cat(parts).T)
    if config.norm_affine and config.norms_writes:
        for change in affine_directions(weights, config):
            rows.append(torch.cat([change[name].flatten() for name in weights])[None])
    sizes = parameter_sizes(weights)
    units = torch.cat([torch.full_like(weights[n], sizes[n]).flatten() for n in weights])
    return torch.cat(rows) / units


def antisymmetric_basis(size: int) -> Tensor:
    """Basis of the antisymmetric matrices, [size (size - 1) / 2, size, size]."""
    rows, columns = torch.triu_indices(size, size, 1)
    basis = torch.zeros(len(rows), size, size, dtype=torch.float64)
    index = torch.arange(len(rows))
    basis[index, rows, columns], basis[index, columns, rows] = 1, -1
    return basis


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _no_turn(size: int) -> Tensor:
    return _zeros(size * (size - 1) // 2)


def _rotation(angles: Tensor, free: Tensor) -> Tensor:
    """exp of an antisymmetric matrix inside the span of the rows of `free`, [d, d]."""
    turn = torch.einsum("t,tij->ij", angles, antisymmetric_basis(len(free)))
    return torch.linalg.matrix_exp(free.T @ turn @ free)
