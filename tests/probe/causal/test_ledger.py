import numpy as np
import pandas as pd
import pytest
import torch

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    closed_form,
    gradient_descent,
    load,
    sample_prompts,
)
from models.architecture.hooks import StrictHookPoint
from models.architecture.transformer import LinearAttention
from probe.causal.ledger import MEASURES, Resamples, division_ledger
from probe.causal.spread import with_spread
from probe.stats.bootstrap import resample_counts
from probe.symmetry.catalogue import HeadBasis, HeadMixing, NullWrite, ResidualBasis

PROMPTS = PromptConfig(n_context=20, x_log_scale=0.7, x_mean_std=1)
SMALL = {"n_prompts": 600, "n_untrained": 1}


def ledger(model, **settings):
    return division_ledger(model, PROMPTS, **(SMALL | settings)).set_index("site")


def untrained(seed, **config):
    config = ModelConfig(**({"n_context": 20} | config))
    return LinearAttentionTransformer(config, torch.Generator().manual_seed(seed)).double()


def exact(**settings):
    return closed_form(20, scale=1000, exclude_query=True, **settings)


@pytest.fixture(scope="module")
def construction():
    return ledger(exact())


# ---- the construction -------------------------------------------------------------------


def test_the_construction_divides_by_v_at_its_last_norm(construction):
    last = construction.iloc[1]
    assert last.elasticity == pytest.approx(1, abs=1e-4)
    assert last.elasticity_held == pytest.approx(1, abs=1e-4)
    assert last.carried_slope == pytest.approx(1, abs=1e-4)
    assert last.carried_r2 == pytest.approx(1, abs=1e-4)
    assert last.budget_share == pytest.approx(1, abs=1e-4)
    assert last.dose_left == pytest.approx(0, abs=1e-9)
    assert last.exchange_r2 == pytest.approx(1, abs=1e-4)
    assert last.exchange_held_r2 == pytest.approx(1, abs=1e-4)
    assert last.exchange_slope == pytest.approx(1, abs=1e-3)
    for law in ("held", "v"):
        assert last[f"replaced_{law}"] < 1e-6
        assert last[f"same_{law}"] < 0.01
    assert last.error < 1e-6
    assert last.replaced_constant > 0.1


def test_its_first_norm_is_a_constant_that_carries_no_fit(construction):
    first = construction.iloc[0]
    assert first.elasticity == pytest.approx(0, abs=1e-6)
    assert first.carried_slope_low < 0 < first.carried_slope_high
    assert first.carried_r2 < 0.02
    assert first.budget_share == pytest.approx(0, abs=1e-6)
    assert first.replaced_constant < 1e-6
    assert first.replaced_v > 0.1
    assert first.exchange_r2 < 0.01


def test_all_divisors_together_do_what_the_last_does(construction):
    jointly = construction.loc["all"]
    assert np.isnan(jointly.elasticity)
    assert jointly.budget_share == pytest.approx(1, abs=1e-4)
    assert jointly.replaced_held < 1e-6
    assert jointly.replaced_constant > 0.1
    assert jointly.exchange_r2 == pytest.approx(1, abs=1e-3)


def test_carried_and_exchange_count_the_size():
    model = exact()
    model.unembed.W_U.mul_(3)
    tripled = ledger(model).iloc[1]
    assert tripled.elasticity == pytest.approx(1, abs=1e-4)
    assert tripled.carried_slope == pytest.approx(3, abs=1e-3)
    # A slope of 3 is a perfect line, and far from y = x.
    assert tripled.exchange_line_r2 == pytest.approx(1, abs=1e-4)
    assert tripled.exchange_slope == pytest.approx(3, abs=1e-2)
    assert tripled.exchange_r2 == pytest.approx(-3, abs=1e-2)


class RootDivided(LinearAttention):
    """Heads summed, divided by the standard deviation of the first coordinate."""

    def __init__(self, config):
        super().__init__(config)
        self.hook_root = StrictHookPoint("batch 1 1", "divisor", "root")

    def forward(self, resid):
        root = self.hook_root(resid[:, :-1, :1].std(1, correction=0, keepdim=True))
        return super().forward(resid) / root


class RootDividedTransformer(LinearAttentionTransformer):
    plain_forward = False
    attention_type = RootDivided


def test_the_root_of_v_has_elasticity_one_half():
    config = ModelConfig(n_context=20, n_layers=1, normalization="none")
    model = RootDividedTransformer(config, torch.Generator().manual_seed(0)).double()
    model.requires_grad_(False).embed.W_E.copy_(torch.eye(3, 4).roll(1, 0))
    table = ledger(model)
    assert table.elasticity.iloc[0] == pytest.approx(0.5, abs=1e-6)
    assert (table.budget_defect < 1e-6).all()


# ---- after gradient steps ---------------------------------------------------------------


def response(step, variance):
    """d log V' / d log a² of V' = V (1 - γ V)²."""
    return 1 - 2 * step * variance / (1 - step * variance)


@pytest.mark.parametrize("step", [0.1, 0.2])
def test_after_a_gradient_step_the_elasticity_is_that_of_what_is_held(step):
    table = ledger(exact(gradient_steps=[step]), n_prompts=2000)
    last = table.iloc[2]
    assert last.elasticity_held == pytest.approx(1, abs=0.02)
    assert last.elasticity < 0.85
    generator = torch.Generator().manual_seed(0)
    _, own, _ = (sample_prompts(PROMPTS, 2000, generator) for _ in range(3))
    expected = float(response(step, own.x_var).median())
    assert last.elasticity == pytest.approx(expected, abs=0.02)
    # Nothing is divided before.
    assert table.iloc[:2].elasticity.abs().max() < 1e-4


def test_what_is_held_explains_the_divisor_that_v_does_not():
    last = ledger(exact(gradient_steps=[0.1])).iloc[2]
    assert last.replaced_held < 0.05 * last.replaced_v
    assert last.exchange_held_r2 > 0.99
    assert last.exchange_held_slope == pytest.approx(1, abs=0.05)
    assert last.exchange_r2 < 0.9
    assert 0.5 < last.carried_slope < 0.9


# ---- negative controls ------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["branch", "post"])
@pytest.mark.parametrize("seed", [0, 1])
def test_untrained_models_do_not_divide(normalization, seed):
    table = ledger(untrained(seed, normalization=normalization))
    assert table.exchange_r2.max() < 0.1
    assert table.carried_r2.max() < 0.1
    assert table.elasticity.max() < 0.8


def test_a_mute_model_has_missing_numbers_and_no_error():
    model = exact()
    model.unembed.W_U.zero_()
    last = ledger(model).iloc[1]
    assert last.elasticity == pytest.approx(1, abs=1e-4)
    assert last.carried_slope == 0
    assert last.exchange_r2 == pytest.approx(0)
    assert np.isnan(last.dose_left)
    assert np.isnan(last.budget_share)


def test_a_blind_model_holds_no_x():
    model = exact()
    model.embed.W_E.zero_()
    table = ledger(model)
    assert (
        table[["elasticity_held", "same_held", "exchange_r2", "exchange_held_r2"]]
        .isna()
        .all(axis=None)
    )


# ---- identities -------------------------------------------------------------------------


class Denominated(LinearAttention):
    """Heads summed, divided by a positive number that depends on the token."""

    def __init__(self, config):
        super().__init__(config)
        self.hook_denominator = StrictHookPoint("batch position head", "divisor", "denominator")

    def forward(self, resid):
        queries = torch.einsum("bpd,hde->bphe", resid, self.W_Q)
        denominator = self.hook_denominator(1 + queries.square().mean(-1))
        return super().forward(resid) / denominator.mean(-1, keepdim=True)


class DenominatedTransformer(LinearAttentionTransformer):
    plain_forward = False
    attention_type = Denominated


MODELS = {
    "construction": lambda: closed_form(20),
    "gradient steps": lambda: closed_form(20, gradient_steps=[0.2]),
    **{f"untrained {seed}": lambda seed=seed: untrained(seed) for seed in range(3)},
    "post": lambda: untrained(3, normalization="post"),
    "affine": lambda: untrained(4, norm_affine=True, n_layers=3),
    "denominators": lambda: DenominatedTransformer(
        ModelConfig(n_context=20, normalization="none"), torch.Generator().manual_seed(5)
    ).double(),
    "denominators and norms": lambda: DenominatedTransformer(
        ModelConfig(n_context=20, normalization="post"), torch.Generator().manual_seed(6)
    ).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_holds_for_every_model(name):
    table = ledger(MODELS[name](), n_prompts=300)
    assert (table.budget_defect < 1e-6).all()
    assert table.budget_share[:-1].sum() == pytest.approx(table.budget_share["all"])


def test_a_model_in_single_precision_has_the_numbers_of_its_double():
    measures = ["elasticity", "carried_slope", "budget_share", "error", "exchange_held_r2"]
    single, double = (
        division_ledger(load("varied_l1_3e-4_seed0", dtype=dtype), _trained_on(), **SMALL)
        for dtype in (torch.float32, torch.float64)
    )
    assert single["budget_defect"].max() < 0.02
    pd.testing.assert_frame_equal(single[measures], double[measures], atol=2e-3, rtol=2e-3)


def _trained_on():
    return PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1)


def test_exact_symmetries_of_the_weights_leave_the_ledger():
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    model = load("varied_l1_3e-4_seed0", dtype=torch.float64).requires_grad_(False)
    # A rotation that fixes 1.
    fixed = torch.cat([torch.ones(4, 1, dtype=torch.float64), torch.randn(4, 3, **options)], 1)
    basis = torch.linalg.qr(fixed).Q
    turn = torch.eye(4, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(3, 3, **options)).Q
    changes = [
        HeadBasis(0, 1, torch.randn(4, 4, **options)),
        HeadMixing(1, torch.randn(2, 2, **options)),
        NullWrite(1, torch.randn(2, 4, **options)),
        ResidualBasis(basis @ turn @ basis.T),
    ]
    twin = model
    for change in changes:
        twin = change.apply(twin)
    before, after = (division_ledger(m, _trained_on(), **SMALL) for m in (model, twin))
    columns = [f"{name}{end}" for name in MEASURES for end in ("", "_low", "_high")]
    pd.testing.assert_frame_equal(before[columns], after[columns], rtol=1e-4, atol=1e-4)


def test_the_edit_keeps_least_squares_and_stretches_v():
    prompts = sample_prompts(PROMPTS, 30, torch.Generator().manual_seed(0))
    edited = with_spread(prompts, 1.5)
    torch.testing.assert_close(edited.least_squares, prompts.least_squares)
    torch.testing.assert_close(edited.x_mean, prompts.x_mean)
    torch.testing.assert_close(edited.x_var, 2.25 * prompts.x_var)
    followed = with_spread(prompts, torch.full((30,), 2.0, dtype=torch.float64), follow=True)
    torch.testing.assert_close(followed.slope, prompts.slope)
    torch.testing.assert_close(
        followed.least_squares - followed.y_mean, 2 * (prompts.least_squares - prompts.y_mean)
    )


# ---- intervals --------------------------------------------------------------------------


def test_intervals_hold_their_values_and_shrink(construction):
    model = load("varied_l1_3e-4_seed0", dtype=torch.float64)
    few, many = (
        division_ledger(model, _trained_on(), n_prompts=n, n_untrained=1) for n in (200, 3200)
    )
    for table in (few, many, construction):
        for name in MEASURES:
            value, low, high = (table[f"{name}{end}"].dropna() for end in ("", "_low", "_high"))
            assert (low <= high).all(), name
            if not name.endswith("r2"):  # R² near 0 is below all of its resamples
                assert ((low <= value + 1e-9) & (value - 1e-9 <= high)).all(), name
    for name in ("elasticity", "carried_slope", "replaced_held", "exchange_held_slope"):
        width = [(t[f"{name}_high"] - t[f"{name}_low"])[1] for t in (few, many)]
        assert width[1] < 0.6 * width[0], name


def test_the_interval_of_a_median_covers():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        values = torch.randn(101, generator=generator, dtype=torch.float64).exp()
        _, low, high = Resamples(resample_counts(101, generator)).median(values)
        covered += low <= 1 <= high
    assert covered >= 0.92 * 200


def test_median_is_that_of_each_resample():
    values = torch.tensor([3.0, torch.nan, 1.0, 2.0], dtype=torch.float64)
    # The third value counts three times.
    value, low, high = Resamples(torch.tensor([[1.0, 5, 3, 1]])).median(values)
    assert value == 2
    assert low == high == 1
    assert np.isnan(Resamples.none(2).median(torch.full((2,), torch.nan))).all()


# ---- refusals ---------------------------------------------------------------------------


def test_not_applicable():
    with pytest.raises(ValueError, match="not applicable: the model has no divisor"):
        division_ledger(gradient_descent(2, 0.6, n_context=20), PROMPTS)
    with pytest.raises(ValueError, match="not applicable to 2 covariates"):
        division_ledger(closed_form(20, 2), PromptConfig(n_context=20, n_covariates=2))
    with pytest.raises(ValueError, match="n_prompts=10 is too few"):
        division_ledger(closed_form(20), PROMPTS, n_prompts=10)
    with pytest.raises(ValueError, match="n_untrained=0 must be at least 1"):
        division_ledger(closed_form(20), PROMPTS, n_untrained=0)


def test_a_norm_on_the_stream_has_no_exchange_of_what_is_held():
    table = ledger(untrained(0, normalization="post"))
    assert table["exchange_held_r2"].isna().all()
    assert table["exchange_r2"].notna().all()
    assert list(table["before_readout"]) == [False, True, False]


def test_same_seed_same_numbers():
    model = closed_form(20)
    tables = [
        division_ledger(model, PROMPTS, generator=torch.Generator().manual_seed(seed), **SMALL)
        for seed in (1, 1, 2)
    ]
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)
    assert not tables[0].equals(tables[2])
