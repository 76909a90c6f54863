"""Tests of a mechanism: is the division by layer norm what computes the closed form?

For one covariate this is `probe.division_test` and, with the residuals that the stream holds,
`probe.residual_division_test`. For several the closed form divides by several pivots;
`probe.pivot_test` exchanges each between prompts, and the pivot that explains a layer best counts.

Another mechanism is another object that applies to some models and tasks and measures; whoever
asks about mechanisms goes through `MECHANISM_TESTS`, in order, with one generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd
import torch

from models.architecture.sites import Studied
from models.tasks.task import Task
from probe.causal.division import (
    division_test,
    require_one_quotient,
    require_residuals,
    residual_division_test,
)
from probe.causal.pivots import pivot_label, pivot_test, require_pivots

# Measures of the evidence: of the layer norm's division, by V or by the best pivot of a layer,
DIVISION, SLOPE = "division R²", "division slope"
# and with the residuals that the stream holds, and how much of the fit is left to divide.
RESIDUAL_DIVISION, RESIDUAL_SLOPE = "residual division R²", "residual division slope"
SHARE = "residual division share"
EVIDENCE_COLUMNS = ["measure", "condition", "value", "ci_low", "ci_high", "n_prompts"]
_PAIRS = 2000


@dataclass(frozen=True)
class TestResult:
    """What a test found at the layer where it found most.

    Attributes:
        name: of the test.
        table: evidence, layer by layer: measure, condition (the layer in words), value, ci_low,
            ci_high (of R²), n_prompts.
        value: R² at the best layer.
        slope: there; 1 where the mechanism is in force to the full.
        ci_low: lower bound of the 95 % interval of `value`.
        ci_high: upper bound.
        where: the best layer, in words.
        share: share of the fit that is left to that layer, for a test that measures it.
        procedure: what all layers together spell out, such as "elimination (x1, x2)".
    """

    __test__ = False  # for pytest

    name: str
    table: pd.DataFrame
    value: float
    slope: float
    ci_low: float
    ci_high: float
    where: str
    share: float | None = None
    procedure: str | None = None


class MechanismTest(Protocol):
    """A test of one mechanism inside a model."""

    @property
    def name(self) -> str:
        """In words; unique in `MECHANISM_TESTS`."""
        ...

    def applies(self, model: Any, task: Task) -> str:
        """Why the test cannot be made on a model and task; "" if it can."""
        ...

    def measure(self, model: Studied, task: Task, generator: torch.Generator) -> TestResult:
        """Make the test, with prompts and resamples from `generator`."""
        ...


@dataclass(frozen=True)
class _LayerTest:
    """A test that gives a row per layer.

    Attributes:
        name: of the test.
        require: refuses models and tasks that it does not apply to.
        by_layer: table with columns layer, r2, slope, ci_low, ci_high, and the procedure.
        measures: of the evidence, and the column each has in that table.
    """

    name: str
    require: Callable[[Any, Task], None]
    by_layer: Callable[[Studied, Task, torch.Generator], tuple[pd.DataFrame, str | None]]
    measures: dict[str, str]

    def applies(self, model: Any, task: Task) -> str:
        """Why the test cannot be made on a model and task; "" if it can."""
        if not isinstance(model, Studied):
            return f"not applicable: a {type(model).__name__} has no known sites"
        try:
            self.require(model, task)
        except ValueError as error:
            return str(error)
        return ""

    def measure(self, model: Studied, task: Task, generator: torch.Generator) -> TestResult:
        """Make the test; the layer with the largest R² counts."""
        table, procedure = self.by_layer(model, task, generator)
        best = table.loc[table.r2.idxmax()]
        return TestResult(
            name=self.name,
            table=self._evidence(table),
            value=float(best.r2),
            slope=float(best.slope),
            ci_low=float(best.ci_low),
            ci_high=float(best.ci_high),
            where=_in_words(best),
            share=float(best.share) if "share" in table else None,
            procedure=procedure,
        )

    def _evidence(self, table: pd.DataFrame) -> pd.DataFrame:
        rows = []
        for _, row in table.iterrows():
            layer = {"condition": _in_words(row), "n_prompts": _PAIRS}
            for measure, column in self.measures.items():
                interval = {"ci_low": row.ci_low, "ci_high": row.ci_high} if column == "r2" else {}
                rows.append({"measure": measure, "value": row[column], **interval, **layer})
        return pd.DataFrame(rows).reindex(columns=EVIDENCE_COLUMNS)


def _in_words(row: pd.Series) -> str:
    return f"layer {int(row.layer)}"


def _division(model: Studied, task: Task, generator: torch.Generator) -> tuple[pd.DataFrame, None]:
    return division_test(model, task, n_prompts=_PAIRS, generator=generator), None


def _residual(model: Studied, task: Task, generator: torch.Generator) -> tuple[pd.DataFrame, None]:
    return residual_division_test(model, task, n_prompts=_PAIRS, generator=generator), None


def _pivots(
    model: Studied, task: Task, generator: torch.Generator
) -> tuple[pd.DataFrame, str | None]:
    """What the exchange of the best pivot of each layer does, and what the pivots spell out."""
    table = pivot_test(model, task, n_prompts=_PAIRS, generator=generator)
    procedure = pivot_label(table)
    swaps = {"swap_r2": "r2", "swap_slope": "slope"}
    swaps |= {"swap_r2_low": "ci_low", "swap_r2_high": "ci_high"}
    table = table.loc[:, ["layer", *swaps]].rename(columns=swaps)
    return table.loc[table.groupby("layer").r2.idxmax()], procedure


_BY_V = {DIVISION: "r2", SLOPE: "slope"}
_BY_HELD_V = {RESIDUAL_DIVISION: "r2", RESIDUAL_SLOPE: "slope", SHARE: "share"}
# In the order in which they draw from the generator.
MECHANISM_TESTS: tuple[MechanismTest, ...] = (
    _LayerTest("division", require_one_quotient, _division, _BY_V),
    _LayerTest("residual division", require_residuals, _residual, _BY_HELD_V),
    _LayerTest("pivots", require_pivots, _pivots, _BY_V),
)
