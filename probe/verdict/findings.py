"""What the verdict rests on: rivals fitted to a model, scored, and the mechanism tested.

Shapes: R rivals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch

from models.architecture.sites import Studied
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.causal.mechanism_test import MECHANISM_TESTS, TestResult
from probe.rivals import registry
from probe.rivals.behaviour import (
    IN_DISTRIBUTION,
    LENGTHS,
    conditions,
    distances,
    further_measures,
    separations,
    where_finite,
)
from probe.rivals.fitting import Ladder, climb
from probe.rivals.predictor import Predictor
from probe.verdict.evidence import supporting_evidence

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
        tests: what each test of a mechanism that applies found, by its name.
        not_applicable: why each of the others does not apply, by its name.
        sites: whether the model has sites; of others only behaviour is seen.
        evidence: all measurements: measure, condition, family, k, query_row, value, ci_low,
            ci_high, n_prompts.
    """

    best: pd.DataFrame
    apart: dict[frozenset[str], float]
    apart_here: dict[frozenset[str], float]
    tests: Mapping[str, TestResult]
    not_applicable: Mapping[str, str]
    sites: bool
    evidence: pd.DataFrame

    @property
    def division(self) -> TestResult | None:
        """Of the division by V or, for several covariates, by the best pivot of a layer."""
        return self.tests.get("division") or self.tests.get("pivots")

    @property
    def residual(self) -> TestResult | None:
        """Of the division by the variance of the residuals that the stream holds."""
        return self.tests.get("residual division")

    @property
    def procedure(self) -> str | None:
        """What the tests spell out: "elimination (x1, x2)", "closed form by determinant"."""
        return next((test.procedure for test in self.tests.values() if test.procedure), None)

    @property
    def numbers(self) -> dict[str, float | None]:
        """R², slope and share of the tests that the verdict rests on; None without a test."""
        division, residual = self.division, self.residual
        return {
            "division_r2": division and division.value,
            "division_slope": division and division.slope,
            "residual_r2": residual and residual.value,
            "residual_slope": residual and residual.slope,
            "residual_share": residual and residual.share,
        }


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

    any_length = getattr(model, "any_length", False)
    batches = conditions(prompt_config, n_prompts, generator, any_length)
    batches = where_finite(predictor, _select(batches, only_conditions))
    table = distances(predictor, ladder, batches, generator)
    best = _best_rivals(table, ladder)
    chosen = ladder.take(best.loc[:, "row"])
    separated = separations(predictor, chosen, _counted(batches))
    tests, not_applicable = _tests(model, prompt_config, generator)

    tables = [table, *(test.table for test in tests.values())]
    if thorough:
        informative = ladder.take(best.loc[best.family != "zero", "row"])
        tables.append(further_measures(predictor, informative, batches, generator))
        tables.append(supporting_evidence(model, prompt_config, generator))

    return Findings(
        best=best.drop(columns="row"),
        apart=_pairs(best.algorithm, torch.stack(list(separated.values())).amax(0)),
        apart_here=_pairs(best.algorithm, separated[IN_DISTRIBUTION]),
        tests=tests,
        not_applicable=not_applicable,
        sites=isinstance(model, Studied),
        evidence=_tidy(tables),
    )


def _tests(
    model: Any, prompt_config: PromptConfig, generator: torch.Generator
) -> tuple[dict[str, TestResult], dict[str, str]]:
    """What each test of a mechanism found, and why those that were not made do not apply."""
    found, reasons = {}, {}
    for test in MECHANISM_TESTS:
        reason = test.applies(model, prompt_config)
        if reason:
            reasons[test.name] = reason
        else:
            found[test.name] = test.measure(model, prompt_config, generator)
    return found, reasons


def _tidy(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """One table; rows that belong to no rival have no family, k and query_row."""
    joined = pd.concat([table for table in tables if len(table)], ignore_index=True)
    joined = joined.astype({"k": "Int64", "query_row": "boolean", "n_prompts": "Int64"})
    columns = ["measure", "condition", *_RIVAL, "value", "ci_low", "ci_high", "n_prompts"]
    return joined.loc[:, columns]


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
    counted = table.loc[~table.condition.isin(LENGTHS)]
    wide = counted.pivot(index=_RIVAL, columns="condition", values="value")
    wide = wide.reindex(pd.MultiIndex.from_frame(ladder.index.loc[:, _RIVAL]))
    logs = wide.clip(FLOOR, CEILING).pipe(np.log10)
    shifts = logs.drop(columns=IN_DISTRIBUTION)
    score = logs[IN_DISTRIBUTION]
    if len(shifts.columns):
        score = (score + shifts.mean(axis=1)) / 2
    algorithm_of = {rival.name: rival.algorithm.name for rival in registry.RIVALS}
    rivals = ladder.index.assign(
        row=np.arange(len(ladder.index)),
        algorithm=ladder.index.family.map(algorithm_of),
        score=score.to_numpy(),
        distance=wide[IN_DISTRIBUTION].to_numpy(),
        worst=wide.max(axis=1).to_numpy(),
        worst_condition=wide.idxmax(axis=1).to_numpy(),
    )
    order = list(algorithm_of)
    rows = []
    for algorithm in registry.compared():
        own = rivals.loc[rivals.algorithm == algorithm]
        per_family = own.groupby("family").score.min()
        near = per_family[per_family <= per_family.min() + _SIMPLER_FAMILY].index
        family = own.loc[own.family == min(near, key=order.index)]
        close = family.loc[family.score <= family.score.min() + _FEWER_STEPS]
        fewest = close.loc[close.k == close.k.min()]
        rows.append(fewest.loc[fewest.score.idxmin()])
    measures = ["score", "distance", "worst", "worst_condition"]
    columns = ["algorithm", *_RIVAL, "parameters", *measures, "row"]
    return pd.DataFrame(rows).loc[:, columns].reset_index(drop=True)


def _pairs(algorithms: pd.Series, distance: torch.Tensor) -> dict[frozenset[str], float]:
    names = list(algorithms)
    return {
        frozenset((names[i], names[j])): float(distance[i, j])
        for i, j in combinations(range(len(names)), 2)
    }
