"""The verdict: right on models with a known answer, careful otherwise."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

import models
from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    Prompts,
    closed_form,
    determinant_form,
)
from probe import Verdict, identify
from probe.rivals import algorithms, least_squares, registry
from probe.rivals.known import as_function
from probe.rivals.registry import RIVALS
from probe.rivals.rival import Algorithm, Rival
from probe.verdict.decision import decide
from probe.verdict.findings import gather
from probe.verdict.kinds import KINDS, NORMALIZATION, OTHER, OTHER_MECHANISM, UNDECIDED
from probe.verdict.oracles import Solver, median_slope
from probe.verdict.thresholds import THRESHOLDS

PLAIN = PromptConfig()
WIDE = PromptConfig(n_context=50, x_mean_std=1, x_log_scale=0.7)
TWO = PromptConfig(n_context=50, n_covariates=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def function(algorithm, *values):
    return as_function(algorithm, *values)()


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
    "half of least squares": (
        lambda: function(lambda p: p.least_squares / 2),
        PLAIN,
        OTHER,
    ),
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
    assert set(evidence.family.dropna()) >= {rival.name for rival in RIVALS}


def test_query_row_is_named_where_it_is_a_sample(verdicts):
    assert "query row" in verdicts("construction").decision.reasons[0]
    assert "query row" not in verdicts("construction, wide").decision.reasons[0]


def test_callables_have_no_mechanism(verdicts):
    verdict = verdicts("least squares")
    assert not verdict.findings.tests
    assert verdict.to_dict()["division_r2"] is None
    assert "not applicable" in verdict.words


def test_robust_regression_is_not_taken_for_least_squares():
    """Theil-Sen comes within a few percent of it, and its mechanism cannot be seen."""
    found = gather(function(median_slope), PLAIN, 128, seeded(), thorough=False)
    assert decide(found, THRESHOLDS).kind in (OTHER, UNDECIDED)


def test_same_seed_same_verdict(verdicts):
    again = identify(function(algorithms.newton, 3), PLAIN, n_prompts=128)
    pd.testing.assert_frame_equal(again.evidence, verdicts("Newton(3)").evidence)


def test_a_model_that_edits_its_inputs_gets_the_same_verdict():
    def editing(inputs):
        predictions = algorithms.newton(Prompts.from_inputs(inputs), 3)
        inputs.zero_()
        return predictions

    plain, edited = (
        identify(model, PLAIN, n_prompts=64, only_conditions=())
        for model in (function(algorithms.newton, 3), editing)
    )
    assert edited.to_dict() == plain.to_dict()
    pd.testing.assert_frame_equal(edited.evidence, plain.evidence)


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


# ---- a new rival ------------------------------------------------------------------------


def _shrunk(problem, parameters, steps):
    """Least squares that is approached by half of what is left."""
    for k in range(1, int(steps.max()) + 1):
        yield (1 - 0.5**k) * problem.least_squares[None]


@pytest.fixture
def new_rival(monkeypatch):
    algorithm = Algorithm("halving", limit=least_squares.ALGORITHM, names="steps")
    rival = Rival("halving the rest", algorithm, _shrunk, tuple(range(1, 9)))
    monkeypatch.setattr(registry, "RIVALS", (*registry.RIVALS, rival))
    return rival


def test_a_new_rival_is_named_by_its_algorithm(new_rival):
    verdict = identify(function(lambda p: 0.875 * p.least_squares), PLAIN, n_prompts=64)
    assert verdict.label == "halving (3)", verdict.words
    assert "Halving the rest with 3 steps leaves" in verdict.words
    assert new_rival.name in set(verdict.evidence.family.dropna())


def test_a_new_rival_takes_nothing_from_the_others(new_rival):
    verdict = identify(function(algorithms.newton, 3), PLAIN, n_prompts=64)
    assert verdict.label == "Newton (3)"


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
