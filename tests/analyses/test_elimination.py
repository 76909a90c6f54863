"""The scripts as a user runs them, on few models and prompts."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from models import (
    LinearAttentionTransformer,
    PromptConfig,
    closed_form,
    determinant_form,
    sample_prompts,
    save,
)
from probe import load_subject
from probe.figures.style import style
from probe.probing.residuals import coordinate_correlations, held_residuals
from probe.quantities.residuals import residual_quantities

SCRIPT = Path(__file__).parents[2] / "analyses" / "elimination.py"
ELIMINATOR, DETERMINANT = "p2_corr95_l1_1e-3_seed4", "p2_corr0_l1_1e-3_seed1"
VARIED = PromptConfig(
    n_context=40, n_covariates=2, x_log_scale=0.7, x_mean_std=1.0, x_correlation=0.8
)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elimination")
    command = [sys.executable, SCRIPT, "--n-prompts", "400", "--output", folder]
    command += ["--checkpoint", ELIMINATOR, "--names", ELIMINATOR, DETERMINANT, "p2_l1_1e-3_seed0"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_trained_and_constructed_models_get_their_labels(output):
    scores = pd.read_csv(output / "scores.csv")
    labels = scores.drop_duplicates("model").set_index("model").label
    assert labels[ELIMINATOR] == labels["construction (x1, x2)"] == "elimination (x1, x2)"
    assert labels["construction (x2, x1)"] == "elimination (x2, x1)"
    assert labels[DETERMINANT] == labels["construction, determinant"]
    assert labels[DETERMINANT] == "closed form by determinant"
    # Trained on correlations up to 0.95, tested up to 0.8.
    assert labels[f"{ELIMINATOR} on p2"] == labels[ELIMINATOR]
    untrained = labels[labels.index.str.startswith("untrained")]
    assert len(untrained) == 6
    assert (untrained == "–").all()
    assert scores.shuffled_r2.max() < 0.1


def test_shares_are_counts_with_wilson_intervals(output):
    shares = pd.read_csv(output / "figures" / "shares.csv")
    row = shares[(shares.group == "constructed") & (shares["class"] == "elimination")].iloc[0]
    assert (row.models, row.of) == (2, 3)
    # Wilson 1927 for 2 of 3 at 95 %.
    assert row.low == pytest.approx(0.2077, abs=1e-3)
    assert row.high == pytest.approx(0.9385, abs=1e-3)
    totals = shares.groupby(["group", "by"]).share.sum()
    assert totals.to_numpy() == pytest.approx(1.0)


def test_rivals_of_the_same_depth_err_more_than_the_trained_models(output):
    errors = pd.read_csv(output / "figures" / "errors.csv").groupby("who").error.mean()
    rivals = errors[errors.index.str.contains("steps")]
    assert len(rivals) == 3
    assert errors["constructed"] < rivals.min()
    assert rivals.max() < errors["untrained"]


def test_the_figures_name_the_order(output):
    drawn = pd.read_csv(output / "figures" / "coordinates.csv")
    held = drawn[(drawn.kind == "linear readout") & (drawn.layer == 1)].set_index("quantity").value
    assert held["x_2|1"] > 0.9 > held["x_1|2"]
    record = json.loads((output / "run.json").read_text())
    assert set(record["checkpoint_sha256"]) == {ELIMINATOR, DETERMINANT, "p2_l1_1e-3_seed0"}


@pytest.mark.parametrize(
    ("model", "held_first"),
    [
        (closed_form(40, 2, 1e3, exclude_query=True), {"x_2|1", "y|1", "x_1"}),
        (closed_form(40, 2, 1e3, exclude_query=True, order=(2, 1)), {"x_1|2", "y|2", "x_2"}),
        (determinant_form(40, 1e3, exclude_query=True), {"x_1", "x_2", "y"}),
    ],
    ids=["x_1 first", "x_2 first", "determinant"],
)
def test_the_stream_holds_the_residuals_of_its_order_and_no_others(model, held_first):
    held = held_residuals(model, VARIED, n_prompts=300)
    wide = held.pivot(index="quantity", columns="layer", values="r2")
    assert set(wide.index[wide[1] > 0.999]) == held_first
    assert wide.loc["y|12", 2] > 0.999
    assert wide.loc["y|12", 1] < 0.5
    assert (wide[-1] < 0.9).all()


def test_coordinates_follow_residuals():
    model = closed_form(40, 2, 1e3, exclude_query=True)
    found = coordinate_correlations(model, VARIED, torch.eye(5).double(), n_prompts=300)
    of = found.set_index(["layer", "coordinate", "quantity"]).correlation
    assert of[0, 1, "x_2"] > 0.999 > of[0, 1, "x_2|1"]
    assert of[1, 1, "x_2|1"] > 0.999 > of[1, 1, "x_2"]
    # const and spare do not vary after the embedding.
    assert of[-1, 3].abs().max() == 0


def test_residuals_are_orthogonal_to_what_they_are_given(generator):
    prompts = sample_prompts(VARIED.model_copy(update={"n_covariates": 3}), 20, generator)
    quantities = residual_quantities(prompts)
    context = dict(zip(quantities.names, quantities.values[:, :-1].unbind(-1), strict=True))
    assert len(context) == 3 * 4 + 8
    for name, values in context.items():
        for given in name.partition("|")[2]:
            product = (values * context[f"x_{given}"]).mean(1)
            assert product.abs().max() < 1e-9, name
    # At the query y counts as 0: what remains is minus the prediction.
    rest = quantities.values[:, -1, quantities.names.index("y|123")]
    torch.testing.assert_close(rest, -prompts.least_squares)


# ---- models of one's own ------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def own(folder: Path, **changes) -> Path:
    """A construction of two covariates as a checkpoint without a training of its own."""
    model = closed_form(40, 2, 1e3)
    if changes:
        config = model.cfg.model_copy(update=changes)
        model = LinearAttentionTransformer(config, torch.Generator().manual_seed(0)).double()
    return save(model, folder, prompts=VARIED)


def test_ones_own_model_is_classified_and_drawn_everywhere(script, tmp_path):
    mine = own(tmp_path / "mine")
    # By its path once more, and in another writing: it is one model.
    names = (str(mine), f"{mine}/")
    with style():
        config = script["Config"](checkpoint=str(mine), names=names, n_prompts=300)
        output = script["run"](config)
    scores = output.scores.drop_duplicates("model").set_index("model")
    assert scores.label["mine"] == "elimination (x1, x2)"
    assert list(output.sha256) == ["mine"]
    assert output.source == {"mine": str(mine)}
    errors = output.figures["errors"][1]
    mean = errors.groupby("who").error.mean()
    assert mean["mine"] < mean["untrained"]
    assert errors[errors.who == "mine"].models.eq(1).all()
    assert "pivots" in output.figures
    # One run without a penalty: one panel, with points in it.
    (panel,) = output.figures["shares"][0].axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["mine\n(1)"]
    assert panel.containers


def test_ones_own_run_of_a_shipped_name_is_not_counted_with_it(script, tmp_path):
    trained = script["_trained"]
    folder = own(tmp_path / "p2_l1_1e-3_seed0")
    shipped, mine = trained(["p2_l1_1e-3_seed0"], load_subject(folder))
    assert (shipped.group, mine.group) == ("p2", "p2, own")
    # Two models of one name are told apart by their folders.
    assert {shipped.name, mine.name} == {"shipped:p2_l1_1e-3_seed0", str(folder)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"norm_affine": True}, "norm_affine"), ({"normalization": "none"}, "no layer norm")],
)
def test_a_model_it_cannot_draw_is_refused_before_the_work(
    script, tmp_path, monkeypatch, changes, message
):
    mine = own(tmp_path / "mine", **changes)
    work = {"pivot_test": lambda *_, **__: pytest.fail("the work had begun")}
    for name, function in work.items():
        monkeypatch.setitem(script["run"].__globals__, name, function)
    with pytest.raises(ValueError, match=message):
        script["run"](script["Config"](checkpoint=str(mine), names=(DETERMINANT,)))


def test_one_covariate_is_refused_by_name(script):
    with pytest.raises(ValueError, match="varied_l1_3e-4_seed0: "):
        script["run"](script["Config"](names=("varied_l1_3e-4_seed0",)))
