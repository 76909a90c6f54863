"""Planted symmetries are found, other models are not, and bad pairs are refused."""

import time

import numpy as np
import pytest
import torch

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import coordinate_names
from models.constructed.descent import gradient_descent
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import sample_prompts
from probe.matching import null
from probe.matching import signed_permutation as permuted
from probe.matching.alignment import align
from probe.matching.construction_family import ConstructionFamily
from probe.matching.gauge import gauge_match, invariants
from probe.matching.pair import is_construction
from probe.matching.planted import noisy, relabelled, rotated, scrambled
from probe.symmetry.architecture import NullWrite, ResidualBasis
from probe.symmetry.weights import centring, complement, input_map, weights_of

N = 20


@pytest.fixture
def reference():
    return closed_form(N, scale=10)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("p", "trials"), [(1, 60), (2, 30), (3, 3)])
def test_signed_permutations_are_recovered(p, trials):
    model = closed_form(N, p, scale=10)
    config, weights = model.cfg, weights_of(model)
    d = config.d_model
    target = permuted.parts_of(weights, config, d, last_only=True)
    generator, rng = torch.Generator().manual_seed(p), np.random.default_rng(p)
    for _ in range(trials):
        order, signs = rng.permutation(d), rng.choice([1.0, -1.0], d)
        planted = relabelled(weights, config, order, signs, generator)
        for copy, least in ((planted, 1 - 1e-9), (noisy(planted, generator), 0.99)):
            parts = permuted.parts_of(copy, config, d, last_only=True)
            found = permuted.best_match(parts, target)
            assert (found.order == order).all()
            assert (found.signs == signs).all()
            assert least < found.score <= 1 + 1e-9
            assert found.runner_up < found.score


def test_wide_models_are_matched_by_assignment():
    model = closed_form(N, 5, scale=10)
    config, weights = model.cfg, weights_of(model)
    rng = np.random.default_rng(0)
    target = permuted.parts_of(weights, config, 8, last_only=True)
    order, signs = rng.permutation(8), rng.choice([1.0, -1.0], 8)
    parts = permuted.parts_of(relabelled(weights, config, order, signs), config, 8, last_only=True)
    start = time.perf_counter()
    found = permuted.best_match(parts, target)
    assert time.perf_counter() - start < 20
    assert not found.exhaustive
    assert (found.order == order).all()
    assert (found.signs == signs).all()


def test_exhaustive_search_is_optimal_and_fast():
    """Brute force over all maps and head orders, on unrelated models."""
    config = ModelConfig(n_context=N, readout="query")
    generator = torch.Generator().manual_seed(0)
    parts = [
        permuted.parts_of(
            null.untrained(LinearAttentionTransformer(config), generator), config, 4, last_only=True
        )
        for _ in range(2)
    ]
    start = time.process_time()
    found = permuted.best_match(*parts)
    assert time.process_time() - start < 0.2
    search = permuted.SignedPermutationSearch(*parts)
    best = -np.inf
    for order in permuted.itertools.permutations(range(4)):
        for signs in permuted.itertools.product((1.0, -1.0), repeat=4):
            rows, pairs = search.evaluate(np.array([order]), np.array([signs]))
            heads = np.maximum(
                pairs[0, :, 0, 0] + pairs[0, :, 1, 1], pairs[0, :, 0, 1] + pairs[0, :, 1, 0]
            )
            best = max(best, rows[0] + heads.sum())
    assert found.score == pytest.approx(best / search.n_parts, abs=1e-12)


@pytest.mark.parametrize(("p", "trials"), [(1, 40), (2, 10)])
def test_gauge_distance_of_scrambled_copies_is_zero(p, trials):
    model = closed_form(N, p, scale=10)
    config, weights = model.cfg, weights_of(model)
    generator = torch.Generator().manual_seed(0)
    target = invariants(weights, config, last_only=True)
    copies = [scrambled(weights, config, generator) for _ in range(trials)]
    inputs = sample_prompts(PromptConfig(n_context=N, n_covariates=p), 4, generator).inputs
    moved = model.like(copies[0])
    assert (moved.embed.W_E - model.embed.W_E).norm() > 0.5
    torch.testing.assert_close(moved(inputs), model(inputs), rtol=1e-4, atol=1e-4)
    reduced = [invariants(copy, config, last_only=True) for copy in copies]
    assert gauge_match(reduced, [target], free_last=True).distance.max() < 1e-8


def test_gauge_distance_sees_what_is_no_symmetry(reference):
    config, weights = reference.cfg, weights_of(reference)
    generator = torch.Generator().manual_seed(0)
    flip = relabelled(weights, config, range(4), (-1, 1, 1, 1))
    negative = {n: -v if n == "blocks.1.attn.W_V" else v for n, v in weights.items()}
    near = [flip, negative, noisy(weights, generator)]
    found = gauge_match(
        [invariants(one, config, True) for one in near], [invariants(weights, config, True)], True
    )
    assert (found.distance > 1e-3).all()
    assert found.distance[2] < 0.1


def test_gauge_with_flatten_readout_and_deficient_embedding():
    config = ModelConfig(n_context=4)
    generator = torch.Generator().manual_seed(3)
    weights = null.untrained(LinearAttentionTransformer(config), generator)
    weights["embed.W_E"] -= weights["embed.W_E"].mean(1, keepdim=True)  # nothing along 1
    target = invariants(weights, config, last_only=False)
    copies = [weights]
    for _ in range(3):
        copy = NullWrite(0, normal(generator, 2, 4)).transform(weights, config)
        rest = complement(torch.ones(1, 4, dtype=torch.float64))
        turn = torch.linalg.qr(normal(generator, 3, 3)).Q
        copies.append(ResidualBasis(rest.T @ turn @ rest + 0.25).transform(copy, config))
    found = gauge_match([invariants(c, config, False) for c in copies], [target], free_last=False)
    assert found.distance.max() < 1e-8


@pytest.mark.parametrize("level", ["signed_permutation", "gauge", "functional"])
def test_identical_models_score_one(reference, level):
    found = align(reference, reference, level)
    assert found.score == pytest.approx(1, abs=1e-9)
    assert found.distance == pytest.approx(0, abs=1e-7)
    assert found.p_value <= 0.01
    assert found.mapping == {i: (name, 1) for i, name in enumerate(coordinate_names(1))}
    assert set(found.null["kind"]) == {"untrained", "other algorithm"}
    assert len(found.table)


def test_levels_tell_same_weights_same_function_and_other_apart(reference):
    config, weights = reference.cfg, weights_of(reference)
    turned = reference.like(scrambled(weights, config, torch.Generator().manual_seed(1)))
    scores = {
        level: align(turned, reference, level)
        for level in ("signed_permutation", "gauge", "functional")
    }
    assert scores["signed_permutation"].p_value > 0.05
    assert scores["gauge"].distance < 1e-8
    assert scores["functional"].score > 0.99
    aligned = weights_of(scores["gauge"].model)
    torch.testing.assert_close(input_map(aligned), input_map(weights), atol=1e-9, rtol=1e-9)
    for name in ("blocks.0.attn.W_V", "blocks.1.attn.W_V"):
        ours, theirs = (
            # What layer norm subtracts is not aligned; heads and their scales are.
            value[name].flatten(0, 1) @ centring(4)
            for value in (aligned, weights)
        )
        angles = torch.linalg.svdvals(torch.linalg.qr(ours.T).Q.T @ torch.linalg.qr(theirs.T).Q)
        assert angles.max() == pytest.approx(1, abs=1e-9)
    generator = torch.Generator().manual_seed(7)
    other = reference.like(null.other_algorithm(config, generator))
    for level in scores:
        assert align(other, reference, level).p_value > 0.01


def test_mapping_in_words_and_aligned_model(reference):
    weights = relabelled(weights_of(reference), reference.cfg, (3, 0, 2, 1), (1, 1, -1, 1))
    found = align(reference.like(weights), reference)
    assert found.words[2:] == ("learned 2 = −const", "learned 3 = x_1")
    for name, value in found.model.named_parameters():
        if "W_K" not in name and "W_Q" not in name:
            torch.testing.assert_close(value, dict(reference.named_parameters())[name])
    assert any("approximate" in note for note in found.notes)
    assert any("certified" in note for note in found.notes)


def test_surplus_coordinates_and_heads_are_reported(reference):
    wide = LinearAttentionTransformer(
        ModelConfig(d_model=5, n_heads=3, n_context=N, readout="query"),
    ).double()
    wide.requires_grad_(False)
    for name, value in reference.named_parameters():
        target = dict(wide.named_parameters())[name]
        target.zero_()
        target[tuple(slice(n) for n in value.shape)] = value
    wide.embed.W_E[1, 4] = 0.001
    wide.blocks[0].attn.W_V[2, 0, 0] = 7
    wide.blocks[0].attn.W_Q[2, 0, 0] = wide.blocks[0].attn.W_K[2, 0, 0] = 1
    found = align(wide, reference)
    assert found.mapping == {i: (name, 1) for i, name in enumerate(coordinate_names(1))}
    surplus = found.table[found.table["reference"] == "unmatched"]
    assert surplus[surplus["part"] == "coordinate"]["norm"].item() == pytest.approx(0.001)
    assert 7.0 in surplus["norm"].round(9).tolist()
    back = align(reference, wide, names=[*coordinate_names(1), "extra"])
    assert "extra" in back.table.loc[back.table["learned"] == "unmatched", "reference"].tolist()


def test_nearest_construction_finds_its_own_free_choices():
    family = ConstructionFamily.for_model(closed_form(N).cfg)
    generator = torch.Generator().manual_seed(0)
    for units, const, spare, reading in (
        ((5.0, -3.0), 0.7, 0.0, 1.0),
        ((2.0, 4.0), -0.6, -0.6, 0.5),
        ((8.0, 2.0), 1.0, 1.0, 0.0),
    ):
        member = family.member(units, const, spare, reading)
        learned = rotated(member.weights, family.base.cfg, generator)
        found = family.nearest(learned, family.base.cfg)
        assert found.units == pytest.approx(units, rel=1e-6)
        assert (found.const, found.spare) == pytest.approx((const, spare), rel=1e-6)
        assert found.reading == reading


def test_every_model_has_a_nearest_construction():
    family = ConstructionFamily.for_model(closed_form(N, 2).cfg)
    weights = {n: torch.zeros_like(v) for n, v in weights_of(family.base).items()}
    for learned in (weights, weights_of(closed_form(N, 2))):
        learned["embed.b_E"][:] = 0  # no constant to read
        found = family.nearest(learned, family.base.cfg)
        assert family.model_of(found)(torch.ones(2, N + 1, 4)).isfinite().all()


def test_every_member_of_the_family_computes_least_squares():
    family = ConstructionFamily.for_model(closed_form(N, exclude_query=True).cfg)
    prompts = sample_prompts(PromptConfig(n_context=N), 200, torch.Generator().manual_seed(0))
    for units, const, spare, reading in (
        ((1e3, -2e3), 0.7, 0.0, 1.0),
        ((2e3, 1e3), -0.6, -0.6, 0.5),
        ((-1e3, 1e3), 1.0, 1.0, 0.0),
    ):
        model = family.model_of(family.member(units, const, spare, reading))
        assert is_construction(model)
        error = (model(prompts.inputs) - prompts.least_squares).square().mean()
        assert error < 1e-3 * prompts.least_squares.var()


def test_unrelated_models_are_not_significant():
    """Both kinds of null models as learned ones: at most 1 % of 500 at p <= 1 %, and noise."""
    model = closed_form(N, scale=10)
    config = model.cfg
    target = permuted.parts_of(weights_of(model), config, 4, last_only=True)

    def scorer(models):
        parts = (permuted.parts_of(one, config, 4, last_only=True) for one in models)
        return np.array([permuted.best_match(one, target).score for one in parts])

    nulls = null.null_scores(scorer, model, 0, null.DRAWS, ("calibration",))
    draws = null.null_models(model, 250, torch.Generator().manual_seed(1))
    p_values = np.array(
        [null.p_value(score, nulls) for models in draws.values() for score in scorer(models)]
    )
    assert len(p_values) == 500
    assert (p_values <= 0.01).mean() <= 0.01
    assert null.p_value(1.0, nulls) <= 0.01


def test_bad_pairs_are_refused_with_reasons(reference):
    with pytest.raises(ValueError, match="level"):
        align(reference, reference, "permutation")
    descent = gradient_descent(2, 0.5, n_context=N)
    with pytest.raises(ValueError, match="functional"):
        align(descent, reference)
    with pytest.raises(ValueError, match="n_layers"):
        align(gradient_descent(3, 0.5, n_context=N), reference, "functional")
    with pytest.raises(ValueError, match="n_covariates"):
        align(closed_form(N, 2), reference)
    broken = weights_of(reference)
    broken["embed.W_E"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"embed\.W_E holds NaN"):
        align(reference.like(broken), reference)
    affine = LinearAttentionTransformer(ModelConfig(n_context=N, norm_affine=True)).double()
    with pytest.raises(ValueError, match="affine"):
        align(affine, reference, "gauge")
    with pytest.raises(ValueError, match="names"):
        align(reference, reference, names=["a"])
    with pytest.raises(ValueError, match="construction"):
        ConstructionFamily.for_model(ModelConfig(d_model=6))


def test_flatten_readouts_of_the_query_leave_the_last_layer_free():
    """Rotating the last layer's output beside the readout changes nothing that is read."""
    config = ModelConfig(n_context=4)
    generator = torch.Generator().manual_seed(0)
    weights = null.untrained(LinearAttentionTransformer(config), generator)
    weights["unembed.W_U"][:-1] *= 1e-6
    fixed = torch.stack([torch.ones(4, dtype=torch.float64), weights["unembed.W_U"][-1]])
    rest = complement(fixed)
    angle = torch.tensor(0.8, dtype=torch.float64)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])]
    )
    matrix = torch.eye(4, dtype=torch.float64) + rest.T @ (turn - torch.eye(2)) @ rest
    turned = weights | {"blocks.1.attn.W_V": weights["blocks.1.attn.W_V"] @ matrix}
    shell = LinearAttentionTransformer(config).double()
    found = align(shell.like(turned), shell.like(weights), "gauge")
    assert found.distance < 1e-8
    assert any("query token" in note for note in found.notes)
