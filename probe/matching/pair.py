"""Two models that are to be aligned: checked to be comparable, with the names of coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import coordinate_names
from probe.matching.construction_family import ConstructionFamily, has_construction
from probe.symmetry.weights import (
    Weights,
    has_plain_forward,
    input_map,
    require_plain_forward,
    weights_hash,
    weights_of,
)

# Share of the readout's norm that may lie on context tokens of a readout of the query.
_ELSEWHERE = 0.05

Level = Literal["signed_permutation", "gauge", "functional"]


def is_construction(model: LinearAttentionTransformer) -> bool:
    """Whether the coordinates of a model are those of `models.constructed.coordinate_names`."""
    p = model.cfg.n_covariates
    if not (has_plain_forward(model) and has_construction(model.cfg)):
        return False
    weights = weights_of(model)
    tokens, readout = input_map(weights), weights["unembed.W_U"]
    signals = tokens[1:, : p + 1]
    return bool(
        (tokens[0, : p + 1] == 0).all()
        and (tokens[1:, p + 1 :] == 0).all()
        and (signals == torch.diag(signals.diagonal())).all()
        and (readout[:, [i for i in range(p + 3) if i != p]] == 0).all()
    )


@dataclass(frozen=True)
class Pair:
    """Two models that have been checked to be comparable.

    Attributes:
        model: the learned model.
        reference: what it is aligned to.
        learned: weights of the model.
        target: weights of the reference.
        names: of the reference's coordinates.
        last_only: whether only the query's readout row can be compared.
        notes: what cannot be compared.
        choose: the weights that a null model is compared with.
        reference_key: names the reference, or the family, in the cache of null scores.
    """

    model: LinearAttentionTransformer
    reference: LinearAttentionTransformer
    learned: Weights
    target: Weights
    names: tuple[str, ...]
    last_only: bool
    notes: tuple[str, ...]
    choose: Callable[[Weights], Weights]
    reference_key: str

    @classmethod
    def with_nearest(
        cls, model: LinearAttentionTransformer, family: ConstructionFamily, level: Level
    ) -> Pair:
        """A model and the member of the family nearest to it."""
        if not has_construction(model.cfg):
            raise ValueError(
                f"normalization={model.cfg.normalization!r}, norm_affine={model.cfg.norm_affine}, "
                f"d_model={model.cfg.d_model}: the family holds models with branch normalization "
                f"without affine map, d_model={family.base.cfg.d_model}; give one of them, "
                f"models.closed_form, as the reference"
            )
        pair = cls.of(model, family.base, level, family.names)
        member = family.nearest(pair.learned, model.cfg)
        notes = [f"nearest construction: {member}", *pair.notes]
        if not has_plain_forward(model):
            notes.append(
                f"chosen by weights: under the forward pass of {type(model).__qualname__} another "
                f"member may come nearer"
            )
        return replace(
            pair,
            reference=family.model_of(member),
            target=member.weights,
            notes=tuple(notes),
            choose=lambda weights: family.nearest(weights, model.cfg).weights,
            reference_key="family",
        )

    @classmethod
    def of(
        cls,
        model: LinearAttentionTransformer,
        reference: LinearAttentionTransformer,
        level: Level,
        names: Sequence[str] | None,
    ) -> Pair:
        """Check a pair; raises ValueError with what is comparable instead."""
        a, b = model.cfg, reference.cfg
        require_comparable(model, reference, level)
        weights = []
        for who, one in (("model", model), ("reference", reference)):
            weights.append(weights_of(one))
            for name, value in weights[-1].items():
                if not value.isfinite().all():
                    raise ValueError(f"{who}: {name} holds NaN or infinity; nothing to align")
        notes = []
        same_shape = (a.readout, a.n_context) == (b.readout, b.n_context)
        last_only = not same_shape or all(_reads_the_query(one) for one in weights)
        if not same_shape and "flatten" in (a.readout, b.readout):
            notes.append(
                f"readouts differ ({a.readout}, N={a.n_context}; {b.readout}, N={b.n_context}): "
                f"compared at the query token only"
            )
        elif last_only and a.readout == "flatten":
            notes.append(
                f"both flatten readouts have all but {_ELSEWHERE:.0%} of their weight on the "
                f"query token: compared there only"
            )
        if a.norm_affine or b.norm_affine:
            notes.append("gain and bias of the layer norm are not compared")
        if names is None:
            constructed = is_construction(reference)
            names = (
                coordinate_names(b.n_covariates)
                if constructed
                else [f"c{i}" for i in range(b.d_model)]
            )
        if len(names) != b.d_model:
            raise ValueError(f"{len(names)} names for the reference's {b.d_model} coordinates")
        learned, target = weights
        return cls(
            model,
            reference,
            learned,
            target,
            tuple(names),
            last_only,
            tuple(notes),
            choose=lambda _: target,
            reference_key=weights_hash(target, b),
        )

    def key(self, *settings: object) -> tuple:
        """What a null score depends on, beside the learned model's shape."""
        kind, shape = type(self.reference), self.reference.cfg.model_dump_json()
        return (self.reference_key, kind, shape, self.last_only, *settings)


def _reads_the_query(weights: Weights) -> bool:
    """Whether (almost) all readout weight is on the query token."""
    readout = weights["unembed.W_U"]
    return bool(readout[:-1].norm() <= _ELSEWHERE * readout.norm())


def require_comparable(
    model: LinearAttentionTransformer, reference: LinearAttentionTransformer, level: Level
) -> None:
    """Refuse a pair that a level cannot compare, whatever the weights are.

    Raises:
        ValueError: what differs, and what is comparable instead.
    """
    if level != "functional":
        for one in (model, reference):
            require_plain_forward(one, f"level {level!r}")
    a, b = model.cfg, reference.cfg
    for what in ("n_covariates", "n_layers"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(
                f"{what}: {getattr(a, what)} in the model, {getattr(b, what)} in the "
                f"reference; layers are compared one to one on the same prompts. "
                f"probe.read_out describes each model on its own"
            )
    if level == "functional":
        if "flatten" in (a.readout, b.readout) and a.n_context != b.n_context:
            flat = [c.n_context for c in (a, b) if c.readout == "flatten"]
            if len(flat) == 2:
                raise ValueError(
                    f"n_context={flat[0]} and {flat[1]} with flatten readouts: the models cannot "
                    f"see the same prompts; compare their weights instead"
                )
        return
    if a.normalization != b.normalization:
        raise ValueError(
            f"normalization {a.normalization!r} and {b.normalization!r}: the same weights mean "
            f"different things. Comparable are activations, level='functional'"
        )
    if level == "gauge":
        if not a.norms_writes or a.norm_affine or b.norm_affine:
            raise ValueError(
                f"level 'gauge' is for branch normalization without affine map, got "
                f"{a.normalization!r}, norm_affine={a.norm_affine or b.norm_affine}: other "
                f"placements have other groups. Comparable: 'signed_permutation', 'functional'"
            )
        if a.d_model != b.d_model:
            raise ValueError(
                f"d_model {a.d_model} and {b.d_model}: no symmetry relates models of different "
                f"width. Comparable: 'signed_permutation', 'functional'"
            )
