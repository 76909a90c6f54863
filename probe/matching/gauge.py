r"""Distance between two branch-normalised models over all symmetries of their weights.

The layer map S ↦ Σ_h A_h S B_h is the tensor

    T[i, j, k, l] = Σ_h A_h[i, j] B_h[k, l], made symmetric in j and k because S is,

with its output l projected on the complement of 1. It knows nothing of head bases and mixing,
nor of what layer norm subtracts. The other symmetries of `probe.symmetry.catalogue` are removed so:

- layer scale: T is divided by its norm;
- re-encoding of the component along 1: it is made orthogonal, as a function of the token
  [1, x, y], to the rest of the stream, and scaled to unit size (its sign is tried);
- tokens span p + 2 directions only: T of layer 0 is written in the token's own columns,
  inputs i, j, k are 1, x_1 .. x_p, y;
- the last layer under a query readout w: its output is split into the component along w and
  the rest, which may be rotated freely;
- rotations O of the complement of 1, which are left: optimised.

With d² = |a - b|² / (|a|² + |b|²) for each of: W, every T, and what the readout computes,
the distance is the root of the mean d², zero exactly where a symmetry relates the models. The
score is 1 - distance².

Optimisation: the mean is a polynomial in O of degree four. Starts are the Procrustes solution
of everything linear in O, exact for two related models, and permutations of the coordinates;
each climbs by O ← polar(gradient + shift · O), many problems at a time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from probe.symmetry.architecture import ResidualBasis
from probe.symmetry.heads import heads
from probe.symmetry.weights import Weights, centring, complement, input_map

# Starts that are looked at in full, and those that climb.
_PROMISING, _STARTS = 32, 5
_STEPS = 40
_SHIFT = 1.0
_MOST_PERMUTATIONS = 48
# Starts evaluated in full, at a time and in all, where a whole family is compared.
_CHUNK, _MOST_EVALUATED = 64, 1024


@dataclass(frozen=True)
class Invariants:
    """What is left of a model after all symmetries but the rotation O, r = p + 2.

    Coordinates: first along 1, then D - 1 of its complement.

    Attributes:
        tokens: W, [r, D - 1].
        along: the component along 1 as a function of the token, [r], unit norm or zero.
        first: T of layer 0 in token columns, [r, r, r, D - 1].
        later: T of the other layers, [L - 1, D, D, D, D - 1].
        readout: W_U on the complement of 1, [positions, D - 1].
        offset: what W_U reads along 1, and b_U, as a function of the token, flat.
        encode: M = I + 1 mᵀ that was applied to the model, [D, D].
    """

    tokens: Tensor
    along: Tensor
    first: Tensor
    later: Tensor
    readout: Tensor
    offset: Tensor
    encode: Tensor


@dataclass(frozen=True)
class GaugeMatch:
    """The best map between two models, for a batch of them.

    Attributes:
        distance: [b].
        matrix: M of the stream, Q_reference = Q_learned M, [b, D, D].
        last: map of the last layer's output, [b, D, D]: that of the stream, or its own
            where the last layer may be rotated freely.
        parts: d² by part: embed, layers 0 .. L-1, readout, [b, L + 2].
    """

    distance: Tensor
    matrix: Tensor
    last: Tensor
    parts: Tensor


def invariants(weights: Weights, config: ModelConfig, last_only: bool) -> Invariants:
    """Reduce a branch model without affine map; `last_only` keeps the query's readout row only."""
    d = config.d_model
    ones = torch.ones(d, dtype=torch.float64)
    frame = _frame(d)
    encode = _encode(input_map(weights))
    encoded = ResidualBasis(encode).transform(weights, config)
    tokens = input_map(encoded)
    along = tokens @ ones / d**0.5
    rest = frame[1:].T
    circuits = heads(encoded, config)
    maps = []
    for layer in range(config.n_layers):
        # Rows of `reads` are the columns the inputs of T are written in.
        reads = tokens if layer == 0 else frame
        qk = reads @ circuits.qk[layer] @ reads.mT
        maps.append(_layer_map(qk, reads @ circuits.ov[layer] @ rest))
    readout = encoded["unembed.W_U"]
    readout = readout[-1:] if last_only else readout
    # The token [1, x, y] of each position meets `skip`; the constants add up to one.
    skip = torch.outer(readout @ ones / d**0.5, along)
    if last_only:
        skip = skip[:, :-1]  # y = 0 at the query
    offset = torch.cat([(skip[:, 0].sum() + encoded["unembed.b_U"])[None], skip[:, 1:].flatten()])
    later = torch.stack(maps[1:]) if len(maps) > 1 else torch.zeros(0, d, d, d, d - 1)
    return Invariants(
        tokens=tokens @ rest,
        along=along,
        first=maps[0],
        later=later.double(),
        readout=readout @ rest,
        offset=offset,
        encode=encode,
    )


def canonical_tokens(tokens: Tensor) -> Tensor:
    """W [r, D] on the complement of 1, after the re-encoding that `invariants` applies, [r, D]."""
    return tokens @ _encode(tokens) @ centring(tokens.shape[1])


def gauge_match(
    learned: list[Invariants], references: list[Invariants], free_last: bool
) -> GaugeMatch:
    """Best maps from several models to a reference each.

    Args:
        learned: models of one shape.
        references: as many, or one for all.
        free_last: whether the last layer is read along one direction only (query readout).
    """
    problem = GaugeSearch(_stack(learned), _stack(references), free_last)
    rotation, flip = problem.solve()
    parts = problem.parts(rotation, flip)
    d = rotation.shape[-1] + 1
    frame = _frame(d)
    inner = _with_corner(rotation, flip)
    encode = torch.stack([one.encode for one in learned])
    target = torch.stack([one.encode for one in references])
    matrix = encode @ (frame.T @ inner @ frame) @ torch.linalg.inv(target)
    last = problem.last_map(rotation, flip)
    last = frame[1:].T @ last @ frame[1:] + 1 / d
    return GaugeMatch(parts.mean(-1).sqrt(), matrix, last, parts)


def nearest(learned: list[Invariants], reference: Invariants, free_last: bool) -> int:
    """Which of several models is nearest to the reference.

    The few that are nearest at their best start climb from there. Branch and bound: the parts
    linear in O bound the distance from below. Of unrelated models, which bounds cannot tell
    apart, only the most promising starts are looked at.
    """
    problem = GaugeSearch(_stack(learned), _stack([reference]), free_last)
    starts, flips = problem.starts()
    bounds = problem.bounds(starts, flips)
    distances = torch.full_like(bounds, torch.inf)
    climbing = min(_STARTS, len(learned))
    for chunk in bounds.flatten().argsort()[:_MOST_EVALUATED].split(_CHUNK):
        models, which = chunk // bounds.shape[1], chunk % bounds.shape[1]
        worst = distances.amin(1).sort().values[climbing - 1]
        if bounds[models[0], which[0]] > worst:
            break
        some = problem.of_models(models)
        distances[models, which] = some.parts(starts[models, which], flips[models, which]).mean(-1)
    lowest, which = distances.min(1)
    models = lowest.argsort()[:climbing]
    chosen = problem.of_models(models)
    rotations, flips = starts[models, which[models]], flips[models, which[models]]
    rotations = chosen.climb(rotations[:, None], flips[:, None])
    return int(models[chosen.parts(rotations[:, 0], flips).mean(-1).argmin()])


def output_map(matrix: Tensor) -> Tensor:
    """The orthogonal map of layer outputs that belongs to a stream map M = O + 1 mᵀ."""
    d = len(matrix)
    ones = torch.ones(d, d, dtype=torch.float64) / d
    return centring(d) @ matrix + ones


class GaugeSearch:
    """Distances of models to references [b or 1, ...] as a function of O [b, s, D-1, D-1]."""

    def __init__(self, learned: dict[str, Tensor], reference: dict[str, Tensor], free_last: bool):
        self.learned, self.reference, self.free_last = learned, reference, free_last

    def solve(self) -> tuple[Tensor, Tensor]:
        """Best rotation [b, D-1, D-1] and sign of the component along 1 [b]."""
        starts, flips = self.starts()
        starts, flips = _lowest(starts, flips, self.bounds(starts, flips), _PROMISING)
        rotations, flips = _lowest(starts, flips, self.parts(starts, flips).mean(-1), _STARTS)
        rotations = self.climb(rotations, flips)
        best, sign = _lowest(rotations, flips, self.parts(rotations, flips).mean(-1), 1)
        return best[:, 0], sign[:, 0]

    def climb(self, rotations: Tensor, flips: Tensor) -> Tensor:
        """Ascent by polar steps until no problem moves."""
        for _ in range(_STEPS):
            variable = rotations.detach().requires_grad_(True)
            with torch.enable_grad():
                loss = self.parts(variable, flips).mean(-1)
                (gradient,) = torch.autograd.grad(loss.sum(), variable)
            new = _polar(_SHIFT * rotations - gradient)
            moved = (new - rotations).abs().max()
            rotations = new
            if moved < 1e-13:
                break
        return rotations

    def starts(self) -> tuple[Tensor, Tensor]:
        """Rotations [b, s, D-1, D-1] with either sign of the component along 1 [b, s].

        Procrustes on what is linear in O, and permutations of the coordinates.
        """
        size = self.reference["readout"].shape[-1]
        cross, _, _ = self._linear()
        batch = len(cross)
        fixed = _permutation_starts(size + 1)
        fixed = torch.cat([fixed, -fixed]).expand(batch, -1, -1, -1)
        turns = torch.cat([_polar(cross)[:, None], fixed], dim=1)
        flips = torch.ones(turns.shape[:2], dtype=torch.float64)
        return torch.cat([turns, turns], dim=1), torch.cat([flips, -flips], dim=1)

    def of_models(self, rows: Tensor) -> GaugeSearch:
        """The problem of some models (repeats allowed) against the one reference."""
        learned = {name: value[rows] for name, value in self.learned.items()}
        return GaugeSearch(learned, self.reference, self.free_last)

    def parts(self, rotation: Tensor, flip: Tensor) -> Tensor:
        """d² of each part, [..., L + 2], for O [b, s, D-1, D-1] or [b, D-1, D-1]."""
        if rotation.ndim == 3:
            return self.parts(rotation[:, None], flip[:, None])[:, 0]
        whole = _with_corner(rotation, flip)
        layers = [self._layer_loss(layer, rotation, whole) for layer in range(self.n_layers)]
        return torch.stack(
            [self._embed_loss(rotation, flip), *layers, self._readout_loss(rotation)], -1
        )

    def bounds(self, rotation: Tensor, flip: Tensor) -> Tensor:
        """Lower bound of the mean of `parts`, [b, s]: layers that are not linear cost nothing."""
        cross, along, constant = self._linear()
        gain = torch.einsum("bsij,bij->bs", rotation, cross) + flip * along[:, None]
        return 2 * (constant[:, None] - gain) / (self.n_layers + 2)

    def _linear(self) -> tuple[Tensor, Tensor, Tensor]:
        """C [b, D-1, D-1], c and k [b]: the parts linear in O sum to 2 (k - <O, C> - flip c).

        With d² = 1 - 2 <aO, b> / (|a|² + |b|²), these are W, layer 0 and the readout.
        """
        a, b = self.learned, self.reference
        cross = along = constant = torch.zeros((), dtype=torch.float64)
        for turned, fixed in (("tokens", "along"), ("first", None), ("readout", "offset")):
            if turned == "first" and self.free_last and self.n_layers == 1:
                continue
            ours, theirs = (one[turned].flatten(1, -2) for one in (a, b))
            scale = ours.square().sum((1, 2)) + theirs.square().sum((1, 2))
            if fixed:
                scale = scale + a[fixed].square().sum(-1) + b[fixed].square().sum(-1)
            scale = scale.clamp(min=1e-300)
            cross = cross + ours.mT @ theirs / scale[:, None, None]
            constant = constant + 0.5
            if fixed == "along":
                along = (a[fixed] * b[fixed]).sum(-1) / scale
            elif fixed:
                constant = constant - (a[fixed] * b[fixed]).sum(-1) / scale
        return cross, along, constant

    @property
    def n_layers(self) -> int:
        """L."""
        return 1 + self.reference["later"].shape[1]

    def _embed_loss(self, rotation: Tensor, flip: Tensor) -> Tensor:
        a, b = self.learned, self.reference
        tokens = a["tokens"][:, None] @ rotation
        along = a["along"][:, None] * flip[..., None]
        target = torch.cat([b["tokens"].flatten(1), b["along"]], -1)
        return _relative(torch.cat([tokens.flatten(2), along], -1), target[:, None])

    def _layer_loss(self, layer: int, rotation: Tensor, whole: Tensor) -> Tensor:
        moved, goal = self._layer(layer, whole)
        free = layer == self.n_layers - 1 and self.free_last
        moved = moved @ (self._free_map(moved, goal) if free else rotation)
        return _relative(moved.flatten(2), goal.flatten(1)[:, None])

    def _readout_loss(self, rotation: Tensor) -> Tensor:
        a, b = self.learned, self.reference
        readout = a["readout"][:, None] @ rotation
        offset = a["offset"][:, None].expand(-1, rotation.shape[1], -1)
        target = torch.cat([b["readout"].flatten(1), b["offset"]], -1)
        return _relative(torch.cat([readout.flatten(2), offset], -1), target[:, None])

    def last_map(self, rotation: Tensor, flip: Tensor) -> Tensor:
        """Map of the last layer's output on the complement of 1, [b, D-1, D-1]."""
        if not self.free_last:
            return rotation
        whole = _with_corner(rotation[:, None], flip[:, None])
        return self._free_map(*self._layer(self.n_layers - 1, whole))[:, 0]

    def _layer(self, layer: int, whole: Tensor) -> tuple[Tensor, Tensor]:
        """T of a layer with turned inputs [b, s, n, D-1], and the reference's [b, n, D-1]."""
        a, b = self.learned, self.reference
        if layer == 0:
            moved = a["first"][:, None].expand(-1, whole.shape[1], *(-1,) * 4)
            return moved.flatten(2, 4), b["first"].flatten(1, 3)
        moved = torch.einsum(
            "bijkl,bsim,bsjn,bsko->bsmnol", a["later"][:, layer - 1], whole, whole, whole
        )
        return moved.flatten(2, 4), b["later"][:, layer - 1].flatten(1, 3)

    def _free_map(self, moved: Tensor, goal: Tensor) -> Tensor:
        """Readout direction to readout direction, the rest rotated to fit, [b, s, D-1, D-1]."""
        ours = _readout_frame(self.learned["readout"][:, -1])[:, None]
        theirs = _readout_frame(self.reference["readout"][:, -1])[:, None]
        rest = (moved @ ours)[..., 1:]
        turn = _polar(rest.detach().mT @ (goal[:, None] @ theirs)[..., 1:])
        ahead = ours[..., :1] @ theirs[..., :1].mT
        return ahead + ours[..., 1:] @ turn @ theirs[..., 1:].mT


def _lowest(rotations: Tensor, flips: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` rotations [b, s, D-1, D-1] and flips [b, s] of lowest values [b, s]."""
    kept = values.argsort(1)[:, :count]
    size = rotations.shape[-1]
    index = kept[:, :, None, None].expand(-1, -1, size, size)
    return rotations.gather(1, index), flips.gather(1, kept)


def _with_corner(rotation: Tensor, flip: Tensor) -> Tensor:
    """Rotation of the complement of 1 with the sign of the component along 1, [..., D, D]."""
    whole = torch.nn.functional.pad(rotation, (1, 0, 1, 0))
    corner = torch.zeros_like(whole)
    corner[..., 0, 0] = flip
    return whole + corner


def _encode(tokens: Tensor) -> Tensor:
    """M = I + 1 mᵀ that makes the component along 1 orthogonal to the rest and of unit size."""
    d = tokens.shape[1]
    eye = torch.eye(d, dtype=torch.float64)
    total = tokens.sum(1)  # √D times the component along 1
    norm = total.norm()
    if norm <= 1e-12 * tokens.norm():
        return eye
    rest = tokens - total[:, None] / d
    # total · (m + 1/D) is what the stream holds of it afterwards: minus the projection of the
    # rest, plus a unit component along 1.
    shift = -rest.T @ total / norm**2 - 1 / d + d**-0.5 / norm
    return eye + shift.expand(d, d)


def _layer_map(qk: Tensor, values: Tensor) -> Tensor:
    """T of heads with circuits qk [h, r, r] and values [h, r, l], unit norm, [r, r, r, l]."""
    tensor = torch.einsum("hij,hkl->ijkl", qk, values)
    tensor = (tensor + tensor.transpose(1, 2)) / 2
    return tensor / tensor.norm().clamp(min=1e-300)


def _frame(d_model: int) -> Tensor:
    """Orthonormal rows: 1/√D, then the complement of 1."""
    ones = torch.ones(1, d_model, dtype=torch.float64)
    return torch.cat([ones / d_model**0.5, complement(ones)])


def _readout_frame(readout: Tensor) -> Tensor:
    """Orthogonal [b, D-1, D-1] whose first column is the direction of each readout vector."""
    size = readout.shape[-1]
    eye = torch.eye(size, dtype=torch.float64).expand(len(readout), -1, -1)
    basis = torch.linalg.qr(torch.cat([readout[:, :, None], eye], -1)).Q
    sign = (basis[:, :, 0] * readout).sum(-1).sign()
    return torch.cat([basis[:, :, :1] * sign[:, None, None], basis[:, :, 1:]], -1)


def _permutation_starts(d_model: int) -> Tensor:
    """Permutations of the coordinates on the complement of 1, [n, D-1, D-1]."""
    if math.factorial(d_model) <= _MOST_PERMUTATIONS:
        orders = itertools.permutations(range(d_model))
    else:
        rng = np.random.default_rng(0)
        orders = (rng.permutation(d_model) for _ in range(_MOST_PERMUTATIONS))
    eye = torch.eye(d_model, dtype=torch.float64)
    rest = complement(torch.ones(1, d_model, dtype=torch.float64))
    return torch.stack([rest @ eye[list(order)] @ rest.T for order in orders])


def _polar(matrix: Tensor) -> Tensor:
    """Nearest orthogonal matrix."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|² / (|a|² + |b|²) over the last axis."""
    scale = a.square().sum(-1) + b.square().sum(-1)
    return (a - b).square().sum(-1) / scale.clamp(min=1e-300)


def _stack(models: list[Invariants]) -> dict[str, Tensor]:
    names = ("tokens", "along", "first", "later", "readout", "offset")
    return {name: torch.stack([getattr(one, name) for one in models]) for name in names}
