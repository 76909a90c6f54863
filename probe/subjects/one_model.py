"""One model, looked at from all sides: the tables that a report on it lays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch

from models.architecture.sites import sites_with
from probe.causal.division import (
    division_test,
    require_one_quotient,
    require_residuals,
    residual_division_test,
)
from probe.causal.norm_scale import scale_law, scale_points
from probe.causal.pivots import pivot_label, pivot_test, require_pivots
from probe.matching.alignment import Alignment, align
from probe.matching.circuit import circuit_edges
from probe.matching.construction_family import ConstructionFamily, has_construction
from probe.matching.tables import weight_tables
from probe.probing.readout import read_out
from probe.subjects.subject import Subject
from probe.subjects.survey import applies
from probe.symmetry.weights import has_plain_forward

LEVELS = ("signed_permutation", "gauge", "functional")
# Points kept of a scatter: enough to see its shape, few enough for a page.
SCALE_POINTS = 1000


@dataclass(frozen=True)
class Division:
    """What layer norm divides by.

    Attributes:
        points: scale against variance, prompt by prompt (`probe.causal.norm_scale.scale_points`).
        law: their log-log line by layer.
        at_once: the division test; None for several covariates.
        residual: the same on what the stream holds; None where it does not apply.
        pivots: the pivot test; None for one covariate.
        order: the pivots in words; None if no order of them is found, or there is one covariate.
    """

    points: pd.DataFrame
    law: pd.DataFrame
    at_once: pd.DataFrame | None
    residual: pd.DataFrame | None
    pivots: pd.DataFrame | None
    order: str | None


@dataclass(frozen=True)
class Match:
    """The weights beside the nearest construction.

    Attributes:
        alignments: by level.
        weights: by label, `weight_tables` of the model permuted and turned, and of the
            construction.
        edges: circuits of the model, its coordinates permuted, and of the construction.
    """

    alignments: Mapping[str, Alignment]
    weights: Mapping[str, Mapping[str, pd.DataFrame]]
    edges: tuple[pd.DataFrame, pd.DataFrame]


@dataclass(frozen=True)
class Study:
    """A model and what was measured on it.

    Attributes:
        subject: the model.
        n_prompts: pairs of prompts in the division tests.
        read_out: what every coordinate holds.
        division: what layer norm divides by; None without layer norm.
        match: the nearest construction; None where there is none of this size.
    """

    subject: Subject
    n_prompts: int
    read_out: pd.DataFrame
    division: Division | None
    match: Match | None


def study(subject: Subject, *, n_prompts: int = 4096, seed: int = 0) -> Study:
    """Measure one model: read-out, division by layer norm, alignment with the construction.

    Args:
        subject: the model with its prompts.
        n_prompts: pairs of prompts in the division tests.
        seed: of all randomness; each of the three starts from it.
    """
    generator = torch.Generator().manual_seed(seed)
    table = read_out(subject.model, subject.prompts, generator=generator)
    division = _division(subject, n_prompts, seed)
    return Study(subject, n_prompts, table, division, _match(subject, seed))


def _division(subject: Subject, n: int, seed: int) -> Division | None:
    model, prompts = subject.model, subject.prompts
    if not sites_with(model, "divisor"):
        return None
    generator = torch.Generator().manual_seed(seed)
    points = scale_points(model, prompts, n_prompts=SCALE_POINTS, generator=generator)
    law = scale_law(points, generator)
    tested = {"n_prompts": n, "generator": generator}
    at_once = residual = pivots = order = None
    if applies(require_one_quotient, model, prompts):
        at_once = division_test(model, prompts, **tested)
    if applies(require_residuals, model, prompts):
        residual = residual_division_test(model, prompts, **tested)
    if applies(require_pivots, model, prompts):
        pivots = pivot_test(model, prompts, **tested)
        order = pivot_label(pivots)
    return Division(points, law, at_once, residual, pivots, order)


def _match(subject: Subject, seed: int) -> Match | None:
    model = subject.model
    if not (has_construction(model.cfg) and has_plain_forward(model)):
        return None
    family = ConstructionFamily.for_model(model.cfg)
    generator = torch.Generator().manual_seed(seed)
    found = {
        level: align(model, family, level, prompt_config=subject.prompts, generator=generator)
        for level in LEVELS
    }
    permuted, turned = found["signed_permutation"], found["gauge"]
    # A construction of the same width was found, so that the model could be put in its coordinates.
    assert permuted.model is not None
    assert turned.model is not None
    edges = (
        circuit_edges(permuted.model, family.names),
        circuit_edges(permuted.reference, family.names),
    )
    shown = {
        "permuted": permuted.model,
        "all symmetries": turned.model,
        "construction": turned.reference,
    }
    weights = {label: weight_tables(one, family.names) for label, one in shown.items()}
    return Match(found, weights, edges)
