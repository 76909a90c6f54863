"""Every listed symmetry keeps predictions; near misses do not; and none is missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import sample_prompts
from probe.symmetry.architecture import LayerScale, ResidualBasis
from probe.symmetry.catalogue import families, known_directions
from probe.symmetry.count import jacobian_rank, prediction_jacobian, symmetry_count
from probe.symmetry.weights import change_basis, weights_of


def random_model(seed: int, **config) -> LinearAttentionTransformer:
    """All weights normal, so that nothing is special; eps so small that it is absent."""
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig(**({"norm_eps": 1e-30, "n_context": 5} | config))
    model = LinearAttentionTransformer(config).double().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(0.5 * noise + name.endswith("ln1_post.w"))
    return model


def prompts_for(model: LinearAttentionTransformer, batch: int = 40) -> torch.Tensor:
    config = PromptConfig(
        n_context=model.cfg.n_context,
        n_covariates=model.cfg.n_covariates,
        noise_std=0.5,
        x_mean_std=1,
    )
    return sample_prompts(config, batch, torch.Generator().manual_seed(1)).inputs


def change_of_predictions(before, after) -> float:
    inputs = prompts_for(before)
    expected = before(inputs)
    return float((after(inputs) - expected).abs().max() / expected.abs().max())


CASES = [
    {"normalization": "branch", "readout": "flatten"},
    {"normalization": "branch", "readout": "query"},
    {"normalization": "branch", "readout": "query", "norm_affine": True},
    {"normalization": "branch", "readout": "flatten", "norm_affine": True, "exclude_query": True},
    {"normalization": "branch", "readout": "query", "n_layers": 1},
    {"normalization": "post", "readout": "flatten"},
    {"normalization": "post", "readout": "query", "norm_affine": True},
    {"normalization": "none", "readout": "query", "exclude_query": True},
    {"normalization": "none", "readout": "flatten", "n_covariates": 2},
    {"normalization": "branch", "readout": "query", "d_model": 5, "n_covariates": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_every_symmetry_keeps_predictions(case):
    model = random_model(3, **case)
    before = weights_of(model)
    generator = torch.Generator().manual_seed(2)
    seen = set()
    for family, identity in families(before, model.cfg):
        step = 0.3 * torch.randn(identity.shape, generator=generator, dtype=torch.float64)
        symmetry = family(identity + step)
        moved = symmetry.apply(model)
        seen.add(type(symmetry).__name__)
        assert change_of_predictions(model, moved) < 1e-9, symmetry
        assert any(
            not torch.allclose(a, b)
            for a, b in zip(moved.parameters(), before.values(), strict=True)
        ), f"{symmetry} did nothing"
    assert {"HeadBasis", "HeadMixing", "ConstantSplit"} <= seen
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), "apply changed its argument"


@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(range(4)),
    sign=st.sampled_from([-1.0, 1.0]),
    along=st.lists(st.floats(-1, 1), min_size=4, max_size=4),
)
def test_permutations_signs_and_reencodings_are_symmetries(seed, order, sign, along):
    model = random_model(seed, d_model=4)
    permutation = torch.eye(4, dtype=torch.float64)[list(order)]
    along = torch.tensor(along, dtype=torch.float64)
    encode = torch.eye(4, dtype=torch.float64) + torch.ones(4, 1) * along
    if abs(torch.linalg.det(encode)) < 0.05:
        return
    moved = ResidualBasis(sign * permutation @ encode).apply(model)
    assert change_of_predictions(model, moved) < 1e-8


def test_affine_norms_absorb_rescalings_and_permutations():
    model = random_model(0, norm_affine=True, readout="flatten")
    matrix = torch.eye(4, dtype=torch.float64)[[2, 0, 3, 1]] * torch.tensor([2.0, -0.5, 3.0, 1.0])
    assert change_of_predictions(model, ResidualBasis(matrix).apply(model)) < 1e-9


def test_near_misses_change_predictions_and_are_refused():
    model = random_model(0)
    weights = weights_of(model)
    name = "blocks.0.attn.W_V"
    negative = model.like(weights | {name: -weights[name]})
    assert change_of_predictions(model, negative) > 0.01
    with pytest.raises(ValueError, match="positive"):
        LayerScale(0, torch.tensor(-1.0)).apply(model)

    flip = torch.diag(torch.tensor([1.0, -1, 1, 1], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    rotation = torch.linalg.qr(random).Q
    for matrix in (flip, rotation):
        missed = model.like(change_basis(weights, model.cfg, matrix))
        assert change_of_predictions(model, missed) > 0.01
        with pytest.raises(ValueError, match="O1 = 1"):
            ResidualBasis(matrix).apply(model)


def test_positive_layer_scale_is_exact_only_without_eps():
    scale = LayerScale(0, torch.tensor(1e-3, dtype=torch.float64))
    without = random_model(0)
    assert change_of_predictions(without, scale.apply(without)) < 1e-9
    small = random_model(0, norm_eps=1e-2)
    assert change_of_predictions(small, scale.apply(small)) > 1e-3


COUNTED = [
    {"normalization": "branch", "readout": "flatten", "d_model": 4, "n_heads": 2},
    {"normalization": "branch", "readout": "query", "d_model": 4, "n_heads": 2},
    {"normalization": "branch", "readout": "query", "d_model": 3, "n_heads": 2, "n_layers": 3},
    {
        "normalization": "branch",
        "readout": "query",
        "d_model": 5,
        "n_heads": 2,
        "exclude_query": True,
    },
    {"normalization": "branch", "readout": "query", "d_model": 4, "n_heads": 2, "n_layers": 1},
    {"normalization": "branch", "readout": "flatten", "d_model": 4, "n_heads": 1}
    | {"norm_affine": True},
    {"normalization": "branch", "readout": "query", "d_model": 4, "n_heads": 1}
    | {"norm_affine": True, "exclude_query": True},
    {"normalization": "branch", "readout": "flatten", "d_model": 3, "n_heads": 1}
    | {"norm_affine": True, "n_layers": 3},
    {"normalization": "post", "readout": "flatten", "d_model": 4, "n_heads": 1},
    {"normalization": "post", "readout": "query", "d_model": 4, "n_heads": 2},
    {"normalization": "none", "readout": "query", "d_model": 3, "n_heads": 2},
    {"normalization": "none", "readout": "flatten", "d_model": 3, "n_heads": 1},
    {"normalization": "branch", "readout": "query", "d_model": 4, "n_heads": 2, "n_covariates": 2},
]


@pytest.mark.parametrize("case", COUNTED, ids=lambda c: "-".join(map(str, c.values())))
def test_the_list_is_complete(case):
    model = random_model(1, **({"n_layers": 2, "n_context": 4} | case))
    rank, fall = jacobian_rank(model)
    known = known_directions(model)
    dimension = int(torch.linalg.matrix_rank(known, rtol=1e-10))
    assert fall > 1e4, "the rank is not clear"
    assert rank == model.cfg.n_parameters - dimension


def test_known_directions_are_flat():
    model = random_model(1, n_context=4, readout="query", n_heads=1)
    known = known_directions(model)
    slopes = prediction_jacobian(model) @ (known / known.norm(dim=1, keepdim=True)).T
    assert slopes.abs().max() < 1e-10


def test_the_count_by_hand():
    """The paper's size, D = 4, L = H = 2, p = 1, flatten readout: 121 flat directions.

    Per layer: head bases 2·16, mixing 4, scale 1, null writes 2·4. Stream: 3 rotations that fix
    1, 4 re-encodings. Input: 4 for the constant row beside b_E, and one direction of four that
    no token has, 2 heads x 3 matrices x 4. Of these one per head is also a head basis, and one
    per head a null write.
    """
    model = random_model(5, n_context=4)
    by_hand = 2 * (32 + 4 + 1 + 8) + 3 + 4 + 4 + 24 - 2 - 2
    assert int(torch.linalg.matrix_rank(known_directions(model), rtol=1e-10)) == by_hand
    assert symmetry_count(model) == by_hand


def test_a_direction_that_nothing_writes_is_free():
    """H (p + 2) = 3 < D - 1: the list says how far it reaches."""
    model = random_model(1, n_context=4, d_model=5, n_heads=1, readout="query")
    dimension = int(torch.linalg.matrix_rank(known_directions(model), rtol=1e-10))
    assert symmetry_count(model) > dimension


def test_a_dead_head_is_free():
    model = random_model(1, n_context=4, d_model=3, n_heads=2)
    weights = weights_of(model)
    weights["blocks.0.attn.W_V"][1] = 0
    weights["blocks.0.attn.W_Q"][1] = 0
    dead = model.like(weights)
    assert symmetry_count(dead) > symmetry_count(model)
