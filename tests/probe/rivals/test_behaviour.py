"""Behaviour measured against rivals: distances, lines, defects, sensitivity."""

import pytest
import torch

from models import PromptConfig, Prompts, sample_prompts
from probe.rivals import algorithms
from probe.rivals.behaviour import (
    IN_DISTRIBUTION,
    LENGTHS,
    conditions,
    distances,
    further_measures,
    separations,
    where_finite,
)
from probe.rivals.fitting import climb
from probe.rivals.predictor import Predictor

CONFIG = PromptConfig()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def newton(k):
    return lambda inputs: algorithms.newton(Prompts.from_inputs(inputs), k)


@pytest.fixture(scope="module")
def measured():
    """Newton with 4 steps, its ladder and its tables."""
    generator = seeded()
    predictor = Predictor(newton(4))
    fitted = sample_prompts(CONFIG, 128, generator)
    ladder = climb(fitted, predictor(fitted))
    batches = conditions(CONFIG, 256, generator, any_length=True)
    return predictor, ladder, batches, distances(predictor, ladder, batches, generator)


# ---- conditions -------------------------------------------------------------------------


@pytest.mark.parametrize("n_covariates", [1, 2])
def test_conditions_shift_what_they_say(n_covariates):
    config = PromptConfig(n_covariates=n_covariates)
    batches = conditions(config, 400, seeded(), any_length=True)
    base = batches[IN_DISTRIBUTION]
    torch.testing.assert_close(batches["x doubled"].x, 2 * base.x)
    torch.testing.assert_close(batches["x doubled"].query, 2 * base.query)
    torch.testing.assert_close(batches["x halved"].x_var, base.x_var / 4)
    torch.testing.assert_close(batches["slope times 3"].slope, 3 * base.slope)
    # The line of each prompt stays when x moves.
    torch.testing.assert_close(batches["x times 4"].slope, base.slope, rtol=0.5, atol=0.2)
    assert (batches["heavy tails"].x.std() > 1.2 * base.x.std()).item()
    assert {name: len(batch) for name, batch in batches.items()} == dict.fromkeys(batches, 400)
    assert batches["N halved"].n_context == 10
    assert batches["N doubled"].n_context == 40
    assert not set(LENGTHS) & set(conditions(config, 8, seeded(), any_length=False))


def test_least_squares_is_unmoved_by_scale_and_outliers_move_it():
    batches = conditions(CONFIG, 200, seeded(), any_length=False)
    base, outlier = batches[IN_DISTRIBUTION], batches["outlier"]
    assert (outlier.y != base.y).sum() == 200
    assert ((outlier.least_squares - base.least_squares).abs() > 1e-3).all()


# ---- distances --------------------------------------------------------------------------


def test_distance_to_itself_is_zero_under_every_condition(measured):
    *_, table = measured
    own = table.query("family == 'Newton' and k == 4 and not query_row")
    assert len(own) == 11
    assert own.value.max() < 1e-20
    others = table.query("family == 'Newton' and k == 5 and not query_row and condition != 'x'")
    assert (others.value > 1e-6).all()


def test_table_is_tidy_and_intervals_hold_their_values(measured):
    *_, table = measured
    assert not table.duplicated(["condition", "family", "k", "query_row"]).any()
    finite = table[table.value < 1e20]
    assert (finite.ci_low <= finite.value * (1 + 1e-9)).all()
    assert (finite.value <= finite.ci_high * (1 + 1e-9)).all()


def test_distance_to_zero_is_the_second_moment_over_the_variance(measured):
    predictor, _, batches, table = measured
    predictions = predictor(batches[IN_DISTRIBUTION])
    row = table.query("family == 'zero' and not query_row and condition == 'in distribution'")
    expected = predictions.square().mean() / predictions.var(correction=0)
    assert row.value.item() == pytest.approx(expected.item())


def test_best_k_curve_has_its_minimum_at_the_true_k(measured):
    *_, table = measured
    curve = table.query("family == 'Newton' and not query_row and condition == 'in distribution'")
    assert curve.loc[curve.value.idxmin(), "k"] == 4


def test_separation_of_rivals(measured):
    predictor, ladder, batches, _ = measured
    pair = ladder.index.query("family in ('least squares', 'zero') and not query_row").index
    here = {IN_DISTRIBUTION: batches[IN_DISTRIBUTION]}
    matrix = separations(predictor, ladder.take(pair), here)[IN_DISTRIBUTION]
    assert matrix.diagonal().abs().max() == 0
    expected = here[IN_DISTRIBUTION].least_squares.square().mean()
    expected = expected / predictor(here[IN_DISTRIBUTION]).var()
    torch.testing.assert_close(matrix[0, 1], expected)


def test_conditions_on_which_a_model_diverges_are_left_out():
    def diverging(inputs):
        values = Prompts.from_inputs(inputs).least_squares
        return torch.where(inputs[:, :, 1].abs().amax(1) > 6, torch.inf, values)

    batches = conditions(CONFIG, 100, seeded(), any_length=False)
    kept = where_finite(Predictor(diverging), batches)
    assert IN_DISTRIBUTION in kept
    assert "x times 4" not in kept


# ---- further measures -------------------------------------------------------------------


def test_further_measures_of_least_squares_and_newton(measured):
    _, ladder, batches, _ = measured
    chosen = ladder.index.query(
        "(family == 'least squares' or (family == 'Newton' and k in (1, 4))) and not query_row"
    )
    predictor = Predictor(lambda inputs: Prompts.from_inputs(inputs).least_squares)
    table = further_measures(
        predictor, ladder.take(chosen.index), {IN_DISTRIBUTION: batches[IN_DISTRIBUTION]}, seeded()
    )
    value = table.set_index(["measure", "family", "k"]).value
    assert value["line distance", "least squares", 1] < 1e-20
    assert value["line distance", "Newton", 1] > value["line distance", "Newton", 4] > 1e-4
    assert value["sensitivity cosine", "least squares", 1] > 1 - 1e-9
    assert value["sensitivity cosine", "Newton", 1] < value["sensitivity cosine", "Newton", 4] < 1
    for defect in ("(x, u) doubled", "y + x", "x + 1", "y tripled"):
        assert value[f"defect: {defect}", "model", 0] < 1e-20
    assert value["defect: y tripled", "Newton", 4] < 1e-20
    assert value["defect: (x, u) doubled", "Newton", 4] > 1e-3


def test_line_distance_of_a_model_that_is_no_line_in_the_query():
    # A wiggle that is odd around nothing a line can follow leaves the induced line alone.
    prompts = sample_prompts(CONFIG, 400, seeded())
    ladder = climb(prompts, prompts.least_squares)
    chosen = ladder.index.query("family == 'least squares' and not query_row").index

    def wiggling(inputs):
        return Prompts.from_inputs(inputs).least_squares + 0.5 * torch.sin(40 * inputs[:, -1, 1])

    here = {IN_DISTRIBUTION: prompts}
    table = further_measures(Predictor(wiggling), ladder.take(chosen), here, seeded())
    distance = table.loc[table.measure == "line distance", "value"].item()
    plain = 0.125 / prompts.least_squares.var().item()
    assert distance < plain
