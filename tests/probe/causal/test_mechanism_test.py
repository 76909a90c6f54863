"""The tests of a mechanism give what their own functions give, from one generator."""

import pandas as pd
import pytest
import torch

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    gradient_descent,
)
from probe import division_test, pivot_label, pivot_test, residual_division_test
from probe.causal.mechanism_test import (
    DIVISION,
    EVIDENCE_COLUMNS,
    MECHANISM_TESTS,
    RESIDUAL_DIVISION,
    SHARE,
    SLOPE,
)
from probe.stats.regression import FEWEST_SAMPLES

ONE = PromptConfig(n_context=10, x_log_scale=0.7, x_mean_std=1)
TWO = PromptConfig(n_context=10, n_covariates=2, x_log_scale=0.7, x_correlation=0.5)
BY_NAME = {test.name: test for test in MECHANISM_TESTS}


def applicable(model, task):
    return [name for name, test in BY_NAME.items() if not test.applies(model, task)]


def test_which_test_applies_to_what():
    post = LinearAttentionTransformer(ModelConfig(n_context=10, normalization="post"))
    assert applicable(closed_form(10), ONE) == ["division", "residual division"]
    assert applicable(closed_form(10, 2), TWO) == ["pivots"]
    assert applicable(post, ONE) == ["division"]
    assert applicable(gradient_descent(1, 0.5, n_context=10), ONE) == []
    assert applicable(lambda inputs: inputs[:, 0, 0], ONE) == []
    reasons = {test.applies(lambda inputs: 0, ONE) for test in MECHANISM_TESTS}
    assert reasons == {"not applicable: a function has no known sites"}


def test_a_task_without_variances_is_told_so():
    class Counting:
        kind, n_context, n_covariates, statistics = "counting", 10, 1, ()

    reasons = [test.applies(closed_form(10), Counting()) for test in MECHANISM_TESTS]
    assert all("task 'counting': its prompts have no x_var and xy_cov" in why for why in reasons)


def test_numbers_and_draws_are_those_of_the_tests_themselves():
    model = closed_form(10, scale=10, gradient_steps=(0.1,))
    generator, same = (torch.Generator().manual_seed(4) for _ in range(2))
    found = [BY_NAME[name].measure(model, ONE, generator) for name in applicable(model, ONE)]
    tables = [
        test(model, ONE, n_prompts=2000, generator=same)
        for test in (division_test, residual_division_test)
    ]
    for result, table in zip(found, tables, strict=True):
        best = table.loc[table.r2.idxmax()]
        assert (result.value, result.slope) == (best.r2, best.slope)
        assert (result.ci_low, result.ci_high) == (best.ci_low, best.ci_high)
        assert result.where == f"layer {int(best.layer)}"
        assert result.procedure is None
        assert list(result.table.columns) == EVIDENCE_COLUMNS
    assert found[0].share is None
    assert found[1].share == tables[1].share[tables[1].r2.idxmax()]
    evidence = pd.concat([result.table for result in found])
    for measure, table, column in (
        (DIVISION, tables[0], "r2"),
        (SLOPE, tables[0], "slope"),
        (RESIDUAL_DIVISION, tables[1], "r2"),
        (SHARE, tables[1], "share"),
    ):
        assert list(evidence[evidence.measure == measure].value) == list(table[column])
    assert evidence[evidence.measure == SHARE].ci_low.isna().all()


def test_pivots_report_the_best_swap_of_a_layer_and_the_procedure():
    model = closed_form(10, 2, scale=10)
    found = BY_NAME["pivots"].measure(model, TWO, torch.Generator().manual_seed(4))
    table = pivot_test(model, TWO, n_prompts=2000, generator=torch.Generator().manual_seed(4))
    assert found.procedure == pivot_label(table) is not None
    assert found.value == table.swap_r2.max()
    by_layer = found.table[found.table.measure == DIVISION].value
    assert list(by_layer) == list(table.groupby("layer").swap_r2.max())


def test_a_single_line_through_two_pairs_is_no_evidence():
    # Any line fits two points.
    with pytest.raises(ValueError, match=f"n_prompts=2 is too few.* at least {FEWEST_SAMPLES}"):
        division_test(closed_form(10), ONE, n_prompts=2)
