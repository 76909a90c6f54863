import io
import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    sample_prompts,
)
from probe import ablate_direction, fit_probes, interchange, load_subject
from probe.probing.linear import (
    CONTROLS,
    BlockErrors,
    enough_prompts,
    needed_prompts,
    plan_positions,
    read_sites,
    score_probes,
)
from probe.quantities.statistics import statistic_values
from probe.stats.bootstrap import CONFIDENCE, percentiles, resample_counts
from probe.stats.moments import Moments
from probe.stats.regression import fit_line

SCALE = "blocks.1.ln1_post.hook_scale"
STATE = "blocks.1.attn.hook_state"
STREAM = "blocks.0.hook_resid_post"


def streamed(x: torch.Tensor, t: torch.Tensor, sizes=(7, 100, 1)) -> Moments:
    """Moments of x [b, f] and t [b, q] from uneven batches."""
    moments, start = Moments(), 0
    for size in (*sizes, len(x)):
        if start < len(x):
            moments.update(x[None, start : start + size], t[start : start + size])
        start += size
    return moments


@pytest.fixture
def data(generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(500, 5, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(5, 5, generator=generator, dtype=torch.float64) + 100
    noise = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    return x, x[:, :3] * 2 + noise + 1e3


class TestRidge:
    def test_agrees_with_linear_regression(self, data):
        x, t = data
        fitted = streamed(x, t).ridge()
        reference = LinearRegression().fit(x.numpy(), t.numpy())
        np.testing.assert_allclose(fitted(x[None])[0], reference.predict(x), rtol=1e-8)
        np.testing.assert_allclose(fitted.weights[0].T, reference.coef_, atol=1e-8)
        np.testing.assert_allclose(
            fitted.r2[0],
            [1 - r for r in ((t - torch.tensor(reference.predict(x))).var(0) / t.var(0))],
            atol=1e-8,
        )

    @pytest.mark.parametrize("penalty", [1e-6, 1e-2, 1.0])
    def test_agrees_with_ridge_on_standardised_features(self, data, penalty):
        x, t = data
        reference = make_pipeline(StandardScaler(), Ridge(alpha=len(x) * penalty, solver="svd"))
        predicted = reference.fit(x.numpy(), t.numpy()).predict(x.numpy())
        fitted = streamed(x, t).ridge(penalty)
        np.testing.assert_allclose(fitted(x[None])[0], predicted, rtol=1e-8)

    @pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
    def test_r2_does_not_depend_on_the_scale_of_coordinates(self, data, scale):
        x, t = data
        scales = x.new_tensor([scale, 1, 1 / scale, scale, 1])
        reference = streamed(x, t).ridge()
        fitted = streamed(x * scales, t).ridge()
        torch.testing.assert_close(fitted.r2, reference.r2, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            fitted((x * scales)[None]), reference(x[None]), rtol=1e-9, atol=0
        )

    def test_offsets_cost_no_digits(self, data):
        x, t = data
        x = x - x.mean(0)
        near, far = streamed(x, t), streamed(x + 1e8, t + 1e8)
        torch.testing.assert_close(far.xx, near.xx, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(far.ridge().r2, near.ridge().r2, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "hostile",
        [
            lambda x: torch.cat([x, x], dim=1),
            lambda x: torch.cat([x, x @ x.new_ones(5, 4)], dim=1),
            lambda x: torch.cat([x, torch.full_like(x, 3.0)], dim=1),
            lambda x: torch.cat([x, 1e12 + 1e-4 * x.sign()], dim=1),
            lambda x: torch.cat([1e-12 * x, 1e12 * x], dim=1),
        ],
        ids=["twice", "collinear", "constant", "constant up to rounding", "scales 1e24 apart"],
    )
    def test_redundant_features_change_nothing(self, data, hostile):
        x, t = data
        reference = streamed(x, t).ridge()
        fitted = streamed(hostile(x), t).ridge()
        assert fitted.weights.isfinite().all()
        torch.testing.assert_close(fitted(hostile(x)[None]), reference(x[None]), rtol=1e-7, atol=0)

    def test_rank_one_site(self, data):
        x, t = data
        line = x[:, :1] * x.new_tensor([[1.0, -2.0, 1e6, 1e-6]])
        fitted = streamed(line, t).ridge()
        torch.testing.assert_close(fitted.r2, streamed(x[:, :1], t).ridge().r2)
        assert (fitted.whiten != 0).any(1).sum() == 1

    def test_constant_site_predicts_the_mean(self, data):
        _, t = data
        fitted = streamed(torch.full((500, 3), 0.1, dtype=torch.float64), t).ridge()
        assert not fitted.weights.any()
        torch.testing.assert_close(fitted.r2, torch.zeros_like(fitted.r2), atol=1e-12, rtol=0)

    def test_r2_of_a_target_that_does_not_vary_is_undefined(self, data):
        x, t = data
        t = t.clone()
        t[:, 1] = 0.1
        r2 = streamed(x, t).ridge().r2[0]
        assert r2.isnan().tolist() == [False, True, False]

    def test_whitening_and_its_inverse(self, data):
        x, t = data
        fitted = streamed(x, t).ridge()
        white = (x - fitted.feature_mean) @ fitted.whiten[0]
        torch.testing.assert_close(white.T @ white / len(x), torch.eye(5, dtype=torch.float64))
        torch.testing.assert_close(white @ fitted.spread[0].T, x - fitted.feature_mean)


class TestBootstrap:
    def test_interval_of_a_probe_covers_its_r2(self, generator):
        # x = x̄ + u/√N, both normal with variance 1/N: half of the variance of x̄ is explained.
        config = PromptConfig(n_context=5)

        def site(prompts):
            x = prompts.x[..., 0].mean(1) + prompts.query[:, 0] / math.sqrt(5)
            return {("site", ("query",)): x[None, :, None]}

        many = sample_prompts(config, 100_000, generator)
        features = site(many)["site", ("query",)]
        targets = statistic_values(config, many)
        probe = Moments().update(features, torch.cat([targets, targets], dim=1)).ridge()
        assert probe.r2[0, 0] == pytest.approx(0.5, abs=0.01)
        repeats, hits = 150, 0
        for _ in range(repeats):
            fitted = [{("site", ("query",)): probe}]
            errors: BlockErrors = score_probes([site], fitted, config, 1000, 1000, generator)
            draws = resample_counts(len(errors.count), generator)
            low, high = percentiles(errors.r2(0, ("site", ("query",)), draws)[:, 0, 0])
            hits += bool(low <= 0.5 <= high)
        assert abs(hits / repeats - CONFIDENCE) < 0.06

    def test_interval_of_a_slope_covers_it(self, generator):
        repeats, hits = 200, 0
        for _ in range(repeats):
            x, noise = torch.randn(2, 200, generator=generator, dtype=torch.float64)
            line = fit_line(x, 0.7 * x + noise, generator)
            hits += line.slope_low <= 0.7 <= line.slope_high
        assert abs(hits / repeats - CONFIDENCE) < 0.05


@pytest.fixture(scope="module")
def constructed() -> pd.DataFrame:
    subject = load_subject("constructed")
    sites = ["hook_embed", STREAM, STATE, SCALE, "hook_prediction"]
    return fit_probes(subject.model, subject.prompts, sites, n_untrained=2)


def r2(table: pd.DataFrame, site: str, statistic: str, column: str = "r2") -> float:
    row = table[(table["site"] == site) & (table["statistic"] == statistic)]
    return float(row[column].iloc[0])


class TestFitProbes:
    def test_columns(self, constructed):
        assert list(constructed.columns) == [
            *("site", "position", "statistic", "r2", "ci_low", "ci_high"),
            *("r2_input", "r2_untrained", "r2_shuffled", "selectivity"),
        ]

    @pytest.mark.parametrize(
        ("site", "statistic", "expected"),
        [
            (STREAM, "x_mean", 1.0),
            (STREAM, "y_mean", 1.0),
            (STREAM, "x_var", 0.0),
            (STREAM, "xy_cov", 0.0),
            (STATE, "x_var", 0.954),
            (STATE, "xy_cov", 0.998),
            (SCALE, "x_var", 0.951),
            *(("hook_embed", name, 0.0) for name in ("x_mean", "y_mean", "x_var", "xy_cov")),
        ],
    )
    def test_reference_values_on_the_construction(self, constructed, site, statistic, expected):
        assert r2(constructed, site, statistic) == pytest.approx(expected, abs=0.02)

    def test_v_is_exact_without_the_query_row(self):
        model = closed_form(20, scale=100, exclude_query=True)
        table = fit_probes(model, PromptConfig(), SCALE, n_train=2000, n_test=2000, n_untrained=1)
        assert r2(table, SCALE, "x_var") > 0.9999

    def test_intervals_and_shuffled_targets(self, constructed):
        assert (constructed["ci_low"] <= constructed["r2"]).all()
        assert (constructed["r2"] <= constructed["ci_high"]).all()
        assert constructed["r2_shuffled"].abs().max() < 0.01
        # x̄ in the stream: found there, and nowhere in the query row or in random networks.
        assert r2(constructed, STREAM, "x_mean", "selectivity") > 0.5

    def test_flattened_prompt_finds_means_trivially(self):
        subject = load_subject("constructed")
        table = fit_probes(subject.model, subject.prompts, "hook_embed", ["flatten"], n_untrained=1)
        for statistic in ("x_mean", "y_mean"):
            assert r2(table, "hook_embed", statistic) > 0.999
            assert abs(r2(table, "hook_embed", statistic, "selectivity")) < 1e-3
        assert r2(table, "hook_embed", "x_var") < 0.01

    def test_positions(self):
        subject = load_subject("constructed")
        table = fit_probes(
            subject.model,
            subject.prompts,
            [STREAM, STATE],
            ["0", "19", "query", "flatten", "state"],
            n_train=3000,
            n_test=1000,
            n_untrained=1,
        )
        found = {site: list(rows["position"].unique()) for site, rows in table.groupby("site")}
        assert found == {STREAM: ["0", "19", "query", "flatten"], STATE: ["state"]}
        # Context rows hold x_n - x̄: the mean cannot be read from one row, but from all.
        at = table[table["statistic"] == "x_mean"].set_index("position")["r2"]
        assert at["0"] < 0.2 < 0.99 < at["query"]
        assert at["flatten"] > 0.99

    def test_gradient_descent_holds_no_variance(self):
        subject = load_subject("gradient_descent")
        table = fit_probes(subject.model, subject.prompts, n_train=4000, n_test=4000, n_untrained=1)
        assert table.loc[table["statistic"] == "x_var", "r2"].max() < 0.02

    def test_untrained_models_are_no_exception_among_untrained_models(self):
        model = LinearAttentionTransformer(ModelConfig(), torch.Generator().manual_seed(1))
        table = fit_probes(model.requires_grad_(False), PromptConfig(), n_train=2000, n_test=2000)
        assert table["selectivity"].median() <= 0.005
        # A random network may carry V. So do others, which is what the control is for.
        assert table["r2"].max() > 0.8

    def test_several_seeds_widen_the_interval(self):
        config = ModelConfig()
        models = [
            LinearAttentionTransformer(config, torch.Generator().manual_seed(seed))
            for seed in range(3)
        ]
        sizes = {"n_train": 2000, "n_test": 2000, "n_untrained": 1}
        together = fit_probes(models, PromptConfig(), SCALE, **sizes)
        alone = [fit_probes(model, PromptConfig(), SCALE, **sizes) for model in models]
        mean = np.mean([table["r2"] for table in alone], axis=0)
        np.testing.assert_allclose(together["r2"], mean, atol=0.03)
        width = [(t["ci_high"] - t["ci_low"]).mean() for t in (together, *alone)]
        assert width[0] > 2 * max(width[1:])

    def test_several_covariates_have_one_row_per_component(self):
        model = closed_form(20, 2, scale=10)
        prompts = PromptConfig(n_covariates=2)
        site = "blocks.0.hook_attn_out"
        table = fit_probes(model, prompts, site, n_train=4000, n_test=4000, n_untrained=1)
        assert {"x_mean_1", "x_mean_2", "xy_cov_2"} <= set(table["statistic"])
        # The layer writes (N x̄ + u) / (N + 1), of whose variance x̄ explains N / (N + 1).
        assert r2(table, site, "x_mean_2") == pytest.approx(20 / 21, abs=0.01)

    def test_same_seed_same_numbers(self):
        subject = load_subject("constructed")
        tables = [
            fit_probes(
                subject.model,
                subject.prompts,
                SCALE,
                n_train=500,
                n_test=500,
                n_untrained=1,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in (3, 3, 4)
        ]
        pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)
        assert not tables[0][list(CONTROLS)].equals(tables[2][list(CONTROLS)])


SMALL = {"n_train": 500, "n_test": 500, "n_untrained": 2}


class KnowsV(LinearAttentionTransformer):
    """Shows the variance of x in the query row, whatever its weights."""

    def forward(self, inputs):
        shown = inputs.clone()
        shown[:, -1, -1] = inputs[:, :-1, 1].var(dim=1, correction=0)
        return super().forward(shown)


class TestOwnClass:
    config = ModelConfig(n_context=10)

    def test_untrained_models_are_of_the_class_that_is_probed(self):
        models = [kind(self.config) for kind in (KnowsV, LinearAttentionTransformer)]
        prompts = PromptConfig(n_context=10, x_log_scale=0.7)
        own, plain = (fit_probes(m, prompts, "hook_embed", **SMALL) for m in models)
        assert r2(own, "hook_embed", "x_var", "r2_untrained") > 0.99
        assert abs(r2(own, "hook_embed", "x_var", "selectivity")) < 0.01
        assert r2(plain, "hook_embed", "x_var", "r2_untrained") < 0.1

    def test_models_of_two_classes_are_not_one(self):
        models = [kind(self.config) for kind in (KnowsV, LinearAttentionTransformer)]
        with pytest.raises(ValueError, match="of one class"):
            fit_probes(models, PromptConfig(n_context=10), "hook_embed", **SMALL)


class TestSizes:
    wide = LinearAttentionTransformer(ModelConfig(d_model=16, n_heads=9, n_context=5))
    prompts = PromptConfig(n_context=5)

    def test_default_fits_the_widest_site(self):
        plan = plan_positions(self.wide, self.prompts, None, ("query", "state"))
        assert enough_prompts(self.wide, self.prompts, plan) == 10 * 9 * 16 * 16
        streams = plan_positions(self.wide, self.prompts, None, ("query",))
        assert enough_prompts(self.wide, self.prompts, streams) == 20_000
        assert needed_prompts(self.wide, self.prompts, "hook_embed") == 10 * 16

    @pytest.mark.parametrize("probe", [fit_probes, ablate_direction, interchange])
    def test_too_few_are_refused_before_the_model_runs(self, probe):
        model = closed_form(5)
        model.forward = None  # a call would be a TypeError
        with pytest.raises(ValueError, match="n_train must be at least"):
            probe(model, self.prompts, n_train=20)

    def test_widths_are_those_of_the_features(self, generator):
        positions = ("query", "state", "flatten", "0")
        prompts = sample_prompts(self.prompts, 2, generator)
        for site in self.wide.select_sites(None):
            plan = plan_positions(self.wide, self.prompts, site, positions)
            widest = max(x.shape[2] for x in read_sites(self.wide, prompts, plan).values())
            with pytest.raises(ValueError, match=f"to fit {widest} features at '{site}'"):
                enough_prompts(self.wide, self.prompts, plan, 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_long_work_shows_a_bar_on_a_terminal_only(monkeypatch, stream):
    shown = stream()
    monkeypatch.setattr("sys.stderr", shown)
    sizes = {"n_train": 100, "n_test": 100, "n_untrained": 1}
    fit_probes(closed_form(5), PromptConfig(n_context=5), SCALE, **sizes)
    assert ("fitting probes" in shown.getvalue()) == shown.isatty()
    interchange(closed_form(5), PromptConfig(n_context=5), SCALE, n_train=100, n_prompts=50)
    assert ("writing" in shown.getvalue()) == shown.isatty()


class TestRefusals:
    model = closed_form(20, scale=10)

    def test_too_few_prompts_says_how_many(self):
        with pytest.raises(ValueError, match=r"100 prompts are too few .* at least 840"):
            fit_probes(self.model, PromptConfig(), "hook_embed", ["flatten"], n_train=100)

    @pytest.mark.parametrize(
        ("sites", "positions", "message"),
        [
            ("hook_embed", ["20"], "unknown position '20'"),
            ("hook_embed", ["state"], "has none of the positions"),
            ("hook_embedd", ["query"], "near matches: hook_embed"),
            (None, [], "no site has any"),
        ],
    )
    def test_unknown_places(self, sites, positions, message):
        with pytest.raises(ValueError, match=message):
            fit_probes(self.model, PromptConfig(), sites, positions)

    def test_sizes(self):
        with pytest.raises(ValueError, match="n_test=99 must be at least 100"):
            fit_probes(self.model, PromptConfig(), n_test=99)
        with pytest.raises(ValueError, match="n_untrained=0"):
            fit_probes(self.model, PromptConfig(), n_untrained=0)

    def test_models_of_different_shapes(self):
        with pytest.raises(ValueError, match="share one ModelConfig"):
            fit_probes([self.model, closed_form(20, exclude_query=True)], PromptConfig())

    def test_nan_names_site_and_prompt(self):
        model = closed_form(20, scale=10)
        model.blocks[1].attn.W_V.data[0, 0, 0] = math.nan
        with pytest.raises(ValueError, match=r"'blocks.1.attn.hook_v' are NaN .* prompt 0"):
            fit_probes(model, PromptConfig())

    def test_constant_statistic_gives_nan(self):
        # With y identically 0, C and C/V are exactly 0 in every prompt.
        errors = BlockErrors(
            count=torch.tensor([5.0, 5.0], dtype=torch.float64),
            first=torch.zeros(2, 1, dtype=torch.float64),
            second=torch.zeros(2, 1, dtype=torch.float64),
            squared=[{("site", ("query",)): torch.zeros(2, 1, 1, dtype=torch.float64)}],
            varies=torch.tensor([False]),
        )
        draws = torch.ones(1, 2, dtype=torch.float64)
        assert errors.r2(0, ("site", ("query",)), draws).isnan().all()
