"""The pivot test on models whose pivots are known, and the exchanged prediction by hand."""

import itertools

import pandas as pd
import pytest
import torch

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    determinant_form,
    fraction_free_form,
    gradient_descent,
    sample_prompts,
)
from probe.causal.pivots import Pivot, candidates, pivot_label, pivot_test

ORDERS = [order for p in (2, 3) for order in itertools.permutations(range(1, p + 1))]


def distribution(p, n_context=40):
    return PromptConfig(
        n_context=n_context, n_covariates=p, x_log_scale=0.7, x_mean_std=1.0, x_correlation=0.8
    )


def run(model, p, **options):
    options = {"n_prompts": 600, **options}
    return pivot_test(model, distribution(p, model.cfg.n_context), **options)


# ---- candidates and the exchanged prediction --------------------------------------------


def test_candidates_are_all_conditional_variances_and_minors():
    assert [pivot.name for pivot in candidates(2)] == ["V_1", "V_2", "V_1|2", "V_2|1", "det_12"]
    names = [pivot.name for pivot in candidates(3)]
    assert len(names) == len(set(names)) == 12 + 4
    assert {"V_2|13", "V_3|1", "det_23", "det_123"} <= set(names)


def test_values_are_residual_variances_and_determinants(generator):
    prompts = sample_prompts(distribution(3), 20, generator)
    x = prompts.x - prompts.x_mean[:, None]
    rest = x[..., [0, 2]]
    residual = x[..., 1:2] - rest @ torch.linalg.lstsq(rest, x[..., 1:2]).solution
    torch.testing.assert_close(
        Pivot((2,), (1, 3)).value(prompts.x_cov), residual.square().mean((1, 2))
    )
    expected = prompts.x_cov[:, 0, 0] * prompts.x_cov[:, 2, 2] - prompts.x_cov[:, 0, 2] ** 2
    torch.testing.assert_close(Pivot((1, 3)).value(prompts.x_cov), expected)


@pytest.mark.parametrize("p", [2, 3])
def test_exchanging_a_pivot_for_itself_is_least_squares(p, generator):
    prompts = sample_prompts(distribution(p), 50, generator)
    for pivot in candidates(p):
        prediction = pivot.exchanged(prompts, torch.ones(50, dtype=torch.float64))
        torch.testing.assert_close(prediction, prompts.least_squares, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("pivot", candidates(3), ids=lambda pivot: pivot.name)
def test_exchanged_prediction_token_by_token(pivot, generator):
    prompts = sample_prompts(distribution(3), 20, generator)
    ratio = torch.rand(20, generator=generator, dtype=torch.float64) + 0.5
    # Columns x_1, x_2, x_3, y of the context, and of the query, where y holds what is left of
    # -prediction.
    rows = torch.cat([prompts.x, prompts.y[..., None]], dim=2)
    mean = rows.mean(1)
    rows = rows - mean[:, None]
    query = torch.cat([prompts.query, torch.zeros(20, 1)], dim=1) - mean
    rest = [j for j in (1, 2, 3) if j not in pivot.done + pivot.block]
    steps = [(pivot.done, torch.ones(20)), (pivot.block, ratio), (tuple(rest), torch.ones(20))]
    for covariates, multiplier in steps:
        if not covariates:
            continue
        index = [j - 1 for j in covariates]
        later = [j for j in range(4) if j + 1 not in covariates]
        solution = torch.linalg.lstsq(rows[..., index], rows[..., later]).solution
        solution = multiplier[:, None, None] * solution
        fitted = (query[:, None, index] @ solution)[:, 0]
        rows[..., later] = rows[..., later] - rows[..., index] @ solution
        query[:, later] = query[:, later] - fitted
        # Covariates that are done take no part in the rest.
        rows[..., index] = 0
    torch.testing.assert_close(pivot.exchanged(prompts, ratio), -query[:, 3])


# ---- positive controls ------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_order_of_elimination_is_recovered(order):
    p = len(order)
    table = run(closed_form(40, p, scale=1e3, exclude_query=True, order=order), p)
    assert pivot_label(table) == f"elimination ({', '.join(f'x{j}' for j in order)})"
    best = table[table.best].set_index("layer")
    assert list(best.index) == list(range(1, p + 1))
    assert (best.r2 > 0.999).all()
    assert (best.slope - 1).abs().max() < 0.01
    assert (best[["swap_r2", "step_r2"]] > 0.99).all(axis=None)
    assert (best[["swap_slope", "step_slope"]] - 1).abs().max(axis=None) < 0.05
    assert table.shuffled_r2.max() < 0.05


def test_the_swap_tells_apart_what_raw_r2_does_not():
    table = run(closed_form(40, 2, scale=1e3, exclude_query=True, order=(2, 1)), 2)
    layer = table[table.layer == 1].set_index("candidate")
    assert layer.r2["V_2|1"] > 0.8
    assert layer.margin_high["V_2|1"] < 0
    assert layer.swap_r2["V_2|1"] < 0.5 < 0.99 < layer.swap_r2["V_2"]


def test_determinant_is_recovered():
    table = run(determinant_form(40, scale=1e3, exclude_query=True), 2)
    assert pivot_label(table) == "closed form by determinant"
    assert list(table[table.best].layer) == [2]
    assert (table[table.best][["r2", "swap_r2", "step_r2"]] > 0.99).all(axis=None)


def test_fraction_free_elimination_counts_as_determinant_but_for_its_slope():
    # It divides by V_1 det_12, which is no candidate: det_12 is nearest, and not proportional.
    table = run(fraction_free_form(40, scale=1e4, exclude_query=True), 2)
    assert pivot_label(table) == "closed form by determinant"
    best = table[table.best].iloc[0]
    assert (best.layer, best.candidate) == (2, "det_12")
    assert 0.8 < best.r2 < 0.95
    assert best.slope > 1.3


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (closed_form(40, 2, scale=1e3, order=(2, 1)), "elimination (x2, x1)"),
        (closed_form(40, 3, scale=1e3, order=(3, 1, 2)), "elimination (x3, x1, x2)"),
        (determinant_form(40, scale=1e3), "closed form by determinant"),
    ],
    ids=["x2 first", "x3 first", "determinant"],
)
def test_recovered_with_the_query_row_among_the_keys(model, label):
    # Pivots then hold one sample that the prompt's own statistics leave out: R² falls with N.
    table = run(model, model.cfg.n_covariates)
    assert pivot_label(table) == label
    assert (table[table.best].r2 > 0.98).all()
    longer = pivot_test(model, distribution(model.cfg.n_covariates, 400), n_prompts=300)
    assert (longer[longer.best].r2 > 0.998).all()


def test_swap_slope_of_p_1_division():
    # With independent covariates a swap of V_1 leaves x_2 alone: (C_1 / V_1) (u_1 - x̄_1) is
    # rescaled, which is the division test of one covariate.
    config = PromptConfig(n_context=4000, n_covariates=2, x_log_scale=0.7)
    prompts = sample_prompts(config, 50, torch.Generator().manual_seed(0))
    ratio = torch.full((50,), 1.5, dtype=torch.float64)
    change = Pivot((1,)).exchanged(prompts, ratio) - prompts.least_squares
    expected = 0.5 * prompts.slope[:, 0] * (prompts.query - prompts.x_mean)[:, 0]
    assert (change - expected).abs().max() < 0.15 * expected.abs().max()


# ---- negative controls ------------------------------------------------------------------


def test_untrained_models_have_no_pivot():
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        config = ModelConfig(d_model=5, n_layers=3, n_context=40, n_covariates=2)
        table = run(LinearAttentionTransformer(config, generator).double(), 2)
        assert not table.best.any()
        assert pivot_label(table) is None


def test_a_constant_divisor_is_no_pivot():
    # Layer 1 of the determinant model divides by a constant that follows det V in its last digits.
    table = run(determinant_form(40, scale=30, exclude_query=True), 2)
    constant = table[table.layer < 2]
    assert constant.r2.max() > 0.05
    assert constant.slope.abs().max() < 0.01
    assert not constant.best.any()


def test_same_generator_same_table():
    model = determinant_form(40)
    one, two = (run(model, 2, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    pd.testing.assert_frame_equal(one, two)


@pytest.mark.parametrize(
    ("best", "label"),
    [
        ([(1, "V_1"), (2, "V_2|1")], "elimination (x1, x2)"),
        ([(0, "V_2"), (2, "V_1|2")], "elimination (x2, x1)"),
        ([(1, "V_1"), (2, "V_2")], None),
        ([(1, "V_2|1"), (2, "V_1")], None),
        ([(2, "V_1|2")], None),
        ([(2, "det_12")], "closed form by determinant"),
        ([(1, "V_1"), (2, "det_12")], "closed form by determinant"),
        ([], None),
    ],
)
def test_labels_need_the_whole_chain(best, label):
    rows = [
        {"layer": layer, "candidate": pivot.name, "best": (layer, pivot.name) in best}
        for layer in range(3)
        for pivot in candidates(2)
    ]
    assert pivot_label(pd.DataFrame(rows)) == label


def test_models_that_do_not_divide_and_single_covariates_are_refused():
    with pytest.raises(ValueError, match="no layer norm"):
        run(gradient_descent(2, 0.1, n_context=40, n_covariates=2), 2)
    with pytest.raises(ValueError, match="use division_test"):
        pivot_test(closed_form(40), PromptConfig(n_context=40))
