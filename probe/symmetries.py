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
| `UnreadOutput` | none, post | see the class | exactly |
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

from models.config import ModelConfig, PromptConfig
from models.prompts import sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.data_symmetries import (
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
from probe.transformations import (
    HeadBasis,
    HeadMixing,
    LayerScale,
    NullWrite,
    ResidualBasis,
    StreamScale,
)
from probe.weights import Weights, centring, complement, weights_of, with_weights


def families(weights: Weights, config: ModelConfig) -> Iterator[tuple[Callable, Tensor]]:
    """Every symmetry of a model as (parameters -> Symmetry, parameters of the identity).

    `known_directions` differentiates these at the identity.
    """
    d, heads = config.d_model, config.n_heads
    options = {"dtype": torch.float64}
    eye, one = torch.eye(d, **options), torch.ones((), **options)
    branch, affine = config.normalization == "branch", config.norm_affine
    query = config.readout == "query"

    yield ConstantSplit, torch.zeros(d, **options)
    for layer in range(config.n_layers):
        for head in range(heads):
            yield (lambda m, at=(layer, head): HeadBasis(*at, m)), eye
        yield (lambda m, layer=layer: HeadMixing(layer, m)), torch.eye(heads, **options)
        if branch:
            yield (lambda c, layer=layer: LayerScale(layer, c)), one
        if config.normalization != "none":
            yield (lambda b, layer=layer: NullWrite(layer, b)), torch.zeros(heads, d, **options)
        for name in ("W_Q", "W_K", "W_V"):
            unread = len(unread_inputs(weights, config, layer, name))
            if unread:
                start = torch.zeros(heads, unread, d, **options)
                yield (lambda g, at=(layer, name): UnreadInput(*at, g)), start
    if not affine:
        yield from _basis_families(config)
    if config.normalization == "post":
        yield UnreadOutput, torch.zeros(len(weights["unembed.W_U"]), **options)
        if not affine:
            yield StreamScale, one
    if config.normalization == "none":
        unread = len(complement(weights["unembed.W_U"]))
        if unread:
            yield UnreadOutput, torch.zeros(heads, d, unread, **options)
        if query:
            for pair in torch.combinations(torch.arange(heads)).tolist():
                yield (lambda a, pair=tuple(pair): SwappedState(pair, a)), torch.zeros(d, **options)
    if branch:
        free = complement(fixed_by_last_rotation(weights, config))
        if len(free) > 1:
            yield (lambda t, free=free: LastRotation(_rotation(t, free))), _no_turn(len(free))
    if branch and affine:
        yield (lambda v: LastAffine(v, 0 * one)), torch.zeros(d, **options)
        if query:
            yield (lambda t: LastAffine(torch.zeros(d, **options), t)), 0 * one
    unseen = unseen_embeddings(weights, config)
    if len(unseen):
        yield (
            lambda c: Reembedding(torch.einsum("n,nij->ij", c, unseen)),
            torch.zeros(len(unseen), **options),
        )


def _basis_families(config: ModelConfig) -> Iterator[tuple[Callable, Tensor]]:
    """Families of `ResidualBasis` without an affine norm."""
    d = config.d_model
    eye, ones = torch.eye(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64)
    if config.normalization == "none":
        yield ResidualBasis, eye
        return
    free = complement(ones[None])
    yield (lambda t: ResidualBasis(_rotation(t, free))), _no_turn(d - 1)
    if config.normalization == "branch":
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
    turns = _antisymmetric(d - 1)
    free = complement(torch.ones(1, d, dtype=torch.float64))
    turns = torch.einsum("tij,ia,jb->tab", turns, free, free)
    constrained = range(n_layers - 1 if query else n_layers)
    gains = [weights[f"blocks.{layer}.ln1_post.w"] for layer in constrained]

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
            attn, norm = f"blocks.{layer}.attn.", f"blocks.{layer}.ln1_post."
            for name in ("W_Q", "W_K", "W_V"):
                change[attn + name] = -basis @ weights[attn + name]
            change[norm + "b"] = weights[norm + "b"] @ basis
            if layer in constrained:
                start = d * d + layer * per_layer
                turn = torch.einsum("t,tij->ij", solution[start : start + len(turns)], turns)
                change[attn + "W_V"] = change[attn + "W_V"] + weights[attn + "W_V"] @ turn
                rate = solution[start + len(turns) : start + per_layer]
                change[norm + "w"] = weights[norm + "w"] * rate
            else:
                # g w is what ẑ meets; keep it while w changes.
                readout = weights["unembed.W_U"][-1]
                change[norm + "w"] = -weights[norm + "w"] * change["unembed.W_U"][-1] / readout
        directions.append(change)
    return directions


def known_directions(model: LinearAttentionTransformer) -> Tensor:
    """Tangents of all listed symmetries at a model, [directions, parameters].

    In the units of `prediction_jacobian`. They may depend on one another: the number of known
    flat directions is the rank.
    """
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
    if config.norm_affine and config.normalization == "branch":
        for change in affine_directions(weights, config):
            rows.append(torch.cat([change[name].flatten() for name in weights])[None])
    sizes = _sizes(weights)
    units = torch.cat([torch.full_like(weights[n], sizes[n]).flatten() for n in weights])
    return torch.cat(rows) / units


def symmetry_count(model: LinearAttentionTransformer) -> int:
    """Number of directions in weight space along which no prediction changes.

    Parameters minus the rank of the Jacobian of predictions, in float64 and at eps = 0
    (where `LayerScale` is exact). Compare with the rank of `known_directions`.
    """
    return model.cfg.n_parameters - jacobian_rank(model)[0]


def jacobian_rank(model: LinearAttentionTransformer) -> tuple[int, float]:
    """Rank of d prediction / d parameters over many prompts, and how clear it is.

    The rank is where the singular values fall most, among falls that end below 1e-6 of the
    largest: no threshold depends on the units of the weights.

    Returns:
        The rank, and the factor of the fall.
    """
    matrix = prediction_jacobian(model)
    values = torch.linalg.svdvals(matrix)
    floor = values[0] * torch.finfo(torch.float64).eps * max(matrix.shape)
    values = torch.cat([values, floor[None]]).clamp(min=floor)
    falls = (values[:-1] / values[1:]).where(values[1:] < 1e-6 * values[0], 0.0)
    rank = int(falls.argmax()) + 1
    return rank, float(falls[rank - 1])


def prediction_jacobian(model: LinearAttentionTransformer) -> Tensor:
    """d prediction / d parameters at eps = 0, [prompts, parameters], twice as many prompts.

    Columns are per relative change (times the root mean square of their parameter), rows have
    unit norm, so that neither the units of the weights nor large predictions matter.
    """
    config = model.cfg
    weights = weights_of(model)
    twin = with_weights(model, weights, norm_eps=0.0).double()
    prompt_config = PromptConfig(
        n_context=config.n_context,
        n_covariates=config.n_covariates,
        noise_std=0.5,
        x_mean_std=1.0,
        x_log_scale=0.7,
    )
    generator = torch.Generator().manual_seed(0)
    inputs = sample_prompts(prompt_config, 2 * config.n_parameters, generator).inputs

    def predict(values: Weights) -> Tensor:
        return torch.func.functional_call(twin, values, (inputs,))

    jacobian = torch.func.jacrev(predict, chunk_size=100)(weights)
    columns = [
        jacobian[name].reshape(len(inputs), -1) * size for name, size in _sizes(weights).items()
    ]
    matrix = torch.cat(columns, 1)
    return matrix / matrix.norm(dim=1, keepdim=True)


def _sizes(weights: Weights) -> dict[str, float]:
    """Root mean square of each parameter, 1 for one that is zero."""
    sizes = {name: float(value.square().mean().sqrt()) for name, value in weights.items()}
    return {name: size or 1.0 for name, size in sizes.items()}


def _antisymmetric(size: int) -> Tensor:
    """Basis of the antisymmetric matrices, [size (size - 1) / 2, size, size]."""
    rows, columns = torch.triu_indices(size, size, 1)
    basis = torch.zeros(len(rows), size, size, dtype=torch.float64)
    index = torch.arange(len(rows))
    basis[index, rows, columns], basis[index, columns, rows] = 1, -1
    return basis


def _no_turn(size: int) -> Tensor:
    return torch.zeros(size * (size - 1) // 2, dtype=torch.float64)


def _rotation(angles: Tensor, free: Tensor) -> Tensor:
    """exp of an antisymmetric matrix inside the span of the rows of `free`, [d, d]."""
    turn = torch.einsum("t,tij->ij", angles, _antisymmetric(len(free)))
    return torch.linalg.matrix_exp(free.T @ turn @ free)
