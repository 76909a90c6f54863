import numpy as np
import pandas as pd
import pytest
import torch

from models import PromptConfig, Prompts, closed_form
from probe.causal.gain import gain_curve

PROMPTS = PromptConfig(n_context=20, x_log_scale=0.7, x_mean_std=1)
SETTINGS = {"n_prompts": 300}


def shrunken(below, above, gain=0.8):
    """Least squares for V in a range, and a fit that is too flat elsewhere."""

    def predict(inputs):
        prompts = Prompts.from_inputs(inputs)
        inside = (prompts.x_var > below) & (prompts.x_var < above)
        fit = prompts.least_squares - prompts.y_mean
        return prompts.y_mean + torch.where(inside, 1.0, gain) * fit

    return predict


def test_the_construction_has_gain_one_over_four_decades():
    curve = gain_curve(closed_form(20, scale=1000, exclude_query=True), PROMPTS, **SETTINGS)
    assert (curve["gain"] - 1).abs().max() < 1e-3
    assert curve["r2"].min() > 0.999
    assert np.log10(curve["x_var"].iloc[-1] / curve["x_var"].iloc[0]) == pytest.approx(4)
    assert curve.attrs["range_5"] == pytest.approx(
        (curve["x_var"].iloc[0], curve["x_var"].iloc[-1])
    )
    assert "or less" in curve.attrs["words_5"]
    assert "or more" in curve.attrs["words_5"]


def test_the_range_is_where_the_gain_is_near_one():
    curve = gain_curve(shrunken(0.1, 10), PROMPTS, **SETTINGS)
    low, high = curve.attrs["range_10"]
    step = 10 ** (1 / 8)
    assert 0.1 / step < low < 0.1 * step
    assert 10 / step < high < 10 * step
    narrow = curve.attrs["range_5"]
    assert low <= narrow[0] < narrow[1] <= high
    assert curve.attrs["words_10"].startswith("V from .")
    inside = curve["x_var"].between(0.1, 10)
    assert curve["gain"][inside].to_numpy() == pytest.approx(1)
    assert curve["gain"][~inside].to_numpy() == pytest.approx(0.8)


def test_a_stretch_that_does_not_reach_the_median_is_no_range():
    curve = gain_curve(shrunken(20, 1000), PROMPTS, **SETTINGS)
    assert curve.attrs["range_5"] is None
    assert curve.attrs["words_5"].startswith("not at V = ")


def test_a_ridge_answers_only_at_large_v():
    curve = gain_curve(
        closed_form(20, scale=1000, ridge=0.1, exclude_query=True), PROMPTS, **SETTINGS
    )
    expected = curve["x_var"] / (curve["x_var"] + 0.1)
    np.testing.assert_allclose(curve["gain"], expected, atol=0.01)
    low, _ = curve.attrs["range_10"]
    assert low == pytest.approx(0.9, rel=0.1)  # V / (V + .1) = .9


def test_intervals_hold_the_gain():
    def noisy(inputs):
        prompts = Prompts.from_inputs(inputs)
        return prompts.least_squares + prompts.x_mean

    curve = gain_curve(noisy, PROMPTS, **SETTINGS)
    assert ((curve["gain_low"] < curve["gain"]) & (curve["gain"] < curve["gain_high"])).all()
    held = (curve["gain_low"] < 1) & (curve["gain_high"] > 1)
    assert held.mean() > 0.8


def test_refusals_and_seeds():
    with pytest.raises(ValueError, match="not applicable to 2 covariates"):
        gain_curve(closed_form(20, 2), PromptConfig(n_context=20, n_covariates=2))
    with pytest.raises(ValueError, match="n_prompts=5"):
        gain_curve(closed_form(20), PROMPTS, n_prompts=5)
    tables = [gain_curve(closed_form(20), PROMPTS, **SETTINGS) for _ in range(2)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
