"""What the verdict rests on: rivals fitted to a model, scored, and the mechanism tested.

Shapes: R rivals.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch

from models.config import PromptConfig
from models.prompts import Prompts, sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.behaviour import (
    IN_DISTRIBUTION,
    LENGTHS,
    conditions,
    distances,
    further_measures,
    separations,
    where_finite,
)
from probe.ladder import FAMILIES, Ladder, climb
from probe.mechanism import (
    DIVISION,
    RESIDUAL_DIVISION,
    RESIDUAL_SLOPE,
    SHARE,
    SLOPE,
    division_evidence,
    supporting_evidence,
)
from probe.predictor import Predictor

# The algorithm each family of rivals stands for.
ALGORITHM = {
    "least squares": "least squares",
    "Newton": "Newton",
    "ridge": "ridge",
    "ridge, free intercept": "ridge",
    "GD": "gradient descent",
    "GD++": "gradient descent",
    "preconditioned GD": "gradient descent",
    "context mean": "context mean",
    "zero": "zero",
}
# Distances are compared as logarithms between these bounds.
FLOOR, CEILING = 1e-12, 1e3
# Of families of one algorithm, and of numbers of steps, the simpler one is named unless another
# beats it by this many decades.
_SIMPLER_FAMILY, _FEWER_STEPS = 0.3, 0.1
_RIVAL = ["family", "k", "query_row"]


@dataclass(frozen=True)
class Findings:
    """Measurements of one model.

    Attributes:
        best: the best rival of each algorithm: algorithm, family, k, query_row, parameters,
            distance (in distribution), score (log10 of it, averaged half and half with the mean
            log10 distance over shifts), worst (largest distance over conditions),
            worst_condition.
        apart: distance between the best rivals of two algorithms under the condition that
            separates them most, by pair of algorithms.
        apart_here: the same in distribution.
        division_r2: R² of the division test at its best layer; None if it does not apply.
        division_slope: slope at that layer.
        division_layer: that layer, in words.
        residual_r2: R² of the residual division test at its best layer; None if it does not apply.
        residual_slope: slope at that layer.
        residual_share: share of the fit that is left to that layer.
        residual_layer: that layer, in words.
        not_applicable: why the division test does not apply.
        sites: whether the model is a `LinearAttentionTransformer`; of others only behaviour is
            seen.
        procedure: for several covariates, what the pivots spell out: "elimination (x1, x2)",
            "closed form by determinant", or None.
        evidence: all measurements: measure, condition, family, k, query_row, value, ci_low,
            ci_high, n_prompts.
    """

    best: pd.DataFrame
    apart: dict[frozenset[str], float]
    apart_here: dict[frozenset[str], float]
    division_r2: float | None
    division_slope: float | None
    division_layer: str
    residual_r2: float | None
    residual_slope: float | None
    residual_share: float | None
    residual_layer: str
    not_applicable: str
    sites: bool
    procedure: str | None
    evidence: pd.DataFrame


def gather(
    model: Any,
    prompt_config: PromptConfig,
    n_prompts: int,
    generator: torch.Generator,
    only_conditions: Collection[str] | None = None,
    thorough: bool = True,
) -> Findings:
    """Fit the rivals to a model and measure.

    Args:
        model: any model `Predictor` takes.
        prompt_config: distribution of the prompts.
        n_prompts: prompts per condition; half as many fit the rivals.
        generator: source of all randomness.
        only_conditions: names of conditions; all by default.
        thorough: also measure what the decision does not use.

    Raises:
        TypeError, ValueError: as `Predictor`; on an unknown condition.
    """
    predictor = Predictor(model)
    fitted = sample_prompts(prompt_config, max(n_prompts // 2, 1), generator)
    ladder = climb(fitted, predictor.checked(fitted))

    known = isinstance(model, LinearAttentionTransformer)
    any_length = known and model.cfg.readout == "query"
    batches = conditions(prompt_config, n_prompts, generator, any_length)
    batches = where_finite(predictor, _select(batches, only_conditions))
    table = distances(predictor, ladder, batches, generator)
    best = _best_rivals(table, ladder)
    chosen = ladder.take(best["row"])
    separated = separations(predictor, chosen, _counted(batches))
    division, reason, procedure = division_evidence(model, prompt_config, generator)

    tables = [table, division]
    if thorough:
        informative = ladder.take(best.loc[best.algorithm != "zero", "row"])
        tables.append(further_measures(predictor, informative, batches, generator))
        tables.append(supporting_evidence(model, prompt_config, generator))

    layer, (r2, slope) = _at_best(division, DIVISION, SLOPE)
    residual_layer, residual = _at_best(division, RESIDUAL_DIVISION, RESIDUAL_SLOPE, SHARE)
    return Findings(
        best=best.drop(columns="row"),
        apart=_pairs(best.algorithm, torch.stack(list(separated.values())).amax(0)),
        apart_here=_pairs(best.algorithm, separated[IN_DISTRIBUTION]),
        division_r2=r2,
        division_slope=slope,
        division_layer=layer,
        residual_r2=residual[0],
        residual_slope=residual[1],
        residual_share=residual[2],
        residual_layer=residual_layer,
        not_applicable=reason,
        sites=known,
        procedure=procedure,
        evidence=_tidy(tables),
    )


def _at_best(division: pd.DataFrame, *measures: str) -> tuple[str, tuple[float | None, ...]]:
    """The layer where the first of some measures is largest, and all of them there."""
    first = division[division.measure == measures[0]]
    if first.empty:
        return "", (None,) * len(measures)
    layer = first.loc[first.value.idxmax(), "condition"]
    there = division[division.condition == layer].set_index("measure").value
    return layer, tuple(float(there[measure]) for measure in measures)


def _tidy(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """One table; rows that belong to no rival have no family, k and query_row."""
    joined = pd.concat([table for table in tables if len(table)], ignore_index=True)
    joined = joined.astype({"k": "Int64", "query_row": "boolean", "n_prompts": "Int64"})
    return joined[["measure", "condition", *_RIVAL, "value", "ci_low", "ci_high", "n_prompts"]]


def _select(
    batches: dict[str, Prompts], only_conditions: Collection[str] | None
) -> dict[str, Prompts]:
    if only_conditions is None:
        return batches
    unknown = set(only_conditions) - set(batches)
    if unknown:
        raise ValueError(
            f"unknown condition(s) {', '.join(sorted(unknown))}; this model has "
            f"{', '.join(batches)}"
        )
    wanted = {IN_DISTRIBUTION, *only_conditions}
    return {name: batch for name, batch in batches.items() if name in wanted}


def _counted(batches: dict[str, Prompts]) -> dict[str, Prompts]:
    """The conditions that enter scores."""
    return {name: batch for name, batch in batches.items() if name not in LENGTHS}


def _best_rivals(table: pd.DataFrame, ladder: Ladder) -> pd.DataFrame:
    """The best rival of each algorithm; `row` is its position in `ladder.index`."""
    counted = table[~table.condition.isin(LENGTHS)]
    wide = counted.pivot(index=_RIVAL, columns="condition", values="value")
    wide = wide.reindex(pd.MultiIndex.from_frame(ladder.index[_RIVAL]))
    logs = np.log10(wide.clip(FLOOR, CEILING))
    shifts = logs.drop(columns=IN_DISTRIBUTION)
    score = logs[IN_DISTRIBUTION]
    if len(shifts.columns):
        score = (score + shifts.mean(axis=1)) / 2
    rivals = ladder.index.assign(
        row=np.arange(len(ladder.index)),
        algorithm=ladder.index.family.map(ALGORITHM),
        score=score.to_numpy(),
        distance=wide[IN_DISTRIBUTION].to_numpy(),
        worst=wide.max(axis=1).to_numpy(),
        worst_condition=wide.idxmax(axis=1).to_numpy(),
    )
    order = {family.name: position for position, family in enumerate(FAMILIES)}
    rows = []
    for algorithm in dict.fromkeys(ALGORITHM.values()):
        own = rivals[rivals.algorithm == algorithm]
        per_family = own.groupby("family").score.min()
        near = per_family[per_family <= per_family.min() + _SIMPLER_FAMILY].index
        family = own[own.family == min(near, key=order.__getitem__)]
        close = family[family.score <= family.score.min() + _FEWER_STEPS]
        fewest = close[close.k == close.k.min()]
        rows.append(fewest.loc[fewest.score.idxmin()])
    measures = ["score", "distance", "worst", "worst_condition"]
    columns = ["algorithm", *_RIVAL, "parameters", *measures, "row"]
    return pd.DataFrame(rows)[columns].reset_index(drop=True)


def _pairs(algorithms: pd.Series, distance: torch.Tensor) -> dict[frozenset[str], float]:
    names = list(algorithms)
    return {
        frozenset((names[i], names[j])): float(distance[i, j])
        for i, j in combinations(range(len(names)), 2)
    }
