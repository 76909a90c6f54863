"""Counterfactuals of the statistics of linear regression, against data moved by hand."""

import pytest
import torch

from models import PromptConfig, prompts_from_arrays, sample_prompts
from models.tasks.statistics import regression_statistics


def swapped(name, a, b):
    """Target on A with a statistic of B."""
    by_name = {each.name: each for each in regression_statistics(a.n_covariates)}
    return by_name[name].swapped(a, b)


class TestCounterfactual:
    @pytest.mark.parametrize("p", [1, 2])
    def test_own_values_change_nothing(self, p, generator):
        a = sample_prompts(PromptConfig(n_covariates=p), 20, generator)
        for each in regression_statistics(p):
            if each.counterfactual:
                torch.testing.assert_close(each.swapped(a, a), a.least_squares)

    def test_one_variance_of_several_is_refused(self, generator):
        a = sample_prompts(PromptConfig(n_covariates=2), 20, generator)
        with pytest.raises(ValueError, match="x_var_1: one variance of 2 covariates"):
            swapped("x_var_1", a, a)

    def test_against_data_moved_by_hand(self, generator):
        # Shifting y moves ȳ alone; adding b x to y moves C by b V and ȳ by b x̄.
        a = sample_prompts(PromptConfig(), 20, generator)
        x, query = a.x[:, :, 0], a.query[:, 0]
        shifted = prompts_from_arrays(x, a.y + 3, query)
        torch.testing.assert_close(swapped("y_mean", a, shifted), shifted.least_squares)
        tilted = prompts_from_arrays(x, a.y + 0.7 * (x - a.x_mean[:, None]), query)
        torch.testing.assert_close(swapped("xy_cov", a, tilted), tilted.least_squares)
        torch.testing.assert_close(swapped("slope", a, tilted), tilted.least_squares)

    def test_x_var_of_another_prompt(self, generator):
        a, b = (sample_prompts(PromptConfig(), 20, generator) for _ in range(2))
        expected = a.y_mean + a.xy_cov / b.x_var * (a.query[:, 0] - a.x_mean)
        torch.testing.assert_close(swapped("x_var", a, b), expected)
        assert regression_statistics(1)[2].value(b).equal(b.x_var)
