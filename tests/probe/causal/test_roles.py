"""Instruments ask for roles: a model of another class, with other names, gets the same numbers."""

import pandas as pd
import pytest
import torch

from models import PromptConfig, closed_form
from models.architecture.sites import Studied
from probe import (
    ablate,
    ablate_direction,
    division_test,
    fit_probes,
    interchange,
    norm_statistics,
    pivot_test,
    read_out,
    residual_division_test,
)
from probe.causal.division import held_scale_points
from probe.causal.norm_scale import scale_points
from probe.causal.pivots import pivot_points
from probe.probing.residuals import held_residuals
from tests.probe.renamed import Renamed

ONE = PromptConfig(n_context=10, x_log_scale=0.7, x_mean_std=1)
TWO = PromptConfig(n_context=10, n_covariates=2, x_log_scale=0.7, x_correlation=0.5)
FITTED = {"n_train": 600, "n_prompts": 50}
TESTS = {
    fit_probes: (1, {"n_train": 600, "n_test": 200, "n_untrained": 1}),
    ablate: (1, {"n_prompts": 50, "mode": "zero"}),
    ablate_direction: (1, FITTED | {"n_random": 1, "positions": "query"}),
    interchange: (1, FITTED | {"positions": "query"}),
    division_test: (1, {"n_prompts": 50}),
    residual_division_test: (1, {"n_prompts": 50}),
    held_scale_points: (1, {"n_prompts": 50}),
    norm_statistics: (1, {"n_prompts": 50}),
    scale_points: (1, {"n_prompts": 50}),
    read_out: (1, {"n_prompts": 48}),
    pivot_test: (2, {"n_prompts": 50}),
    pivot_points: (2, {"n_prompts": 50}),
    held_residuals: (2, {"n_prompts": 50}),
}


@pytest.mark.parametrize("measure", TESTS, ids=lambda measure: measure.__name__)
def test_same_numbers_under_other_names(measure):
    p, options = TESTS[measure]
    model = closed_form(10, p, scale=10)
    renamed = Renamed(model)
    assert isinstance(renamed, Studied)
    expected, found = (
        measure(each, {1: ONE, 2: TWO}[p], generator=torch.Generator().manual_seed(2), **options)
        for each in (model, renamed)
    )
    if "site" in expected:
        expected = expected.assign(site=expected["site"].map(renamed.own))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize("measure", TESTS, ids=lambda measure: measure.__name__)
def test_too_few_prompts_are_refused_before_any_work(measure):
    p, options = TESTS[measure]
    if measure not in (held_scale_points, norm_statistics, scale_points, pivot_points):
        few = {name: 2 for name in options if name in ("n_prompts", "n_train")}
        model = closed_form(10, p)
        model.forward = None  # a call would be a TypeError
        with pytest.raises(ValueError, match="too few"):
            measure(model, {1: ONE, 2: TWO}[p], **(options | few))
