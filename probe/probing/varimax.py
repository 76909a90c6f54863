r"""The basis of the residual stream in which its contents are easiest to read.

Rotations that fix 1 leave every prediction of a model with a plain layer norm as it is
(`probe.symmetry.catalogue`), so which quantity stands in which coordinate is a matter of basis.
The canonical basis lays it out as the construction does, with loadings L_s [quantities, D] at site
s (coefficient times the quantity's standard deviation, without the part along 1, which can be
re-encoded at will):

1. The constant, the direction that the first row of all L_s share (leading singular vector),
   goes to (0, .., 0, 1, -1)/√2: two coordinates with opposite signs, the fewest that a
   direction orthogonal to 1 can have. Beside it signals are small, so they may leave traces there.
2. The other rotations, O(D - 2), make the remaining D - 2 coordinates hold as few signals as
   possible: with share_sqc = (L_s O)²_qc / Σ_q' (L_s O)²_q'c, they maximise Σ share²
   (varimax with shares per coordinate), by plane rotations from many starts.
"""

from __future__ import annotations

import itertools

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from probe.symmetry.weights import complement

_STARTS = 48
_SWEEPS = 10
_ANGLES = 33
# What a coordinate holds below this share of the largest energy is noise.
_NEGLIGIBLE = 1e-4


def canonical_rotation(loadings: list[Tensor], generator: torch.Generator | None = None) -> Tensor:
    """Rotation fixing 1 that makes the loadings sparsest, [D, D].

    Coordinates keep the place they come from (permutations are rotations that fix 1, so
    their order is free).

    Args:
        loadings: per site, [quantities, D]; the constant first.
        generator: source of the random starts; seeded with 0 by default.
    """
    d = loadings[0].shape[1]
    ones = torch.ones(d, dtype=torch.float64)
    rows = torch.stack([one[0] for one in loadings])
    constant = torch.linalg.svd(rows - rows.mean(1, keepdim=True)).Vh[0]
    pair = torch.zeros(d, dtype=torch.float64)
    pair[-2], pair[-1] = 1, -1
    source = complement(torch.stack([ones, constant]))
    target = complement(torch.stack([ones, pair]))
    most = max(len(one) for one in loadings) - 1
    signals = [torch.nn.functional.pad(one[1:], (0, 0, 0, most + 1 - len(one))) for one in loadings]
    inner = torch.stack(signals) @ source.T
    shown = target[:, :-2]
    floor = _NEGLIGIBLE * inner.square().sum(1).max()

    def purity(turns: Tensor) -> Tensor:
        energy = (inner @ turns[..., None, :, :] @ shown).square()
        shares = energy / (energy.sum(-2, keepdim=True) + floor)
        return shares.square().sum((-1, -2, -3))

    generator = generator or torch.Generator().manual_seed(0)
    random = torch.randn(_STARTS, d - 2, d - 2, generator=generator, dtype=torch.float64)
    turns = torch.linalg.qr(random).Q
    width = torch.pi / 2
    for _ in range(_SWEEPS):
        angles = torch.linspace(-width, width, _ANGLES, dtype=torch.float64)
        for i, j in itertools.combinations(range(d - 2), 2):
            candidates = turns[:, None] @ _plane_rotations(d - 2, i, j, angles)
            turns = candidates[torch.arange(len(turns)), purity(candidates).argmax(1)]
        width *= 0.5
    best = source.T @ turns[purity(turns).argmax()] @ target
    best = best + torch.outer(constant, pair) / 2**0.5 + 1 / d
    return best[:, _order_of_origin(best)]


def _plane_rotations(size: int, i: int, j: int, angles: Tensor) -> Tensor:
    plane = torch.eye(size, dtype=torch.float64).repeat(len(angles), 1, 1)
    plane[:, i, i] = plane[:, j, j] = angles.cos()
    plane[:, i, j], plane[:, j, i] = -angles.sin(), angles.sin()
    return plane


def _order_of_origin(rotation: Tensor) -> list[int]:
    """Order of the new coordinates that puts each near the old one it comes from."""
    old, new = linear_sum_assignment(-rotation.abs().numpy())
    return [int(n) for _, n in sorted(zip(old, new, strict=True))]
