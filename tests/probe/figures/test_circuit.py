import pytest

from models import closed_form, coordinate_names
from probe.figures.circuit import TAPS, circuit, circuit_panels
from probe.figures.style import style
from probe.matching.circuit import circuit_edges


def taps(edges, layer, head):
    """Coordinates each tap of a head touches."""
    own = edges[(edges["layer"] == layer) & (edges["head"] == head) & (edges.weight > 1e-9)]
    return {tap: set(rows.coordinate) for tap, rows in own.groupby("tap")}


def test_the_construction_reads_and_writes_what_its_derivation_says():
    edges = circuit_edges(closed_form(20), coordinate_names())
    assert taps(edges, 0, 0)["query"] == taps(edges, 0, 0)["key"] == {"const", "spare"}
    eliminate, divide = taps(edges, 1, 0), taps(edges, 1, 1)
    assert eliminate["query"] == eliminate["key"] == {"x_1"}
    assert eliminate["value"] == {"y"}
    assert divide["query"] == {"const", "spare"}
    assert divide["key"] == divide["value"] == {"x_1"}
    assert divide["write"] == {"const", "spare"}
    readout = edges[(edges.stage == "readout") & (edges.weight > 0)]
    assert set(readout.coordinate) == {"y"}


def test_widths_do_not_depend_on_the_scale_of_factors():
    model = closed_form(20)
    before = circuit_edges(model, coordinate_names())
    with_other_scale = model.requires_grad_(False)
    with_other_scale.blocks[1].attn.W_Q[0] *= 100
    with_other_scale.blocks[1].attn.W_V[0] /= 100
    after = circuit_edges(with_other_scale, coordinate_names())
    assert (before.weight - after.weight).abs().max() < 1e-12


def test_unused_heads_contribute_nothing():
    edges = circuit_edges(closed_form(20, 2), coordinate_names(2))
    share = edges[edges.stage == "head"].groupby(["layer", "head"]).contribution.first()
    assert share[0, 1] == 0
    assert (share.drop((0, 1)) > 0).all()


def test_it_is_drawn_with_a_lane_per_coordinate():
    names = coordinate_names(2)
    edges = circuit_edges(closed_form(20, 2), names)
    with style():
        ax = circuit(edges)
        shown = {text.get_text() for text in ax.texts}
        assert {"x₁", "x₂", "y", "const", "spare", "ŷ", "layer 2"} <= shown
        figure = circuit_panels({"learned": edges, "constructed": edges})
    assert [each.get_title() for each in figure.axes] == ["learned", "constructed"]
    # Legible in grey: taps that share a place have dashes of their own.
    assert len({str(dashes) for tap, (_, dashes) in TAPS.items() if tap != "write"}) == 3


def test_names_must_fit():
    with pytest.raises(ValueError, match="3 names for 4 coordinates"):
        circuit_edges(closed_form(20), ("a", "b", "c"))
