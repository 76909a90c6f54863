"""Elimination in every order, and Cramer's rule, against least squares and the derivation."""

import itertools
import math

import numpy as np
import pytest
import torch

from models import (
    PromptConfig,
    closed_form,
    determinant_form,
    fraction_free_form,
    sample_prompts,
)
from models.constructed.cramer import COORDINATES

ORDERS = [order for p in (1, 2, 3) for order in itertools.permutations(range(1, p + 1))]
MODELS = {
    "determinant": lambda n, **options: determinant_form(n, **options),
    "fraction free": lambda n, **options: fraction_free_form(n, **options),
    "x_1 first": lambda n, **options: closed_form(n, 2, **options),
    "x_2 first": lambda n, **options: closed_form(n, 2, order=(2, 1), **options),
}


def draw(generator, n_context=12, p=2, batch=500):
    varied = {"x_log_scale": 0.7, "x_mean_std": 1.0, "x_correlation": 0.8 * (p > 1)}
    return sample_prompts(
        PromptConfig(n_context=n_context, n_covariates=p, **varied), batch, generator
    )


def relative_mse(model, prompts) -> float:
    error = model(prompts.inputs) - prompts.least_squares
    return float(error.square().mean() / prompts.least_squares.var())


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_is_least_squares(order, generator):
    prompts = draw(generator, p=len(order))
    model = closed_form(12, len(order), scale=1e4, exclude_query=True, order=order)
    assert math.sqrt(relative_mse(model, prompts)) < 1e-5


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_layers_divide_by_the_residual_variances_of_their_order(order, generator):
    prompts = draw(generator, p=3)
    model = closed_form(12, 3, scale=1e4, exclude_query=True, order=order)
    _, cache = model.run_with_cache(prompts.inputs)
    x = prompts.x - prompts.x_mean[:, None]
    for layer, j in enumerate(order, start=1):
        done = [i - 1 for i in order[: layer - 1]]
        column = x[..., j - 1 : j]
        if done:
            column = column - x[..., done] @ torch.linalg.lstsq(x[..., done], column).solution
        pivot = column.square().mean((1, 2))
        ratio = cache[f"blocks.{layer}.ln1_post.hook_scale"][:, -1, 0] / pivot
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_error_falls_with_the_fourth_power_of_scale(model, generator):
    prompts = draw(generator)
    errors = [
        relative_mse(model(12, scale=scale, exclude_query=True), prompts) for scale in (1e2, 1e3)
    ]
    assert 0.9e4 < errors[0] / errors[1] < 1.1e4


def test_the_query_row_is_one_more_sample_for_all_of_them(generator):
    prompts = draw(generator)
    expected, *others = (model(12, scale=1e5)(prompts.inputs) for model in MODELS.values())
    for predictions in others:
        torch.testing.assert_close(predictions, expected, rtol=1e-5, atol=1e-5)
    assert (expected - prompts.least_squares).abs().max() > 0.01


def test_determinant_coordinates_hold_what_the_derivation_says(generator):
    prompts = draw(generator)
    model = determinant_form(12, scale=1e4, exclude_query=True)
    _, cache = model.run_with_cache(prompts.inputs)
    held = 1e4 * cache["blocks.1.hook_resid_post"]
    stream = {name: held[..., i] for i, name in enumerate(COORDINATES)}
    x = prompts.inputs[..., 1:3] - prompts.x_mean[:, None]
    adjugate = torch.linalg.inv(prompts.x_cov) * torch.linalg.det(prompts.x_cov)[:, None, None]
    for j, name in enumerate(("z_1", "z_2")):
        expected = (x @ adjugate[:, :, j : j + 1])[..., 0]
        torch.testing.assert_close(stream[name], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stream[f"x_{j + 1}"], x[..., j], rtol=1e-4, atol=1e-4)
    # Layer 1 divides by a constant, layer 2 by the determinant.
    constant = cache["blocks.1.ln1_post.hook_scale"][:, -1, 0]
    torch.testing.assert_close(constant, constant.mean().expand_as(constant), rtol=1e-4, atol=0)
    ratio = cache["blocks.2.ln1_post.hook_scale"][:, -1, 0] / torch.linalg.det(prompts.x_cov)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)


def test_fraction_free_divides_once_by_a_multiple_of_the_determinant(generator):
    prompts = draw(generator)
    model = fraction_free_form(12, scale=1e4, exclude_query=True)
    assert (model.cfg.d_model, model.cfg.n_layers) == (5, 3)
    assert math.sqrt(relative_mse(model, prompts)) < 1e-5
    _, cache = model.run_with_cache(prompts.inputs)
    pivot = prompts.x_cov[:, 0, 0] * torch.linalg.det(prompts.x_cov)
    for layer, divisor in ((1, torch.ones_like(pivot)), (2, pivot)):
        ratio = cache[f"blocks.{layer}.ln1_post.hook_scale"][:, -1, 0] / divisor
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)
    # The raw x_2 stands along (1, .., 1) in every layer.
    means = 1e4 * cache["blocks.2.hook_resid_post"].mean(2)
    torch.testing.assert_close(means, prompts.inputs[..., 2], rtol=1e-6, atol=1e-6)


def test_determinant_predicts_on_any_length_and_in_float32(generator):
    prompts = draw(generator, n_context=300)
    model = determinant_form(20, scale=1e3, dtype=torch.float32)
    predictions = model(prompts.inputs).double()
    # The query row costs O(1/N), in squares N^-2 times a heavy tail.
    assert relative_mse(model, prompts) < 2e-3
    assert np.corrcoef(predictions, prompts.least_squares)[0, 1] > 0.999


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: closed_form(9, 2, order=(1,)), r"order=\(1,\) must name each covariate 1 .. 2"),
        (lambda: closed_form(9, 2, order=(0, 1)), r"order=\(0, 1\)"),
        (lambda: closed_form(9, 3, order=(1, 2, 2)), r"order=\(1, 2, 2\)"),
        (lambda: determinant_form(3), "n_context=3"),
        (lambda: determinant_form(9, scale=0.0), "scale=0.0"),
        (lambda: fraction_free_form(3), "n_context=3"),
    ],
)
def test_impossible_constructions_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
