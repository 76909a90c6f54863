import math

import numpy as np
import pytest
import torch
from scipy import stats

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    gradient_descent,
    sample_prompts,
)
from probe import collect, norm_statistics
from probe.causal.norm_scale import _norm, scale_law, scale_points
from probe.stats.regression import fit_line

PROMPTS = PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1)


def test_line_agrees_with_scipy(generator):
    x, noise = torch.randn(2, 300, generator=generator, dtype=torch.float64)
    y = 1e6 + 0.3 * x + noise
    line, reference = fit_line(x, y, generator), stats.linregress(x.numpy(), y.numpy())
    assert line.slope == pytest.approx(reference.slope, rel=1e-9)
    assert line.r2 == pytest.approx(reference.rvalue**2, rel=1e-9)


def test_a_statistic_that_does_not_vary_is_named(generator):
    points = scale_points(closed_form(50), PROMPTS, n_prompts=20)
    # Constant but for rounding.
    points["variance"] = 0.1 * (1 + 1e-16 * points["prompt"])
    with pytest.raises(ValueError, match=r"log x_var does not vary over the 20 prompt"):
        scale_law(points, generator)


def test_scale_of_the_construction_follows_v():
    law = scale_law(scale_points(closed_form(50, scale=10), PROMPTS)).set_index("layer")
    assert law["slope"][0] == pytest.approx(0, abs=0.005)
    assert law["slope"][1] == pytest.approx(1, abs=0.01)
    assert law["r2"][1] > 0.99
    assert law["slope_low"][1] < law["slope"][1] < law["slope_high"][1]


@pytest.mark.parametrize("seed", [0, 1])
def test_scale_of_an_untrained_model_does_not(seed):
    config = ModelConfig(n_context=50)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(seed))
    assert scale_law(scale_points(model, PROMPTS))["r2"].max() < 0.3


def test_layers_of_two_covariates_follow_one_variance_each():
    prompts = PromptConfig(n_context=50, n_covariates=2, x_log_scale=0.7)
    law = scale_law(scale_points(closed_form(50, 2, scale=30), prompts))
    r2 = law.pivot(index="layer", columns="statistic", values="r2")
    assert r2.loc[1, "x_var_1"] > 0.95
    assert r2.loc[2, "x_var_2"] > 0.9
    assert r2.loc[1, "x_var_2"] < 0.05
    assert r2.loc[2, "x_var_1"] < 0.05


@pytest.mark.parametrize("normalization", ["branch", "post"])
def test_input_is_what_enters_the_norm(normalization, generator):
    config = ModelConfig(normalization=normalization)
    model = LinearAttentionTransformer(config, generator).double().requires_grad_(False)
    inputs = sample_prompts(PromptConfig(), 5, generator).inputs
    activations = collect(model, inputs)
    entered = activations["blocks.1.attn.hook_out"]
    if normalization == "post":
        entered = entered + activations["blocks.1.hook_resid_pre"]
    unit = activations["blocks.1.ln1_post.hook_scale"].median()
    divisor = model.sites["blocks.1.ln1_post.hook_scale"]
    torch.testing.assert_close(_norm(model, inputs, divisor)["input"] * unit, entered)


def test_statistics_beside_the_construction():
    model = closed_form(50, scale=100)
    table = norm_statistics(model, PROMPTS, n_prompts=300)
    model_rows = table[table["source"] == "model"].reset_index(drop=True)
    predicted = table[table["source"] == "construction"].reset_index(drop=True)
    # The construction beside itself: the same numbers under names.
    numbers = ["average", "sd", "q05", "q25", "q50", "q75", "q95"]
    np.testing.assert_allclose(model_rows[numbers], predicted[numbers], atol=1e-9)
    output = predicted[(predicted["quantity"] == "output") & (predicted["layer"] == 1)]
    median = output.set_index("coordinate")["q50"]
    assert median["const"] == pytest.approx(math.sqrt(2), rel=0.01)
    assert median["spare"] == pytest.approx(-math.sqrt(2), rel=0.01)
    scale = predicted[predicted["quantity"] == "scale"]
    np.testing.assert_allclose(scale["q50"], 1, rtol=0.01)
    # Centring writes the same in every prompt, division writes V.
    assert scale["sd"].iloc[0] < 0.01 < 0.5 < scale["sd"].iloc[1]


def test_not_applicable_without_norm():
    model = gradient_descent(2, 0.6, n_context=50)
    for function in (norm_statistics, scale_points):
        with pytest.raises(ValueError, match="no layer norm"):
            function(model, PROMPTS)
