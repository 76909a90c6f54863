"""Figures show what was aligned, with named axes and one colour scale."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from models.constructed.basis import coordinate_names
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from probe.figures.matching import (
    layer_map_panels,
    null_panel,
    pair_panels,
    score_panels,
    weight_panels,
)
from probe.figures.readout import quantity_columns, read_out_panel
from probe.matching.alignment import align
from probe.matching.tables import layer_map_tables, weight_tables
from probe.probing.readout import read_out
from probe.symmetry.architecture import HeadMixing
from probe.symmetry.weights import weights_of


@pytest.fixture
def model():
    return closed_form(20, scale=10)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_layer_maps_do_not_depend_on_how_heads_are_split(model):
    mixing = torch.tensor([[2.0, 1.0], [0.5, -1.0]], dtype=torch.float64)
    mixed = HeadMixing(1, mixing).apply(model)
    names = coordinate_names(1)
    assert not np.allclose(
        weight_tables(mixed, names)["layer 1 A0"], weight_tables(model, names)["layer 1 A0"]
    )
    for ours, theirs in zip(
        layer_map_tables(mixed, names), layer_map_tables(model, names), strict=True
    ):
        pd.testing.assert_frame_equal(ours, theirs)
    eliminate = layer_map_tables(model, names)[1]
    assert eliminate.loc["x_1→y", "S[x_1,y]"] == pytest.approx(-1)
    # The divisor reads half of const and, negated, half of spare.
    assert eliminate.loc["const→const", "S[x_1,x_1]"] == pytest.approx(
        -eliminate.loc["spare→const", "S[x_1,x_1]"]
    )


def test_panels_share_a_scale_and_name_their_axes(model):
    shown = {"learned": model.like(weights_of(model)), "construction": model}
    names = coordinate_names(1)
    for figure in (
        weight_panels({label: weight_tables(one, names) for label, one in shown.items()}),
        layer_map_panels({label: layer_map_tables(one, names) for label, one in shown.items()}),
    ):
        meshes = [ax.collections[0] for ax in figure.axes if ax.collections and ax.get_title()]
        assert len(meshes) >= 4
        assert {mesh.get_clim() for mesh in meshes} == {(-1, 1)}
        assert all(ax.get_xticklabels() for ax in figure.axes if ax.get_title())


def test_read_out_panel_has_a_row_per_coordinate(model):
    table = read_out(model, PromptConfig(n_context=20), n_prompts=96)
    ax = read_out_panel(table)
    assert len(ax.get_yticklabels()) == len(table)
    assert "(C/V)(x−x̄)" in quantity_columns(table)


def test_scores_stand_beside_their_null(model):
    found = align(model, model)
    ax = null_panel([found])
    assert "p = 0.005" in {text.get_text() for text in ax.texts}
    scores = pd.DataFrame(
        {
            "level": ["gauge", "functional"] * 2,
            "score": [0.5, 0.6, 0.7, 0.8],
            "p_value": [0.01, 0.5, 0.01, 0.5],
            "family": ["a", "a", "b", "b"],
        }
    )
    gauge, functional = score_panels(scores).axes
    assert [text.get_text() for text in gauge.texts] == ["1/1", "1/1"]
    assert [text.get_text() for text in functional.texts] == ["0/1", "0/1"]


def test_pairs_are_marked_where_significant():
    pairs = pd.DataFrame(
        {
            "checkpoint": ["a", "b"],
            "reference": ["b", "a"],
            "level": ["gauge", "gauge"],
            "score": [0.9, 0.2],
            "p_value": [0.01, 0.6],
        }
    )
    figure = pair_panels(pairs)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == ["*"]
