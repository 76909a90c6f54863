"""The verdict: right on models with a known answer, careful otherwise."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import models
from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    determinant_form,
)
from probe import Verdict, algorithms, identify
from probe.findings import ALGORITHM, Findings, gather
from probe.oracles import Solver, as_prompts, median_slope
from probe.thresholds import THRESHOLDS
from probe.verdict import (
    DESCENT,
    KINDS,
    LEAST_SQUARES,
    NEWTON,
    NORMALIZATION,
    OTHER,
    OTHER_MECHANISM,
    RIDGE,
    UNDECIDED,
    decide,
)

PLAIN = PromptConfig()
WIDE = PromptConfig(n_context=50, x_mean_std=1, x_log_scale=0.7)
TWO = PromptConfig(n_context=50, n_covariates=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def function(algorithm, *values):
    return lambda inputs: algorithm(as_prompts(inputs), *values)


def untrained(**config):
    return LinearAttentionTransformer(ModelConfig(**config), seeded()).double()


class Wrapped(nn.Module):
    """A module that is no LinearAttentionTransformer, around a construction."""

    def __init__(self):
        super().__init__()
        self.inner = closed_form(20)

    def forward(self, inputs):
        return self.inner(inputs)


KNOWN = {
    "construction": (lambda: closed_form(20, scale=10), PLAIN, NORMALIZATION),
    "construction, wide": (lambda: closed_form(50, exclude_query=True), WIDE, NORMALIZATION),
    "gradient step, then construction": (
        lambda: closed_form(50, exclude_query=True, gradient_steps=[0.08]),
        WIDE,
        NORMALIZATION,
    ),
    "construction, p=2": (lambda: closed_form(50, 2), TWO, "elimination (x1, x2)"),
    "GD(2)": (lambda: models.gradient_descent(2, 0.6), PLAIN, "gradient descent (2)"),
    "GD(5), query row": (
        lambda: models.gradient_descent(5, 0.2, 50, exclude_query=False),
        WIDE,
        "gradient descent (5)",
    ),
    "GD++(3)": (
        lambda: models.gradient_descent(3, 0.5, gamma=0.15),
        PLAIN,
        "gradient descent (3)",
    ),
    "Newton(3)": (lambda: function(algorithms.newton, 3), PLAIN, "Newton (3)"),
    "ridge": (lambda: function(algorithms.ridge, 0.3), PLAIN, "ridge (0.3)"),
    "ridge in weights": (lambda: closed_form(20, ridge=0.2), PLAIN, "ridge (0.2)"),
    "least squares": (lambda: function(algorithms.least_squares), TWO, OTHER_MECHANISM),
    "solver beside blocks": (
        lambda: Solver(ModelConfig(), seeded()).double(),
        PLAIN,
        OTHER_MECHANISM,
    ),
    "module without known sites": (Wrapped, PLAIN, OTHER_MECHANISM),
    "untrained": (lambda: untrained(), PLAIN, OTHER),
    "context mean": (lambda: function(algorithms.context_mean), PLAIN, OTHER),
    "half of least squares": (lambda: lambda x: as_prompts(x).least_squares / 2, PLAIN, OTHER),
}


# Judged by `identify`; for the others what it quotes beside the decision is left out, to save time.
IN_FULL = ("construction", "Newton(3)", "least squares", "untrained")


@pytest.fixture(scope="module")
def verdicts():
    made = {}

    def judge(name):
        if name not in made:
            build, prompts, _ = KNOWN[name]
            if name in IN_FULL:
                made[name] = identify(build(), prompts, n_prompts=128)
            else:
                measured = gather(build(), prompts, 128, seeded(), thorough=False)
                made[name] = Verdict(decide(measured, THRESHOLDS), measured)
        return made[name]

    return judge


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(verdicts, name):
    verdict = verdicts(name)
    assert isinstance(verdict, Verdict)
    assert verdict.label == KNOWN[name][2], verdict.words
    assert verdict.kind in KINDS


@pytest.mark.parametrize("name", ["construction", "least squares", "untrained"])
def test_verdict_is_json_and_words(verdicts, name):
    verdict = verdicts(name)
    text = json.dumps(verdict.to_dict(), allow_nan=False)
    assert json.loads(text)["label"] == verdict.label
    assert verdict.words.startswith(f"Verdict: {verdict.label}.")


def test_evidence_is_one_tidy_table(verdicts):
    evidence = verdicts("construction").evidence
    columns = {"measure", "condition", "family", "k", "query_row", "value", "ci_low", "ci_high"}
    assert columns <= set(evidence.columns)
    measures = set(evidence.measure)
    assert {"distance", "line distance", "sensitivity cosine", "division R²"} <= measures
    assert "probe R² of x_var" in measures
    assert sum(measure.startswith("defect") for measure in measures) == 4
    assert set(evidence.family.dropna()) >= set(ALGORITHM)


def test_query_row_is_named_where_it_is_a_sample(verdicts):
    assert "query row" in verdicts("construction").decision.reasons[0]
    assert "query row" not in verdicts("construction, wide").decision.reasons[0]


def test_callables_have_no_mechanism(verdicts):
    verdict = verdicts("least squares")
    assert verdict.findings.division_r2 is None
    assert "not applicable" in verdict.words


def test_robust_regression_is_not_taken_for_least_squares():
    """Theil-Sen comes within a few percent of it, and its mechanism cannot be seen."""
    found = gather(function(median_slope), PLAIN, 128, seeded(), thorough=False)
    assert decide(found, THRESHOLDS).kind in (OTHER, UNDECIDED)


def test_same_seed_same_verdict(verdicts):
    again = identify(function(algorithms.newton, 3), PLAIN, n_prompts=128)
    pd.testing.assert_frame_equal(again.evidence, verdicts("Newton(3)").evidence)


# Long contexts without noise and with x of variance 1: G is nearly I, so that a few steps of
# gradient descent are least squares. In distribution alone nothing can tell them apart.
WHITENED = PromptConfig(n_context=2000, noise_std=0)


def test_rivals_that_coincide_cannot_be_told_apart():
    model = function(algorithms.least_squares)
    verdict = identify(model, WHITENED, n_prompts=64, only_conditions=())
    assert verdict.label == UNDECIDED
    assert "cannot be told apart" in verdict.words


def test_shifts_tell_them_apart_and_the_words_say_so():
    verdict = identify(function(algorithms.least_squares), WHITENED, n_prompts=64)
    assert verdict.label == OTHER_MECHANISM
    assert "cannot be told apart from it in distribution" in verdict.words


# ---- bad inputs -------------------------------------------------------------------------

BAD = {
    "nan": (lambda x: x[:, 0, 2] * torch.nan, {}, "NaN"),
    "constant": (lambda x: torch.ones(len(x)), {}, "constant"),
    "stochastic": (lambda x: x[:, 0, 2] + torch.rand(len(x)), {}, "second call"),
    "wrong shape": (lambda x: x[:, :, 2], {}, "expected"),
    "other context length": (untrained(n_context=7), {}, "inputs have shape"),
    "other covariates": (closed_form(20, 2), {}, "inputs have shape"),
    "other device": (untrained().to("meta"), {}, "on meta"),
    "too few prompts": (closed_form(20), {"n_prompts": 8}, "n_prompts=8"),
    "unknown condition": (
        function(algorithms.least_squares),
        {"only_conditions": ["tripled"]},
        "unknown condition.*tripled",
    ),
}


@pytest.mark.parametrize(("model", "options", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(model, options, message):
    with pytest.raises(ValueError, match=message):
        identify(model, PLAIN, **{"n_prompts": 64, **options})


# ---- the rule itself --------------------------------------------------------------------


def findings(scores, distance=1e-3, division=None, apart=1.0, sites=True, residual=None):
    """Findings with these scores by algorithm; others far away."""
    algorithms_ = list(dict.fromkeys(ALGORITHM.values()))
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
    r2, slope = division or (None, None)
    return Findings(
        best=best,
        apart=pairs,
        apart_here=pairs,
        division_r2=r2,
        division_slope=slope,
        division_layer="layer 1",
        **dict(zip(RESIDUAL, residual or (None, None, None), strict=True)),
        residual_layer="layer 1",
        not_applicable="not applicable",
        sites=sites,
        procedure=None,
        evidence=pd.DataFrame(),
    )


RESIDUAL = ("residual_r2", "residual_slope", "residual_share")
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
    scores=st.fixed_dictionaries(
        {name: st.floats(-12, 2) for name in dict.fromkeys(ALGORITHM.values())}
    ),
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
    without = dataclasses.replace(case, division_r2=None, division_slope=None)
    assert decide(without, THRESHOLDS).kind != NORMALIZATION


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (closed_form(40, 2, order=(2, 1)), "elimination (x2, x1)"),
        (closed_form(40, 2), "elimination (x1, x2)"),
        (determinant_form(40), "closed form by determinant"),
    ],
    ids=["x2 first", "x1 first", "determinant"],
)
def test_several_covariates_are_named_by_their_procedure(model, label):
    prompts = PromptConfig(n_context=40, n_covariates=2, x_log_scale=0.7, x_mean_std=1)
    verdict = identify(model, prompts, n_prompts=128, only_conditions=[])
    assert verdict.kind == "closed form by normalization"
    assert verdict.label == verdict.to_dict()["procedure"] == label
    assert label in verdict.words
