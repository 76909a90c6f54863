r"""Best match of two models by permuting and flipping residual coordinates and heads.

A signed permutation M renames coordinates; it takes every weight along (which axes carry
it is the declaration `Parts`):

    W → W M,   A_h → Mᵀ A_h M,   B_h → Mᵀ B_h M,   W_U → W_U M.

Heads of a layer may be permuted, and rescaled A → cA, B → B/c, c ≠ 0: a head pair scores
|cos A + cos B|. All cosines are scale-free and count alike: one per row of W (constant,
covariates, y), two per head of the reference, one for W_U. Flipping all signs is an exact
symmetry, a mix of signs only an approximate one (see `probe.symmetry.catalogue`); all are searched.

For D <= 6 all D! 2^D maps are tried, heads solved exactly inside: the result carries a
certificate. Above, a linear assignment on the gradient is iterated from many starts, then
improved by swaps and flips.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from models.architecture.config import ModelConfig
from probe.symmetry.heads import heads
from probe.symmetry.weights import Weights, attention, input_map

EXHAUSTIVE_LIMIT = 6
_RESTARTS = 48


@dataclass(frozen=True)
class Parts:
    """A model as unit vectors, by how they carry the permutation of D coordinates.

    Attributes:
        rows: one axis carries it: rows of W, then W_U as one block, each of unit norm; list
            of [n, D].
        circuits: two axes carry it: [layer, head, 2, D, D], A_h and B_h of unit norm.
        row_norms: norms before scaling, one per entry of `rows`.
        circuit_norms: likewise, [layer, head, 2].
    """

    rows: list[np.ndarray]
    circuits: np.ndarray
    row_norms: np.ndarray
    circuit_norms: np.ndarray


@dataclass(frozen=True)
class Match:
    """A signed permutation with head assignments.

    Attributes:
        order: learned coordinate at each reference coordinate, [D] (D of the larger model).
        signs: their signs, [D].
        heads: per layer, learned head at each reference head, [layer, H] (-1: none).
        score: mean cosine.
        runner_up: next best score (nan where not searched exhaustively).
        exhaustive: whether every signed permutation was tried.
    """

    order: np.ndarray
    signs: np.ndarray
    heads: np.ndarray
    score: float
    runner_up: float
    exhaustive: bool


def parts_of(weights: Weights, config: ModelConfig, d_model: int, last_only: bool) -> Parts:
    """Parts of a model, padded with zeros to `d_model` coordinates.

    Args:
        weights: the model.
        config: its shape.
        d_model: coordinates of the larger model of the pair.
        last_only: take the readout of the query token only.
    """
    readout = weights["unembed.W_U"].numpy()
    blocks = [row[None] for row in input_map(weights).numpy()]
    blocks.append(readout[-1:] if last_only else readout)
    pad = d_model - config.d_model
    blocks = [np.pad(block, ((0, 0), (0, pad))) for block in blocks]
    # B as it stands: single flips do not commute with the centring, nor does another width.
    values = torch.stack([weights[attention(layer, "W_V")] for layer in range(config.n_layers)])
    circuits = torch.stack([heads(weights, config).qk, values], dim=2).numpy()
    circuits = np.pad(circuits, ((0, 0), (0, 0), (0, 0), (0, pad), (0, pad)))
    row_norms = np.array([np.linalg.norm(block) for block in blocks])
    circuit_norms = np.linalg.norm(circuits, axis=(-2, -1))
    return Parts(
        [block * _inverse(norm) for block, norm in zip(blocks, row_norms, strict=True)],
        circuits * _inverse(circuit_norms)[..., None, None],
        row_norms,
        circuit_norms,
    )


def best_match(learned: Parts, reference: Parts, seed: int = 0) -> Match:
    """The signed permutation with the largest mean cosine."""
    search = SignedPermutationSearch(learned, reference)
    if search.d_model <= EXHAUSTIVE_LIMIT:
        return search.exhaustive()
    return search.restarts(np.random.default_rng(seed))


class SignedPermutationSearch:
    """Scores of candidate signed permutations for one pair of models."""

    def __init__(self, learned: Parts, reference: Parts):
        self.learned, self.reference = learned, reference
        self.d_model = learned.circuits.shape[-1]
        # Σ over rows of <a M, b> is Σ_j sign_j · linear[order_j, j].
        self.linear = sum(
            (a.T @ b for a, b in zip(learned.rows, reference.rows, strict=True)),
            start=np.zeros((self.d_model, self.d_model)),
        )
        present = sum(norm > 0 for norm in reference.row_norms)
        self.n_parts = present + int((reference.circuit_norms > 0).sum())

    def exhaustive(self) -> Match:
        """The best signed permutation of all, by branch and bound."""
        orders = np.array(list(itertools.permutations(range(self.d_model))))
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=self.d_model)))
        rows, pairs = self.evaluate_grid(orders, signs)
        # No assignment of heads beats every reference head's own favourite.
        bound = rows + pairs.max(axis=-2).sum(axis=(-1, -2))
        flat = bound.ravel()
        best = second = (-np.inf, -1, np.empty((0, 0), dtype=int))
        for index in np.argsort(-flat, kind="stable"):
            if flat[index] <= second[0]:
                break
            order, sign = divmod(int(index), len(signs))
            total, heads = _assign(pairs[order, sign])
            score = rows[order, sign] + total
            if score > best[0]:
                best, second = (score, index, heads), best
            elif score > second[0]:
                second = (score, index, heads)
        order, sign = divmod(int(best[1]), len(signs))
        return Match(
            orders[order],
            signs[sign],
            best[2],
            best[0] / self.n_parts,
            second[0] / self.n_parts,
            exhaustive=True,
        )

    def restarts(self, rng: np.random.Generator) -> Match:
        """The best of local searches from random starts."""
        d = self.d_model
        starts = [(rng.permutation(d), rng.choice([1.0, -1.0], d)) for _ in range(_RESTARTS)]
        starts.insert(0, _nearest_signed_permutation(self.linear))
        best = None
        for order, signs in starts:
            score, order, signs, heads = self._climb(order, signs)
            if best is None or score > best[0] + 1e-12:
                best = (score, order, signs, heads)
        assert best is not None  # there is at least one start
        score, order, signs, heads = best
        return Match(order, signs, heads, score / self.n_parts, float("nan"), exhaustive=False)

    def _climb(
        self, order: np.ndarray, signs: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """Assignments on the gradient while they help, then the best swap or flip."""
        score, heads = self._score(order, signs)
        while True:
            candidate = _nearest_signed_permutation(self._gradient(order, signs, heads))
            new, new_heads = self._score(*candidate)
            if new <= score + 1e-12:
                orders, flips = _neighbours(order, signs)
                rows, pairs = self.evaluate(orders, flips)
                totals = [row + _assign(pair)[0] for row, pair in zip(rows, pairs, strict=True)]
                best = int(np.argmax(totals))
                candidate = orders[best], flips[best]
                new, new_heads = self._score(*candidate)
                if new <= score + 1e-12:
                    return score, order, signs, heads
            score, heads, (order, signs) = new, new_heads, candidate

    def _score(self, order: np.ndarray, signs: np.ndarray) -> tuple[float, np.ndarray]:
        rows, pairs = self.evaluate(order[None], signs[None])
        total, heads = _assign(pairs[0])
        return float(rows[0] + total), heads

    def evaluate(self, orders: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores of candidates, orders [n, D] with signs [n, D].

        Returns:
            Row scores [n], and head-pair scores [n, layer, learned head, reference head].
        """
        columns = np.arange(self.d_model)
        rows = (signs * self.linear[orders, columns]).sum(-1)
        moved = self.learned.circuits[..., orders[:, :, None], orders[:, None, :]]
        outer = signs[:, :, None] * signs[:, None, :]
        cosines = np.einsum(
            "lhcnij,nij,lkcij->nlhkc", moved, outer, self.reference.circuits, optimize=True
        )
        return rows, np.abs(cosines.sum(-1))

    def evaluate_grid(self, orders: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `evaluate` for every order with every sign pattern, [n_orders, n_signs, ...]."""
        columns = np.arange(self.d_model)
        rows = self.linear[orders, columns] @ signs.T
        layers, learned_heads = self.learned.circuits.shape[:2]
        heads = self.reference.circuits.shape[1]
        outer = (signs[:, :, None] * signs[:, None, :]).reshape(len(signs), -1)
        pairs = np.empty((len(orders), len(signs), layers, learned_heads, heads))
        for layer, h, k in itertools.product(range(layers), range(learned_heads), range(heads)):
            products = np.zeros((len(orders), self.d_model, self.d_model))
            for circuit in range(2):
                moved = self.learned.circuits[layer, h, circuit][
                    orders[:, :, None], orders[:, None, :]
                ]
                products = products + moved * self.reference.circuits[layer, k, circuit]
            pairs[:, :, layer, h, k] = products.reshape(len(orders), -1) @ outer.T
        return rows, np.abs(pairs)

    def _gradient(self, order: np.ndarray, signs: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """d score / d M at a signed permutation, [D, D]."""
        matrix = permutation_matrix(order, signs)
        gradient = self.linear.copy()
        for layer, assigned in enumerate(heads):
            for k, h in enumerate(assigned):
                if h < 0:
                    continue
                pairs = list(
                    zip(
                        self.learned.circuits[layer, h],
                        self.reference.circuits[layer, k],
                        strict=True,
                    )
                )
                sign = np.sign(sum(np.sum((matrix.T @ a @ matrix) * b) for a, b in pairs))
                for a, b in pairs:
                    gradient += sign * (a @ matrix @ b.T + a.T @ matrix @ b)
        return gradient


def permutation_matrix(order: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """M with (v M)_j = sign_j · v[order_j]."""
    matrix = np.zeros((len(order), len(order)))
    matrix[order, np.arange(len(order))] = signs
    return matrix


def _nearest_signed_permutation(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order and signs that maximise Σ_j sign_j · matrix[order_j, j]."""
    rows, columns = linear_sum_assignment(-np.abs(matrix))
    order = rows[np.argsort(columns)]
    signs = np.where(matrix[order, np.arange(len(order))] < 0, -1.0, 1.0)
    return order, signs


def _neighbours(order: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All single flips, and all swaps of two coordinates with any signs."""
    orders, flips = [], []
    for i in range(len(order)):
        flipped = signs.copy()
        flipped[i] *= -1
        orders.append(order)
        flips.append(flipped)
    for i, j in itertools.combinations(range(len(order)), 2):
        swapped = order.copy()
        swapped[[i, j]] = order[[j, i]]
        for si, sj in itertools.product((1.0, -1.0), repeat=2):
            changed = signs.copy()
            changed[i], changed[j] = si, sj
            orders.append(swapped)
            flips.append(changed)
    return np.array(orders), np.array(flips)


def _assign(pairs: np.ndarray) -> tuple[float, np.ndarray]:
    """Best one-to-one assignment of heads per layer, from scores [layer, learned, reference]."""
    total, assigned = 0.0, np.full((pairs.shape[0], pairs.shape[2]), -1)
    for layer, scores in enumerate(pairs):
        learned, reference = linear_sum_assignment(-scores)
        assigned[layer, reference] = learned
        total += scores[learned, reference].sum()
    return total, assigned


def _inverse(norms: np.ndarray) -> np.ndarray:
    return np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
