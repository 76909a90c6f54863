"""What a matcher owes its user: it finds what was planted, and it touches nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.elimination import closed_form
from probe.matching import functional, gauge, null
from probe.matching import signed_permutation as permuted
from probe.matching.alignment import align
from probe.matching.construction_family import ConstructionFamily, has_construction
from probe.matching.construction_family import has_construction_steps as has_steps
from probe.matching.pair import is_construction
from probe.matching.planted import relabelled
from probe.symmetry.architecture import HeadMixing

N = 20
LEVELS = ("signed_permutation", "gauge", "functional")


@settings(max_examples=12, deadline=None)
@given(
    d=st.sampled_from([2, 3, 4, 5, 7, 8]),
    n_heads=st.integers(1, 4),
    n_layers=st.integers(1, 4),
    normalization=st.sampled_from(["branch", "none"]),
    seed=st.integers(0, 10**6),
)
def test_a_planted_signed_permutation_of_a_random_model_comes_back(
    d, n_heads, n_layers, normalization, seed
):
    """With the heads of every layer in another order, each of them found exactly."""
    config = ModelConfig(
        d_model=d, n_heads=n_heads, n_layers=n_layers, n_context=6, normalization=normalization
    )
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    weights = null.untrained(LinearAttentionTransformer(config), generator)
    order, signs = rng.permutation(d), rng.choice([1.0, -1.0], d)
    moved = relabelled(weights, config, order, signs)
    shuffles = [rng.permutation(n_heads) for _ in range(n_layers)]
    for layer, shuffle in enumerate(shuffles):
        exchange = torch.eye(n_heads, dtype=torch.float64)[shuffle.tolist()]
        moved = HeadMixing(layer, exchange).transform(moved, config)
    found = permuted.best_match(
        *(permuted.parts_of(one, config, d, last_only=False) for one in (moved, weights))
    )
    assert (found.order == order).all()
    assert (found.signs == signs).all()
    assert found.score == pytest.approx(1, abs=1e-9)
    for assigned, shuffle in zip(found.heads, shuffles, strict=True):
        assert (assigned == np.argsort(shuffle)).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_matcher_that_fails_half_way_leaves_every_tensor_as_it_was(level, monkeypatch):
    model, reference = closed_form(N, scale=3), closed_form(N, scale=10)
    room, name = {
        "signed_permutation": (permuted, "best_match"),
        "gauge": (gauge, "gauge_match"),
        "functional": (functional, "functional_match"),
    }[level]
    matcher, calls = getattr(room, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("half way")
        return matcher(*args, **kwargs)

    def content():
        return [
            (key, value.numpy().tobytes(), value.data_ptr())
            for one in (model, reference)
            for key, value in one.state_dict().items()
        ]

    monkeypatch.setattr(room, name, failing)
    monkeypatch.setattr(null, "_cache", {})
    before = content()
    with pytest.raises(RuntimeError, match="half way"):
        align(model, reference, level)
    assert len(calls) == 2
    assert content() == before
    assert null._cache == {}, "half a null distribution was kept"
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_only_the_initial_seed_of_a_generator_counts(monkeypatch):
    monkeypatch.setattr(null, "FEW_DRAWS", 4)
    model = closed_form(N, scale=10)
    generator = torch.Generator().manual_seed(5)
    first = align(model, model, "functional", generator=generator)
    untouched = torch.Generator().manual_seed(5)
    assert torch.equal(generator.get_state(), untouched.get_state())
    torch.rand(7, generator=generator)
    again = align(model, model, "functional", generator=generator)
    assert again.null is first.null
    other = align(model, model, "functional", generator=torch.Generator().manual_seed(6))
    assert not np.allclose(other.null.score, first.null.score)
    default = align(model, model, "functional")
    seeded = align(model, model, "functional", generator=torch.Generator().manual_seed(0))
    assert default.null is seeded.null


def test_the_null_loops_show_how_far_they_are(monkeypatch, capsys):
    """A bar on a terminal, none in a file."""
    shown = []
    bar = null.tqdm
    monkeypatch.setattr(null, "tqdm", lambda it, **kw: shown.append(kw) or bar(it, **kw))
    monkeypatch.setattr(null, "FEW_DRAWS", 3)
    monkeypatch.setattr(null, "DRAWS", 3)
    monkeypatch.setattr(null, "_cache", {})
    model = closed_form(N, scale=10)
    for level in LEVELS:
        align(model, model, level)
    assert len(shown) == 2 * len(LEVELS)
    assert all(kw["disable"] is None and kw["leave"] is False for kw in shown)
    assert capsys.readouterr().err == ""


def test_which_shapes_have_a_construction():
    config = closed_form(N, 2).cfg

    def changed(**changes):
        return ModelConfig(**(config.model_dump() | changes))

    assert has_construction(config)
    assert has_steps(config)
    assert has_steps(changed(d_model=7))
    assert has_steps(changed(norm_affine=True))
    for changes in ({"d_model": 7}, {"norm_affine": True}, {"n_layers": 2}):
        assert not has_construction(changed(**changes))
        with pytest.raises(ValueError, match=r"models\.closed_form"):
            ConstructionFamily.for_model(changed(**changes))
    for normalization in ("post", "none"):
        assert not has_steps(changed(normalization=normalization))
        with pytest.raises(ValueError, match=normalization):
            ConstructionFamily.for_model(changed(normalization=normalization))
    assert is_construction(closed_form(N, 2))
    assert not is_construction(LinearAttentionTransformer(config))
