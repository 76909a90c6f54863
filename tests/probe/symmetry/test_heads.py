"""Circuits of heads: what the forward pass makes of them, and what a norm takes away again."""

import pytest
import torch

from models.architecture.config import ModelConfig
from models.architecture.sites import site_with
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from probe.matching.circuit import circuit_edges
from probe.matching.tables import weight_tables
from probe.subjects.sparsity import active_heads
from probe.subjects.subject import load_subject
from probe.symmetry.architecture import NullWrite
from probe.symmetry.heads import heads
from probe.symmetry.weights import attention, weights_hash, weights_of

CENTRED = {"branch": True, "post": True, "none": False}
NAMES = ["a", "b", "c", "d"]


def drawn(**config) -> LinearAttentionTransformer:
    generator = torch.Generator().manual_seed(4)
    model = LinearAttentionTransformer(ModelConfig(**({"n_context": 6} | config)), generator)
    return model.double().requires_grad_(False)


def with_a_dead_head(**config) -> tuple[LinearAttentionTransformer, LinearAttentionTransformer]:
    """A model whose second heads write nothing, and the same with a null write in layer 0."""
    model = drawn(**config)
    for block in model.blocks:
        block.attn.W_V[1] = 0
    vectors = torch.zeros(2, 4, dtype=torch.float64)
    vectors[1] = 5
    return model, NullWrite(0, vectors).apply(model)


@pytest.mark.parametrize("normalization", CENTRED)
def test_circuits_are_what_the_forward_pass_adds(normalization):
    model = drawn(normalization=normalization)
    circuits = heads(weights_of(model), model.cfg)
    prompts = PromptConfig(n_context=6).sample(3, torch.Generator().manual_seed(0))
    for layer in range(2):
        sites = [site_with(model, role, layer).name for role in ("stream in", "heads summed")]
        _, acts = model.run(prompts, reads=sites)
        stream, written = (acts[site] for site in sites)
        gram = stream.mT @ stream
        made = torch.einsum(
            "bpi,hij,bjk,hkl->bpl", stream, circuits.qk[layer], gram, circuits.ov[layer]
        )
        if CENTRED[normalization]:
            written = written - written.mean(-1, keepdim=True)
        torch.testing.assert_close(made, written, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalization", ["branch", "post"])
def test_a_null_write_switches_no_head_on(normalization):
    """It changes no prediction, so a head that only does this stays inactive."""
    model, moved = with_a_dead_head(normalization=normalization)
    inputs = PromptConfig(n_context=6).sample(5, torch.Generator().manual_seed(0)).inputs
    torch.testing.assert_close(moved(inputs), model(inputs), rtol=1e-9, atol=1e-9)
    assert (moved.blocks[0].attn.W_V - model.blocks[0].attn.W_V).abs().max() == 5
    assert active_heads(model) == active_heads(moved) == [1, 1]
    before, after = (circuit_edges(one, NAMES) for one in (model, moved))
    assert (before.contribution - after.contribution).abs().max() < 1e-12
    tables = [weight_tables(one, NAMES)["layer 0 B0"] for one in (model, moved)]
    assert (tables[0] - tables[1]).abs().max().max() < 1e-12


def test_without_a_norm_the_same_write_counts():
    model = drawn(normalization="none")
    model.blocks[0].attn.W_V[1] = 0
    assert active_heads(model) == [1, 2]
    model.blocks[0].attn.W_V[1] = model.blocks[0].attn.W_V[0].abs().max()
    assert active_heads(model) == [2, 2]


def test_strength_does_not_depend_on_the_scale_of_factors():
    model = drawn()
    weights = weights_of(model)
    before = heads(weights, model.cfg).strength
    weights[attention(0, "W_K")] *= 10
    weights[attention(0, "W_V")] /= 10
    after = heads(weights, model.cfg).strength
    torch.testing.assert_close(before, after)
    assert before.shape == (2, 2)


def test_one_hash_for_a_model():
    """Weights and config count; the constructed subject's is the one that reports record."""
    model = closed_form(20, scale=10)
    found = weights_hash(weights_of(model), model.cfg)
    assert found == load_subject("constructed").sha256
    assert found == "28be223e7bef404205e8566b1361da5d905defd5fe2101f2a0b3aec464dff688"
    other = weights_of(model)
    other["embed.b_E"][0] += 1e-12
    assert weights_hash(other, model.cfg) != found
    wider = model.cfg.model_copy(update={"norm_eps": 1e-6})
    assert weights_hash(weights_of(model), wider) != found
