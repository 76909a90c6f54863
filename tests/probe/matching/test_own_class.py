"""A class of model with a forward pass of its own is measured as itself, or refused."""

import pytest
import torch

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import coordinate_names
from models.constructed.elimination import closed_form
from probe.matching import null
from probe.matching.alignment import align
from probe.matching.circuit import circuit_edges
from probe.matching.construction_family import ConstructionFamily
from probe.matching.tables import layer_map_tables, weight_tables
from probe.symmetry.architecture import HeadBasis
from probe.symmetry.catalogue import known_directions
from probe.symmetry.count import symmetry_count
from probe.symmetry.weights import weights_of

N = 20
PLAIN = LinearAttentionTransformer


class Squashed(PLAIN):
    """Weights mean something else: the stream passes through tanh after every block."""

    def forward(self, inputs):
        resid = self.hook_embed(self.embed(inputs.to(self.dtype)))
        for block in self.blocks:
            resid = block(torch.tanh(resid))
        return self.hook_prediction(self.unembed(resid))


class FirstOnly(PLAIN):
    """The last block is never run."""

    def forward(self, inputs):
        resid = self.hook_embed(self.embed(inputs.to(self.dtype)))
        return self.hook_prediction(self.unembed(self.blocks[0](resid)))


class Renamed(PLAIN):
    """Computes the same, and says so."""

    plain_forward = True


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(null, "DRAWS", 6)
    monkeypatch.setattr(null, "FEW_DRAWS", 6)


def held_by(cls, model):
    """The weights of a model in a model of another class."""
    other = cls(model.cfg).double().requires_grad_(False)
    other.load_state_dict(weights_of(model))
    return other


def test_functional_alignment_runs_the_model_itself(few_draws):
    plain = closed_form(N, scale=2)
    squashed = held_by(Squashed, plain)
    itself = align(squashed, squashed, "functional")
    assert itself.score == pytest.approx(1, abs=1e-9)
    # The same weights in another class compute something else.
    for pair in ((squashed, plain), (plain, squashed)):
        found = align(*pair, "functional")
        assert found.score < 0.95
        assert align(plain, plain, "functional").score == pytest.approx(1, abs=1e-9)
    # Heads are read where they write, not off the weights.
    heads = itself.table[itself.table.kind == "head"]
    assert heads.r2.min() == pytest.approx(1, abs=1e-6)


def test_null_models_are_of_the_models_own_class(few_draws):
    plain = closed_form(N, scale=2)
    ours, theirs = (align(one, plain, "functional") for one in (held_by(Squashed, plain), plain))
    assert (ours.null.kind == theirs.null.kind).all()
    assert (ours.null.score - theirs.null.score).abs().max() > 0.01
    same = align(held_by(Renamed, plain), plain, "functional")
    assert (same.null.score - theirs.null.score).abs().max() < 1e-12


def test_symmetries_are_counted_on_the_model_itself():
    config = ModelConfig(n_context=4, d_model=3, n_heads=1)
    plain = PLAIN(config, torch.Generator().manual_seed(1)).double().requires_grad_(False)
    other = held_by(FirstOnly, plain)
    unused = 3 * config.n_heads * config.d_model**2
    assert symmetry_count(other) > symmetry_count(plain)
    assert symmetry_count(other) >= unused
    assert symmetry_count(held_by(Renamed, plain)) == symmetry_count(plain)


def test_mathematics_of_weights_refuses_another_forward_pass():
    plain = closed_form(N, scale=2)
    squashed, names = held_by(Squashed, plain), coordinate_names(1)
    refused = [
        lambda: align(squashed, plain),
        lambda: align(squashed, plain, "gauge"),
        lambda: align(plain, squashed, "gauge"),
        lambda: known_directions(squashed),
        lambda: HeadBasis(0, 0, torch.eye(4, dtype=torch.float64)).apply(squashed),
        lambda: circuit_edges(squashed, names),
        lambda: weight_tables(squashed, names),
        lambda: layer_map_tables(squashed, names),
    ]
    for ask in refused:
        with pytest.raises(ValueError, match=r"Squashed.*plain_forward = True"):
            ask()


def test_a_class_that_declares_the_plain_forward_pass_is_taken(few_draws):
    plain = closed_form(N, scale=2)
    renamed = held_by(Renamed, plain)
    for level in ("signed_permutation", "gauge"):
        found = align(renamed, plain, level)
        assert found.score == pytest.approx(1, abs=1e-9)
        assert type(found.model) is Renamed
    moved = HeadBasis(0, 0, 2 * torch.eye(4, dtype=torch.float64)).apply(renamed)
    assert type(moved) is Renamed

    class Child(Renamed):
        """Says nothing itself: may differ."""

    with pytest.raises(ValueError, match="Child"):
        align(held_by(Child, plain), plain, "gauge")


def test_the_nearest_construction_says_how_it_was_chosen(few_draws):
    plain = closed_form(N, scale=2)
    family = ConstructionFamily.for_model(plain.cfg)
    notes = align(held_by(Squashed, plain), family, "functional").notes
    assert any("Squashed" in note for note in notes)
    assert not any("chosen by weights" in note for note in align(plain, family, "gauge").notes)
