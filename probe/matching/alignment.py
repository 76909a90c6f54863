"""Align a learned model to a reference, at three levels, with a p-value.

- ``"signed_permutation"``: rename and flip coordinates and heads (`probe.signed_permutation`).
- ``"gauge"``: all symmetries of the weights (`probe.matching.gauge`).
- ``"functional"``: what both compute on the same prompts (`probe.matching.functional`).

Two models with the same weights agree at all levels, two that are related by a symmetry from
the second on, two that run the same algorithm with other weights at the third only. The first
two are mathematics of the weights under the forward pass of `LinearAttentionTransformer`; the
third runs the models as they are, of whatever class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from probe.matching import functional, gauge, null
from probe.matching import signed_permutation as permuted
from probe.matching.construction_family import ConstructionFamily
from probe.matching.pair import Level, Pair
from probe.matching.tables import part_table
from probe.symmetry.architecture import HeadMixing
from probe.symmetry.heads import heads
from probe.symmetry.weights import Weights, attention, centring, change_basis, weights_of

# Heads are left as they are where matching them would need a nearly singular mixing.
_WORST_MIXING = 1e4


@dataclass(frozen=True, eq=False)
class Alignment:
    """A learned model beside a reference.

    Attributes:
        level: at which level they were aligned.
        score: 1 for the same model; at most 1.
        distance: 0 for the same model, in units of the level.
        p_value: share of null models that score as high, (1 + k) / (1 + n), for the kind of
            null model that does so most.
        mapping: learned coordinate -> (name of the reference coordinate, sign). For the
            other levels the signed permutation nearest to `matrix`.
        table: what the score is made of. signed_permutation: part, learned, reference, cosine,
            relative_error, norm; gauge: part, distance; functional: kind, layer, index, r2.
        matrix: M [D_learned, D_reference] with Q_reference ≈ Q_learned M.
        model: the learned model in the reference's coordinates; None where D differs
            or (functional) M is no change of basis of a model.
        reference: what it was aligned to.
        null: scores of null models, columns kind, score.
        notes: what could not be compared or was not searched exhaustively.
    """

    level: Level
    score: float
    distance: float
    p_value: float
    mapping: dict[int, tuple[str, int]]
    table: pd.DataFrame
    matrix: Tensor
    model: LinearAttentionTransformer | None
    reference: LinearAttentionTransformer
    null: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The mapping in words, such as "learned 3 = −x_1"."""
        return tuple(
            f"learned {index} = {'−' if sign < 0 else ''}{name}"
            for index, (name, sign) in sorted(self.mapping.items())
        )


def align(
    model: LinearAttentionTransformer,
    reference: LinearAttentionTransformer | ConstructionFamily,
    level: Level = "signed_permutation",
    *,
    names: Sequence[str] | None = None,
    prompt_config: PromptConfig | None = None,
    generator: torch.Generator | None = None,
) -> Alignment:
    """Align `model` to `reference` and say how surprising the agreement is.

    Args:
        model: the learned model.
        reference: a construction or another learned model; or a `ConstructionFamily`, of which
            every model, null models too, gets the member nearest to it.
        level: see the module.
        names: names of the reference's coordinates; those of the construction if it is one,
            c0, c1, .. otherwise.
        prompt_config: prompts for the functional level; by default of the model's size with
            covariates of random mean and scale.
        generator: source of null models, restarts and prompts; seeded with 0 by default. Only
            its initial seed is used and it is not moved on, so that the null models of a
            reference are drawn and scored once in a process.

    Raises:
        ValueError: on an unknown level, another number of layers or covariates, non-finite
            weights, or models whose weights the level cannot compare, of another shape or of a
            class with a forward pass of its own (the message says what can be).
    """
    if level not in get_args(Level):
        raise ValueError(f"level={level!r} is none of {', '.join(get_args(Level))}")
    seed = 0 if generator is None else generator.initial_seed()
    if isinstance(reference, ConstructionFamily):
        pair = Pair.with_nearest(model, reference, level)
    else:
        pair = Pair.of(model, reference, level, names)
    if level == "signed_permutation":
        return _align_permuted(pair, seed)
    if level == "gauge":
        return _align_gauge(pair, seed)
    return _align_functional(pair, seed, prompt_config)


def _align_permuted(pair: Pair, seed: int) -> Alignment:
    a, b = pair.model.cfg, pair.reference.cfg
    width = max(a.d_model, b.d_model)

    def match(weights: Weights, target: Weights) -> permuted.Match:
        ours, theirs = (
            permuted.parts_of(one, config, width, pair.last_only)
            for one, config in ((weights, a), (target, b))
        )
        return permuted.best_match(ours, theirs, seed)

    best = match(pair.learned, pair.target)
    exhaustive = width <= permuted.EXHAUSTIVE_LIMIT
    scores = null.null_scores(
        lambda models: np.array(
            [match(one, pair.choose(one)).score for one in null.progress(models)]
        ),
        pair.model,
        seed,
        null.DRAWS if exhaustive and pair.reference_key != "family" else null.FEW_DRAWS,
        pair.key("signed_permutation", seed),
    )
    mapping = {
        int(i): (pair.names[j], int(s))
        for j, (i, s) in enumerate(zip(best.order, best.signs, strict=True))
        if i < a.d_model and j < b.d_model
    }
    notes = [*pair.notes, _certificate(best, width)]
    if len({sign for _, sign in mapping.values()}) > 1 and a.has_norm:
        notes.append("signs are mixed: flipping single coordinates is only an approximate symmetry")
    full = torch.from_numpy(permuted.permutation_matrix(best.order, best.signs))
    aligned = None
    if a.d_model == b.d_model:
        aligned = pair.model.like(_reorder(pair.learned, a, full, best.heads))
    return Alignment(
        level="signed_permutation",
        score=best.score,
        distance=float(np.sqrt(max(0.0, 1 - best.score))),
        p_value=null.p_value(best.score, scores),
        mapping=mapping,
        table=part_table(pair, width, best),
        matrix=full[: a.d_model, : b.d_model],
        model=aligned,
        reference=pair.reference,
        null=scores,
        notes=tuple(notes),
    )


def _certificate(best: permuted.Match, width: int) -> str:
    if best.exhaustive:
        return (
            f"certified optimal: every signed permutation of {width} coordinates was bounded, "
            f"the next best scores {best.runner_up:.4f}"
        )
    return (
        f"{width} coordinates are too many for exhaustive search (limit "
        f"{permuted.EXHAUSTIVE_LIMIT}): assignment with restarts, no certificate"
    )


def _reorder(weights: Weights, config: ModelConfig, matrix: Tensor, found: np.ndarray) -> Weights:
    """Weights in the reference's order of coordinates and heads (surplus heads last)."""
    changed = change_basis(weights, config, matrix)
    for layer, assigned in enumerate(found):
        order = [h for h in assigned if h >= 0]
        order += [h for h in range(config.n_heads) if h not in order]
        for name in ("W_Q", "W_K", "W_V"):
            full = attention(layer, name)
            changed[full] = changed[full][order]
    return changed


def _align_gauge(pair: Pair, seed: int) -> Alignment:
    a, b = pair.model.cfg, pair.reference.cfg

    def match(models: Sequence[Weights], targets: Sequence[Weights]) -> gauge.GaugeMatch:
        return gauge.gauge_match(
            [gauge.invariants(one, a, pair.last_only) for one in models],
            [gauge.invariants(one, b, pair.last_only) for one in targets],
            free_last=pair.last_only,
        )

    best = match([pair.learned], [pair.target])
    distance = float(best.distance[0])
    scores = null.null_scores(
        lambda models: (
            1 - match(models, [pair.choose(one) for one in null.progress(models)]).distance.square()
        ).numpy(),
        pair.model,
        seed,
        null.FEW_DRAWS,
        pair.key("gauge"),
    )
    parts = ["embed", *(f"layer {layer}" for layer in range(a.n_layers)), "readout"]
    matrix = best.matrix[0]
    moved = change_basis(pair.learned, a, matrix, gauge.output_map(matrix))
    last = attention(a.n_layers - 1, "W_V")
    moved[last] = torch.linalg.inv(matrix) @ pair.learned[last] @ best.last[0]
    return Alignment(
        level="gauge",
        score=1 - distance**2,
        distance=distance,
        p_value=null.p_value(1 - distance**2, scores),
        # Re-encodings of the component along 1 say nothing about coordinates.
        mapping=_nearest_mapping(centring(a.d_model) @ matrix, pair.names),
        table=pd.DataFrame({"part": parts, "distance": best.parts[0].sqrt().numpy()}),
        matrix=matrix,
        model=pair.model.like(_mix_heads(moved, pair.target, a, b)),
        reference=pair.reference,
        null=scores,
        notes=pair.notes,
    )


def _mix_heads(
    weights: Weights, target: Weights, config: ModelConfig, target_config: ModelConfig
) -> Weights:
    """Mix the heads of every layer so that A_h comes nearest to the reference's."""
    if config.n_heads != target_config.n_heads:
        return weights
    ours, theirs = heads(weights, config).qk, heads(target, target_config).qk
    for layer in range(config.n_layers):
        mixing = theirs[layer].flatten(1) @ torch.linalg.pinv(ours[layer].flatten(1))
        if torch.linalg.cond(mixing) < _WORST_MIXING:
            weights = HeadMixing(layer, mixing).transform(weights, config)
    return weights


def _align_functional(pair: Pair, seed: int, prompt_config: PromptConfig | None) -> Alignment:
    a, b = pair.model.cfg, pair.reference.cfg
    if prompt_config is None:
        flat = a if a.readout == "flatten" or b.readout == "query" else b
        prompt_config = PromptConfig(
            n_context=max(flat.n_context, flat.n_covariates + 2),
            n_covariates=a.n_covariates,
            x_mean_std=1.0,
            x_log_scale=0.7,
        )
    inputs = functional.shared_prompts(prompt_config, torch.Generator().manual_seed(seed))
    shells = [one.like(weights_of(one)) for one in (pair.model, pair.reference)]

    def runs(
        shell: LinearAttentionTransformer, weights: Weights
    ) -> tuple[functional.Run, functional.Run]:
        shell.load_state_dict(weights)
        fit, test = (functional.run(shell, batch) for batch in inputs)
        return fit, test

    reference_runs = runs(shells[1], pair.target)

    def match(weights: Weights, target: Weights) -> tuple[pd.DataFrame, Tensor]:
        same = target is pair.target
        goal = reference_runs if same else runs(shells[1], target)
        return functional.functional_match(runs(shells[0], weights), goal, pair.last_only)

    def scorer(models: Sequence[Weights]) -> np.ndarray:
        tables = [match(one, pair.choose(one))[0] for one in null.progress(models)]
        return np.array([functional.functional_score(table) for table in tables])

    table, matrix = match(pair.learned, pair.target)
    score = functional.functional_score(table)
    key = pair.key("functional", prompt_config.model_dump_json(), seed)
    scores = null.null_scores(scorer, pair.model, seed, null.FEW_DRAWS, key)
    return Alignment(
        level="functional",
        score=score,
        distance=1 - score,
        p_value=null.p_value(score, scores),
        mapping=_nearest_mapping(matrix, pair.names),
        table=table,
        matrix=matrix,
        model=None,
        reference=pair.reference,
        null=scores,
        notes=pair.notes,
    )


def _nearest_mapping(matrix: Tensor, names: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Signed permutation that keeps most of M, columns of M brought to unit norm."""
    columns = (matrix / matrix.norm(dim=0).clamp(min=1e-300)).numpy()
    learned, reference = linear_sum_assignment(-np.abs(columns))
    return {
        int(i): (names[int(j)], -1 if columns[i, j] < 0 else 1)
        for i, j in zip(learned, reference, strict=True)
    }
