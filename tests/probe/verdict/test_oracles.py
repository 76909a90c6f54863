"""Oracles: enough of them, reproducible, and each what it claims to be."""

from collections import Counter

import pytest
import torch

from models import LinearAttentionTransformer, closed_form, sample_prompts
from probe.rivals import algorithms
from probe.rivals.predictor import Predictor
from probe.verdict.kinds import (
    DESCENT,
    KINDS,
    NEWTON,
    NORMALIZATION,
    OTHER,
    OTHER_MECHANISM,
    RIDGE,
    UNDECIDED,
)
from probe.verdict.oracles import Solver, oracles

ORACLES = oracles(0)


def prompts_of(oracle, batch=64, seed=0):
    return sample_prompts(oracle.prompts, batch, torch.Generator().manual_seed(seed))


def normalised_error(oracle):
    prompts = prompts_of(oracle, 256)
    error = Predictor(oracle.build())(prompts) - prompts.least_squares
    return (error.square().mean() / prompts.least_squares.var()).item()


def first(group):
    return next(oracle for oracle in ORACLES if oracle.group == group)


def test_at_least_300_of_every_kind_with_unique_names():
    assert len(ORACLES) >= 300
    assert len({oracle.name for oracle in ORACLES}) == len(ORACLES)
    assert set(Counter(oracle.kind for oracle in ORACLES)) == set(KINDS) - {UNDECIDED}
    constructions = [oracle for oracle in ORACLES if oracle.kind == NORMALIZATION]
    assert {oracle.prompts.n_covariates for oracle in constructions} == {1, 2, 3}
    assert sum("noisy" in oracle.group for oracle in constructions) >= 20
    # Calibration takes every other one: each half has every kind.
    for half in (ORACLES[::2], ORACLES[1::2]):
        assert {oracle.kind for oracle in half} == {oracle.kind for oracle in ORACLES}


def test_same_seed_same_oracles():
    again = oracles(0)
    for index in (0, 85, 165, 200, 275):
        prompts = prompts_of(ORACLES[index])
        expected = Predictor(ORACLES[index].build())(prompts)
        torch.testing.assert_close(
            Predictor(again[index].build())(prompts), expected, rtol=0, atol=0
        )
    other = [oracle.prompts for oracle in oracles(1)]
    assert other != [oracle.prompts for oracle in ORACLES]


@pytest.mark.parametrize("group", sorted({oracle.group for oracle in ORACLES}))
def test_one_of_each_group_can_be_judged(group):
    if group == "trained on shuffled targets":
        pytest.skip("trained in a test of its own")
    oracle = first(group)
    Predictor(oracle.build()).checked(prompts_of(oracle))


def test_random_symmetries_leave_the_construction_exact():
    plain = [
        oracle
        for oracle in ORACLES
        if oracle.group == "construction" and oracle.prompts.n_context >= 50
    ]
    for oracle in plain[:4]:
        model = oracle.build()
        assert normalised_error(oracle) < 0.01
        reference = closed_form(oracle.prompts.n_context, oracle.prompts.n_covariates)
        assert not torch.allclose(model.blocks[0].attn.W_V, reference.blocks[0].attn.W_V, rtol=1e-3)


def test_noise_moves_the_construction_a_little():
    noisy = [oracle for oracle in ORACLES if oracle.group == "construction, noisy"]
    errors = [normalised_error(oracle) for oracle in noisy[:5]]
    assert all(1e-6 < error < 0.2 for error in errors)


def test_models_of_gradient_descent_run_the_number_of_steps_in_their_name():
    for oracle in (first("GD model"), first("GD++ model")):
        assert oracle.kind == DESCENT
        assert oracle.build().cfg.n_layers == oracle.k


def test_functions_are_the_rivals():
    oracle = first("Newton function")
    assert oracle.kind == NEWTON
    prompts = prompts_of(oracle)
    expected = algorithms.newton(prompts, oracle.k)
    torch.testing.assert_close(oracle.build()(prompts.inputs), expected)
    assert first("ridge construction").kind == first("ridge function").kind == RIDGE


def test_solver_has_sites_but_does_not_use_them():
    oracle = first("solver beside blocks")
    model = oracle.build()
    assert isinstance(model, Solver)
    assert isinstance(model, LinearAttentionTransformer)
    assert oracle.kind == OTHER_MECHANISM
    prompts = prompts_of(oracle)
    predictions, cache = model.run_with_cache(prompts.inputs)
    torch.testing.assert_close(predictions, prompts.least_squares)
    assert "blocks.0.attn.hook_state" in cache


def test_training_on_shuffled_targets_learns_no_regression():
    oracle = first("trained on shuffled targets")
    assert oracle.kind == OTHER
    assert normalised_error(oracle) > 0.5
