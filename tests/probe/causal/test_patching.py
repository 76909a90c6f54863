import dataclasses
import math

import pytest
import torch

from models import PromptConfig, closed_form, sample_prompts
from probe import ablate, ablate_direction, interchange, load_subject
from probe.causal.directions import WriteReading, _random_direction
from probe.causal.effect import Effect
from probe.stats.moments import Moments

SCALE = "blocks.1.ln1_post.hook_scale"
STATE = "blocks.1.attn.hook_state"
WIDE = PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1)
# Exact up to R^-2, so that effects can be computed by hand.
EXACT = closed_form(20, scale=1000, exclude_query=True)


class TestAblate:
    def test_effects_that_follow_from_the_model_being_exact(self):
        # The mean prediction instead of ŷ costs Var ŷ, an unrelated one twice that.
        sites = ["hook_embed", "hook_prediction"]
        mean = ablate(EXACT, PromptConfig(), "hook_prediction", "mean").iloc[0]
        assert mean["loss"] < 1e-5
        assert mean["effect"] == pytest.approx(1, abs=0.01)
        swapped = ablate(EXACT, PromptConfig(), sites, "resample").set_index("site")
        assert swapped["effect"].tolist() == pytest.approx([2, 2], abs=0.1)
        assert swapped["change"].tolist() == pytest.approx([2, 2], abs=0.1)
        assert (swapped["ci_low"] < swapped["effect"]).all()
        assert (swapped["effect"] < swapped["ci_high"]).all()

    def test_a_site_without_effect(self):
        # Every value map of the construction sums to zero, so that the norm subtracts nothing.
        for mode in ("zero", "mean", "resample"):
            row = ablate(EXACT, PromptConfig(), "blocks.0.ln1_post.hook_mean", mode).iloc[0]
            assert abs(row["effect"]) < 1e-6
            assert row["change"] < 1e-6

    def test_zero_everywhere_leaves_out_divisors(self):
        table = ablate(EXACT, PromptConfig(), mode="zero", n_prompts=100)
        assert not table["site"].str.endswith("hook_scale").any()
        assert len(table) == 24
        with pytest.raises(ValueError, match="divide by zero"):
            ablate(EXACT, PromptConfig(), SCALE, "zero")

    def test_stated_reference_prompts(self):
        # One reference prompt: its activation is the mean and the only donor.
        reference = sample_prompts(PromptConfig(), 1, torch.Generator().manual_seed(5))
        means, donated = (
            ablate(EXACT, PromptConfig(), STATE, mode, reference=reference, n_prompts=50)
            for mode in ("mean", "resample")
        )
        assert means["loss_ablated"].iloc[0] == pytest.approx(donated["loss_ablated"].iloc[0])
        fresh = ablate(EXACT, PromptConfig(), STATE, "mean", n_prompts=50)
        assert abs(fresh["loss_ablated"].iloc[0] - means["loss_ablated"].iloc[0]) > 1e-3

    def test_explicit_generator_and_no_hooks_left(self):
        runs = [
            ablate(
                EXACT,
                PromptConfig(),
                STATE,
                "resample",
                n_prompts=50,
                generator=torch.Generator().manual_seed(seed),
            )["effect"].iloc[0]
            for seed in (1, 1, 2)
        ]
        assert runs[0] == runs[1] != runs[2]
        assert not any(point.has_hooks() for point in EXACT.hook_dict.values())

    def test_refusals(self):
        with pytest.raises(ValueError, match="unknown mode 'median'"):
            ablate(EXACT, PromptConfig(), STATE, "median")
        with pytest.raises(ValueError, match="near matches: hook_embed"):
            ablate(EXACT, PromptConfig(), "hook_embedd")
        reference = sample_prompts(PromptConfig(), 1, torch.Generator().manual_seed(5))
        alike = dataclasses.replace(reference, inputs=reference.inputs.expand(30, -1, -1))
        alike = dataclasses.replace(alike, least_squares=reference.least_squares.expand(30))
        with pytest.raises(ValueError, match="does not vary over 30 prompt"):
            Effect(EXACT, alike, torch.Generator())
        # Nothing enters the norm and eps is 0: the scale to be written is 0.
        model = closed_form(20)
        model.blocks[1].attn.W_V.zero_()
        model.blocks[1].ln1_post.eps = 0.0
        with pytest.raises(ValueError, match=r"edit at .*hook_scale' makes the prediction NaN"):
            ablate(model, PromptConfig(), SCALE, "mean", n_prompts=20)


@pytest.fixture
def written(generator):
    """Features of rank 3 in 4 columns that carry two targets, and their probe."""
    x = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(3, 4, generator=generator, dtype=torch.float64) + 5
    t = x[:, :2] + 0.3 * torch.randn(400, 2, generator=generator, dtype=torch.float64)
    return x, t, Moments().update(x[None], t).ridge()


class TestEdits:
    axes = ("batch", "position", "d_model")

    def edit(self, probe, target, activation, **changes) -> torch.Tensor:
        write = WriteReading(self.axes, ("query",), probe, 0, torch.as_tensor(target))
        return dataclasses.replace(write, **changes)(activation)

    def test_writing_makes_the_probe_read_the_target(self, written):
        x, _, probe = written
        target = torch.linspace(-2, 2, len(x), dtype=torch.float64)
        edited = self.edit(probe, target, x[:, None])[:, 0]
        torch.testing.assert_close(probe(edited[None])[0, :, 0], target)

    def test_erasing_leaves_no_linear_probe_anything(self, written):
        x, t, probe = written
        assert probe.r2[0, 0] > 0.8
        erased = self.edit(probe, probe.target_mean[0], x[:, None])[:, 0]
        assert Moments().update(erased[None], t).ridge().r2[0, 0] < 1e-9
        # The other target is still there: one direction is gone, not the site.
        assert Moments().update(erased[None], t).ridge().r2[0, 1] > 0.2

    def test_edits_do_not_depend_on_the_basis(self, written, generator):
        x, t, probe = written
        basis = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        turned = Moments().update((x @ basis)[None], t).ridge()
        target = torch.tensor(1.0)
        expected = self.edit(probe, target, x[:, None]) @ basis
        torch.testing.assert_close(self.edit(turned, target, (x @ basis)[:, None]), expected)

    def test_other_positions_stay(self, written):
        x, _, probe = written
        activation = x[:, None].expand(-1, 3, -1)
        edited = self.edit(probe, 1.0, activation)
        torch.testing.assert_close(edited[:, :2], activation[:, :2], rtol=0, atol=0)
        assert (edited[:, 2] != activation[:, 2]).any(1).all()
        untouched = self.edit(probe, 1.0, activation, views=torch.tensor([False]))
        torch.testing.assert_close(untouched, activation, rtol=0, atol=0)

    def test_random_directions_have_the_norm_of_the_probe(self, written, generator):
        x, _, probe = written
        exact = dataclasses.replace(probe, target_mean=torch.zeros(2, dtype=torch.float64))
        for control in (probe, _random_direction(exact, generator)):
            erased = self.edit(control, control.target_mean[0], x[:, None])[:, 0]
            removed = ((x - erased) @ probe.whiten[0]).square().sum(1).mean()
            assert removed == pytest.approx(1, abs=1e-6)


class TestAblateDirection:
    def test_construction_uses_the_covariance_in_its_state(self):
        model = closed_form(20, scale=10)
        row = ablate_direction(model, PromptConfig(), STATE, "xy_cov", n_train=4000).iloc[0]
        assert row["probe_r2"] > 0.99
        assert row["ci_low"] > 0.3
        assert row["effect"] > row["random_effect"]
        assert row["random_low"] <= row["random_effect"] <= row["random_high"]

    def test_without_random_directions_it_is_refused_before_any_work(self):
        model = closed_form(20)
        model.forward = None  # a call would be a TypeError
        with pytest.raises(ValueError, match="n_random=0"):
            ablate_direction(model, PromptConfig(), STATE, n_random=0)

    def test_nothing_is_removed_where_nothing_is_found(self):
        model = closed_form(20, scale=10)
        rows = ablate_direction(
            model, PromptConfig(), STATE, ["x_mean", "x_var"], n_train=4000, n_prompts=500
        ).set_index("statistic")
        assert math.isnan(rows.loc["x_mean", "effect"])
        assert rows.loc["x_var", "effect"] > 0.005

    def test_one_dimensional_sites_have_no_random_direction(self):
        row = ablate_direction(
            EXACT, PromptConfig(), SCALE, "x_var", n_train=2000, n_prompts=500
        ).iloc[0]
        assert row["effect"] > 0.005
        assert math.isnan(row["random_effect"])


class TestInterchange:
    def test_v_at_the_scale_moves_the_prediction_as_least_squares(self):
        table = interchange(closed_form(50, scale=10), WIDE, SCALE, "x_var")
        row = table.iloc[0]
        assert row["slope"] == pytest.approx(1, abs=0.05)
        assert row["r2"] > 0.99
        assert row["slope_low"] < row["slope"] < row["slope_high"]

    @pytest.mark.parametrize("positions", ["all", "query"])
    def test_without_the_query_row_at_any_n(self, positions):
        row = interchange(EXACT, PromptConfig(), SCALE, "x_var", positions).iloc[0]
        assert row["slope"] == pytest.approx(1, abs=0.02)
        assert row["r2"] > 0.999

    def test_untrained_model_uses_none_of_what_probes_find(self):
        subject = load_subject("untrained")
        table = interchange(
            subject.model, subject.prompts, positions="query", n_train=4000, n_prompts=1000
        )
        assert table["probe_r2"].max() > 0.8
        assert table["slope"].abs().max() < 0.3
        assert table["r2"].max() < 0.2
        scale = table[(table["site"] == SCALE) & (table["statistic"] == "x_var")]
        assert scale["slope"].isna().all()

    def test_gradient_descent_has_no_variance_to_write(self):
        subject = load_subject("gradient_descent")
        settings = {"positions": "query", "n_train": 4000, "n_prompts": 500}
        table = interchange(subject.model, subject.prompts, statistic="x_var", **settings)
        assert table["slope"].isna().all()

    def test_several_covariates_leave_out_variances(self):
        model, prompts = closed_form(20, 2), PromptConfig(n_covariates=2)
        table = interchange(model, prompts, "hook_prediction", n_train=2000, n_prompts=200)
        assert "xy_cov_2" in set(table["statistic"])
        assert not table["statistic"].str.startswith("x_var").any()
        with pytest.raises(ValueError, match="one variance of 2 covariates"):
            interchange(model, prompts, "hook_prediction", "x_var_1", n_train=2000)

    def test_refusals(self):
        with pytest.raises(ValueError, match="unknown statistic 'variance'; give some of x_mean"):
            interchange(EXACT, PromptConfig(), SCALE, "variance")
        with pytest.raises(ValueError, match="'all' or 'query'"):
            interchange(EXACT, PromptConfig(), SCALE, "x_var", "0")
        with pytest.raises(ValueError, match="at least 10"):
            interchange(EXACT, PromptConfig(), SCALE, "x_var", n_train=5)
