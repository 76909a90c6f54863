"""What coordinates hold: against the construction, a trained model and planted rotations."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.checkpoint import from_paper_weights
from models.constructed.descent import gradient_descent
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import sample_prompts
from probe.probing.readout import describe, read_out
from probe.probing.varimax import canonical_rotation
from probe.quantities.dictionary import added_quantities, stream_quantities
from probe.symmetry.architecture import ResidualBasis
from probe.symmetry.weights import complement

TRAINED = Path(__file__).parents[2] / "data" / "foreign_l1.safetensors"
VARIED = PromptConfig(n_context=50, x_mean_std=1, x_log_scale=0.7)


@pytest.fixture(scope="module")
def trained():
    return from_paper_weights(load_file(TRAINED), ModelConfig(n_context=50))


@pytest.fixture(scope="module")
def table(trained):
    return read_out(trained, VARIED)


def rows(table, site):
    return table[table["site"] == site].set_index("coordinate")


# After block 0 of the trained model, from an independent implementation: coordinate ->
# (coefficients, R²).
REFERENCE = {
    3: ({"x": -0.31, "x̄": 0.31}, 0.98),
    0: ({"1": -0.85, "y": -0.12, "ȳ": 0.11}, 0.96),
    1: ({"1": -1.09, "y": 0.08, "ȳ": -0.10}, 0.95),
    2: ({"1": 1.21}, 0.91),
}


@pytest.mark.parametrize("coordinate", REFERENCE)
def test_trained_model_reads_as_measured_elsewhere(table, coordinate):
    coefficients, r2 = REFERENCE[coordinate]
    row = rows(table, "blocks.0.hook_resid_post").loc[coordinate]
    assert row["r2"] == pytest.approx(r2, abs=0.02)
    for name, value in coefficients.items():
        assert row[name] == pytest.approx(value, abs=0.015)
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_trained_model_divides_in_layer_1(table):
    added = rows(table, "blocks.1.ln1_post.hook_normalized")
    term = added["(C/V)(x−x̄)"]
    assert term[0] == pytest.approx(0.10, abs=0.02)
    assert term[1] == pytest.approx(-0.09, abs=0.02)
    assert added.loc[[0, 1], "1"].tolist() == pytest.approx([0.61, 0.77], abs=0.03)
    assert added.loc[2, "1"] == pytest.approx(-1.69, abs=0.03)
    assert (added.loc[[0, 1], "r2"] > 0.93).all()


def test_canonical_basis_unmixes_y_and_the_constant(trained, table):
    canonical = read_out(trained, VARIED, basis="canonical")
    added = rows(canonical, "blocks.1.ln1_post.hook_normalized")
    plain = rows(table, "blocks.1.ln1_post.hook_normalized")
    holder = int(added["(C/V)(x−x̄)"].abs().idxmax())
    # In the model's basis the term stands beside a constant of .6 or more.
    assert plain.loc[[0, 1], "1"].abs().min() > 0.5
    assert abs(added.loc[holder, "1"]) < 0.1
    assert added.loc[holder, "r2"] > 0.95
    constants = added["1"].abs().nlargest(2)
    assert (constants > 1.2).all()
    rotation = torch.tensor(canonical.attrs["rotation"], dtype=torch.float64)
    turned = ResidualBasis(rotation).apply(trained)
    inputs = sample_prompts(VARIED, 20, torch.Generator().manual_seed(0)).inputs
    torch.testing.assert_close(turned(inputs), trained(inputs))
    again = read_out(turned, VARIED)
    columns = ["r2", "1", "x", "y"]
    np.testing.assert_allclose(again[columns], canonical[columns], atol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
def test_construction_reads_as_it_was_written(p):
    scale = 100.0
    model = closed_form(40, p, scale=scale, exclude_query=True)
    prompts = PromptConfig(n_context=40, n_covariates=p, x_correlation=0.8 if p > 1 else 0)
    table = read_out(model, prompts, n_prompts=480)
    gain = scale**-1
    first = rows(table, "blocks.0.hook_resid_post")
    x, mean = ("x", "x̄") if p == 1 else ("x₁", "x̄₁")
    assert first.loc[0, [x, mean]].tolist() == pytest.approx([gain, -gain], rel=1e-3)
    assert first.loc[p, ["y", "ȳ"]].tolist() == pytest.approx([gain, -gain], rel=1e-3)
    assert (first["r2"][: p + 1] > 0.999).all()
    last = rows(table, f"blocks.{p}.ln1_post.hook_normalized")
    term = "(C/V)(x−x̄)" if p == 1 else "(G₂)(x̃₂·x₁)"
    assert last.loc[p, term] == pytest.approx(-gain, rel=1e-2)
    assert last.loc[p, "r2"] > 0.99
    assert term in last.loc[p, "words"]
    assert table.attrs["order"] == list(range(1, p + 1))


def test_untrained_models_hold_nothing_of_the_kind():
    config = ModelConfig(n_context=50)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(0)).double()
    table = read_out(model, VARIED, n_prompts=240)
    added = rows(table, "blocks.1.ln1_post.hook_normalized")
    assert (added["r2"] < 0.5).all()


def test_elimination_in_the_other_order_is_recognised():
    """Swapping the covariates in the input map makes x_2 the first pivot."""
    model = closed_form(40, 2, scale=100, exclude_query=True)
    with torch.no_grad():
        model.embed.W_E[[1, 2]] = model.embed.W_E[[2, 1]].clone()
    prompts = PromptConfig(n_context=40, n_covariates=2, x_correlation=0.8)
    table = read_out(model, prompts, n_prompts=480)
    assert table.attrs["order"] == [2, 1]
    assert "(G₂)(x₂−x̄₂)" in table.columns


@pytest.mark.parametrize("p", [1, 2, 3])
def test_dictionary_adds_up_to_least_squares(p):
    config = PromptConfig(n_context=20, n_covariates=p, x_correlation=0.5 if p > 1 else 0)
    prompts = sample_prompts(config, 30, torch.Generator().manual_seed(0))
    order = tuple(reversed(range(p)))
    total = prompts.y_mean.clone()
    for layer in range(1, p + 1):
        found = added_quantities(prompts, layer, order)
        assert found.values.shape == (30, 21, len(found.names))
        term = next(i for i, name in enumerate(found.names) if name.startswith(("(G", "(C")))
        total += found.values[:, -1, term]
    torch.testing.assert_close(total, prompts.least_squares)
    stream = stream_quantities(prompts, p, order)
    assert len(set(stream.names)) == len(stream.names)
    assert (stream.values[..., 0] == 1).all()


def test_canonical_rotation_undoes_a_planted_one():
    generator = torch.Generator().manual_seed(0)
    loadings = torch.zeros(5, 4, dtype=torch.float64)
    loadings[0] = torch.tensor([0, 0, 1.4, -1.4])
    loadings[1, 0] = loadings[2, 0] = 0.3
    loadings[3, 1] = loadings[4, 1] = 0.1
    rest = complement(torch.ones(1, 4, dtype=torch.float64))
    for _ in range(5):
        random = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        turn = rest.T @ torch.linalg.qr(random).Q @ rest + 0.25
        rotation = canonical_rotation([loadings @ turn])
        ones = torch.ones(4, dtype=torch.float64)
        torch.testing.assert_close(rotation @ ones, ones)
        found = loadings @ turn @ rotation
        centred = found - found.mean(1, keepdim=True)
        assert centred[0].abs().sort().values[:2].max() < 1e-6
        free = [c for c in range(4) if abs(centred[0, c]) < 1e-6]
        x, y = found[1, free].abs(), found[3, free].abs()
        assert x.argmax() != y.argmax()


def test_words():
    sizes = {"1": 1.0, "x": 2.0, "y": 0.001}
    words = describe(3, {"1": -0.5, "x": 0.31, "y": 0.2}, sizes)
    assert words == "coordinate 3 = −0.50 + 0.31·x"
    sizes |= {"x̄": 1.0}
    assert describe(1, {"x": 0.3, "x̄": -0.31, "y": 0}, sizes) == "coordinate 1 = 0.30·(x−x̄)"
    assert describe(1, {"x−x̄": 0.5}, {"x−x̄": 1.0}) == "coordinate 1 = 0.50·(x−x̄)"
    assert describe(1, {"x": 0.3, "x̄": 0.02}, sizes) == "coordinate 1 = 0.30·x"
    assert describe(0, dict.fromkeys(sizes, 0.0), sizes) == "coordinate 0 = 0"


@pytest.mark.parametrize("basis", ["model", "canonical"])
def test_without_a_generator_the_seed_is_zero(basis):
    model, options = closed_form(10), {"basis": basis, "n_prompts": 48}
    prompts = PromptConfig(n_context=10)
    tables = [
        read_out(model, prompts, generator=generator, **options)
        for generator in (None, *(torch.Generator().manual_seed(seed) for seed in (0, 1)))
    ]
    assert tables[0].equals(tables[1])
    assert tables[0].attrs == tables[1].attrs
    assert not tables[0].equals(tables[2])


def test_bad_input_is_refused(trained):
    with pytest.raises(ValueError, match="basis"):
        read_out(trained, VARIED, basis="sparse")
    with pytest.raises(ValueError, match="canonical"):
        read_out(gradient_descent(1, 0.5, n_context=50), VARIED, basis="canonical")
    with pytest.raises(ValueError, match="inputs have shape"):
        read_out(trained, PromptConfig(n_context=50, n_covariates=2))
    with pytest.raises(ValueError, match="n_prompts"):
        read_out(trained, VARIED, n_prompts=10)
    with pytest.raises(ValueError, match="inputs have shape"):
        read_out(trained, PromptConfig(n_context=20))
