"""The rule that turns findings into a verdict, and its words."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.causal.mechanism_test import TestResult
from probe.rivals.registry import compared
from probe.verdict.decision import decide
from probe.verdict.findings import Findings
from probe.verdict.kinds import (
    DESCENT,
    KINDS,
    LEAST_SQUARES,
    NEWTON,
    NORMALIZATION,
    OTHER,
    OTHER_MECHANISM,
    RIDGE,
    UNDECIDED,
)
from probe.verdict.thresholds import THRESHOLDS


def findings(scores, distance=1e-3, division=None, apart=1.0, sites=True, residual=None):
    """Findings with these scores by algorithm; others far away."""
    algorithms_ = list(compared())
    best = pd.DataFrame(
        {
            "algorithm": algorithms_,
            "family": algorithms_,
            "k": 3,
            "query_row": False,
            "parameters": [{"lambda": 0.1}] * len(algorithms_),
            "score": [scores.get(name, 0.0) for name in algorithms_],
            "distance": distance,
            "worst": distance,
            "worst_condition": "in distribution",
        }
    )
    pairs = {frozenset((a, b)): apart for a in algorithms_ for b in algorithms_ if a != b}
    tests = {
        name: TestResult(name, pd.DataFrame(), r2, slope, r2, r2, "layer 1", *share)
        for name, measured in (("division", division), ("residual division", residual))
        if measured is not None
        for r2, slope, *share in [measured]
    }
    return Findings(
        best=best,
        apart=pairs,
        apart_here=pairs,
        tests=tests,
        not_applicable={name: "not applicable" for name in {"division"} - set(tests)},
        sites=sites,
        evidence=pd.DataFrame(),
    )


PARTLY, IN_FORCE = (0.7, 0.2), (0.95, 0.9)
RULE = {
    "closed form": (findings({LEAST_SQUARES: -3}, division=IN_FORCE), NORMALIZATION),
    "no division": (findings({LEAST_SQUARES: -3}, division=(0.01, 0.0)), OTHER_MECHANISM),
    "some division": (
        findings({LEAST_SQUARES: -3}, division=(np.mean(THRESHOLDS["division_r2"]), 0.9)),
        UNDECIDED,
    ),
    "division of the wrong size": (
        findings({LEAST_SQUARES: -3}, division=(0.95, 0.01)),
        UNDECIDED,
    ),
    "division of residuals": (
        findings({LEAST_SQUARES: -3}, division=PARTLY, residual=(0.95, 0.9, 0.8)),
        NORMALIZATION,
    ),
    "division of little that is left": (
        findings({LEAST_SQUARES: -3}, division=PARTLY, residual=(0.95, 0.9, 0.1)),
        UNDECIDED,
    ),
    "residuals of the wrong size": (
        findings({LEAST_SQUARES: -3}, division=(0.01, 0.0), residual=(0.95, 0.01, 0.8)),
        UNDECIDED,
    ),
    "no division of either": (
        findings({LEAST_SQUARES: -3}, division=(0.01, 0.0), residual=(0.01, 0.9, 0.8)),
        OTHER_MECHANISM,
    ),
    "limits may come close": (
        findings({LEAST_SQUARES: -3, RIDGE: -3.05, NEWTON: -3.0}, division=IN_FORCE),
        NORMALIZATION,
    ),
    "a limit far ahead is named": (findings({LEAST_SQUARES: -3, RIDGE: -6}), RIDGE),
    "descent as close as least squares": (
        findings({LEAST_SQUARES: -3, DESCENT: -3.01}, division=IN_FORCE),
        UNDECIDED,
    ),
    "as close, but only seen from outside": (
        findings({LEAST_SQUARES: THRESHOLDS["alone"] + 0.1}, sites=False),
        UNDECIDED,
    ),
    "closer, seen from outside": (
        findings({LEAST_SQUARES: THRESHOLDS["alone"] - 0.1}, sites=False),
        OTHER_MECHANISM,
    ),
    "two as close": (findings({NEWTON: -5, DESCENT: -5.01}), UNDECIDED),
    "nothing near": (findings({LEAST_SQUARES: -0.1}, distance=0.9), OTHER),
    "nothing near, though layer norm divides": (
        findings({LEAST_SQUARES: -1}, distance=0.1, division=IN_FORCE),
        UNDECIDED,
    ),
    "mean as good as anything": (findings({"context mean": -5, DESCENT: -5}), OTHER),
}


@pytest.mark.parametrize(("case", "kind"), RULE.values(), ids=RULE)
def test_rule(case, kind):
    assert decide(case, THRESHOLDS).kind == kind


def test_ridge_without_a_penalty_is_no_objection_to_least_squares():
    converged = decide(findings({LEAST_SQUARES: -3}, division=IN_FORCE, apart=1e-9), THRESHOLDS)
    named = [text.split(" ")[0] for text in converged.objections]
    assert named == ["Newton", "Gradient"]


@settings(max_examples=200, deadline=None)
@given(
    scores=st.fixed_dictionaries({name: st.floats(-12, 2) for name in compared()}),
    distance=st.floats(1e-12, 10),
    r2=st.floats(0, 1),
    slope=st.floats(-2, 2),
    residual=st.floats(0, 1),
)
def test_normalization_needs_least_squares_and_division(scores, distance, r2, slope, residual):
    case = findings(scores, distance, (r2, slope), residual=(residual, slope, 1.0))
    decision = decide(case, THRESHOLDS)
    assert decision.kind in KINDS
    if decision.kind == NORMALIZATION:
        assert decision.named.algorithm == LEAST_SQUARES
        assert scores[LEAST_SQUARES] <= THRESHOLDS["score"][0]
        assert r2 >= THRESHOLDS["division_r2"][1] or residual >= THRESHOLDS["residual_r2"][1]
        assert scores[DESCENT] >= scores[LEAST_SQUARES] + THRESHOLDS["margin"]
    without = dataclasses.replace(case, tests={}, not_applicable={"division": "not applicable"})
    assert decide(without, THRESHOLDS).kind != NORMALIZATION


NEAREST = {
    RIDGE: ("Ridge with λ = 0.1", "as λ → 0"),
    DESCENT: ("Gradient descent with 3 steps", "as k → ∞"),
    NEWTON: ("Newton with 3 steps", "as k → ∞"),
}


@pytest.mark.parametrize(("name", "words"), NEAREST.items(), ids=NEAREST)
def test_who_comes_nearest_is_said_of_the_nearest(name, words):
    case = findings({LEAST_SQUARES: -1.0, name: -1.2}, distance=0.1, division=(0.01, 0.0))
    decision = decide(case, THRESHOLDS)
    assert (decision.kind, decision.named.algorithm) == (OTHER, LEAST_SQUARES)
    first, second, _ = decision.reasons
    assert first.startswith(f"{words[0]} comes nearest in score (-1.20); least squares is named")
    assert f"which {name} approaches {words[1]}" in first
    assert f"ahead by {THRESHOLDS['lead']:g} decades, and is by 0.20" in first
    assert second.startswith("Least squares leaves 1.0e-01")


def test_least_squares_comes_nearest_where_it_does():
    decision = decide(findings({LEAST_SQUARES: -1.2, RIDGE: -1.0}, distance=0.1), THRESHOLDS)
    assert decision.reasons[0].startswith("Least squares comes nearest and leaves 1.0e-01")
