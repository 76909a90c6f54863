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
from probe import division_test, residual_division_test

PROMPTS = PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1)


def test_construction_divides_in_layer_1_only():
    table = division_test(closed_form(50, scale=10), PROMPTS)
    assert list(table["layer"]) == [0, 1]
    assert list(table.columns[:5]) == ["layer", "r2", "slope", "ci_low", "ci_high"]
    assert table["r2"][0] < 0.02
    assert abs(table["slope"][0]) < 0.01
    assert table["ci_low"][1] > 0.98
    assert table["r2"][1] > 0.99
    assert table["slope"][1] == pytest.approx(1, abs=0.1)


def test_without_the_query_row_the_slope_is_one():
    table = division_test(closed_form(50, scale=1000, exclude_query=True), PROMPTS)
    assert table["r2"][1] > 0.99999
    assert table["slope"][1] == pytest.approx(1, abs=1e-3)


def test_slope_sees_the_size_that_r2_does_not():
    model = closed_form(50, scale=10)
    before = division_test(model, PROMPTS)
    model.unembed.W_U.mul_(3)
    after = division_test(model, PROMPTS)
    assert after["r2"][1] == pytest.approx(before["r2"][1])
    assert after["slope"][1] == pytest.approx(3 * before["slope"][1])


@pytest.mark.parametrize("normalization", ["branch", "post"])
@pytest.mark.parametrize("seed", [0, 1])
def test_untrained_models_do_not_divide(normalization, seed):
    config = ModelConfig(n_context=50, normalization=normalization)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(seed))
    assert division_test(model, PROMPTS, n_prompts=2000)["r2"].max() < 0.1


def test_a_model_that_ignores_its_layers_has_r2_zero():
    model = closed_form(50, scale=10)
    model.unembed.W_U.zero_()
    table = division_test(model, PROMPTS, n_prompts=200)
    assert (table["r2"] == 0).all()


def test_not_applicable():
    with pytest.raises(ValueError, match="not applicable: the model has no layer norm"):
        division_test(gradient_descent(2, 0.6, n_context=50), PROMPTS)
    with pytest.raises(ValueError, match="not applicable to 2 covariates"):
        division_test(closed_form(50, 2), PromptConfig(n_context=50, n_covariates=2))


def test_same_seed_same_numbers():
    model = closed_form(50, scale=10)
    tables = [
        division_test(model, PROMPTS, n_prompts=100, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)
    assert not tables[0].equals(tables[2])


# ---- what the stream holds --------------------------------------------------------------


def test_without_gradient_steps_both_tests_agree():
    model = closed_form(50, scale=10)
    table, plain = residual_division_test(model, PROMPTS), division_test(model, PROMPTS)
    assert list(table.columns) == [*plain.columns, "share", "step"]
    assert table["r2"][0] < 0.05
    assert table["r2"][1] > 0.99
    assert table["slope"][1] == pytest.approx(plain["slope"][1], abs=0.05)
    assert table["share"][1] == pytest.approx(1, abs=0.01)
    assert table["step"][1] == pytest.approx(0, abs=1e-3)


# A second step sees an x that the first has shrunk, and does less.
@pytest.mark.parametrize(
    ("steps", "total"), [([0.08], (0.079, 0.081)), ([0.05, 0.03], (0.06, 0.08))]
)
def test_after_gradient_steps_the_residual_is_divided(steps, total):
    model = closed_form(50, scale=1000, exclude_query=True, gradient_steps=steps)
    last = residual_division_test(model, PROMPTS, n_prompts=2000).iloc[-1]
    assert last.r2 > 0.999
    assert last.slope == pytest.approx(1, abs=0.02)
    assert total[0] < last.step < total[1]
    # Prompts of large V weigh most, and there the step does most.
    assert 0.5 < last.share < 0.95
    plain = division_test(model, PROMPTS, n_prompts=2000).iloc[-1]
    assert plain.slope < 0.6
    assert plain.r2 < last.r2


def test_residuals_of_untrained_and_mute_models_are_not_divided():
    untrained = LinearAttentionTransformer(
        ModelConfig(n_context=50), torch.Generator().manual_seed(0)
    )
    assert residual_division_test(untrained, PROMPTS, n_prompts=1000)["r2"].max() < 0.1
    mute, blind = closed_form(50, scale=10), closed_form(50, scale=10)
    mute.unembed.W_U.zero_()
    blind.embed.W_E.zero_()
    for model in (mute, blind):
        table = residual_division_test(model, PROMPTS, n_prompts=200)
        assert (table[["r2", "slope", "share", "step"]] == 0).all(axis=None)


def test_residual_division_is_not_applicable_to_post_norm_and_several_covariates():
    post = LinearAttentionTransformer(ModelConfig(n_context=50, normalization="post"))
    with pytest.raises(ValueError, match="not applicable to normalization='post'"):
        residual_division_test(post, PROMPTS)
    with pytest.raises(ValueError, match="not applicable to 2 covariates"):
        residual_division_test(closed_form(50, 2), PromptConfig(n_context=50, n_covariates=2))
