"""The transformer against eq. (9) written out naively, and its sites' invariants."""

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from models import LinearAttentionTransformer, ModelConfig

CONFIGS = [
    ModelConfig(n_context=6),
    ModelConfig(n_context=5, normalization="post", norm_affine=True, readout="query"),
    ModelConfig(n_context=5, normalization="none", exclude_query=True, n_layers=3, d_model=3),
    ModelConfig(n_context=4, n_covariates=3, d_model=7, n_heads=3, norm_affine=True),
    ModelConfig(n_context=7, n_heads=1, n_layers=1, exclude_query=True, readout="query"),
]
IDS = [f"{c.normalization}-{c.readout}-p{c.n_covariates}" for c in CONFIGS]

configs = st.builds(
    ModelConfig,
    d_model=st.integers(2, 6),
    n_layers=st.integers(1, 3),
    n_heads=st.integers(1, 3),
    n_context=st.integers(2, 6),
    n_covariates=st.integers(1, 3),
    normalization=st.sampled_from(["branch", "post", "none"]),
    readout=st.sampled_from(["flatten", "query"]),
    exclude_query=st.booleans(),
)


def build(config: ModelConfig, seed: int = 0):
    """A float64 model with no weight at zero, and inputs for it."""
    generator = torch.Generator().manual_seed(seed)
    model = LinearAttentionTransformer(config, generator).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    shape = (3, config.n_context + 1, 2 + config.n_covariates)
    return model, torch.randn(shape, generator=generator, dtype=torch.float64)


def naive(model: LinearAttentionTransformer, inputs: torch.Tensor) -> torch.Tensor:
    """Prompt by prompt and head by head, in the paper's letters."""
    cfg, predictions = model.cfg, []
    for prompt in inputs:
        stream = prompt @ model.embed.W_E + model.embed.b_E
        for block in model.blocks:
            attn = block.attn
            keys = stream[:-1] if cfg.exclude_query else stream
            total = sum(
                (stream @ w3) @ (w1 @ keys.T @ keys @ w2)
                for w3, w1, w2 in zip(attn.W_Q, attn.W_K.mT, attn.W_V, strict=True)
            )
            gain, bias = (block.ln1_post.w, block.ln1_post.b) if cfg.norm_affine else (None, None)

            def norm(x, gain=gain, bias=bias):
                return F.layer_norm(x, (cfg.d_model,), gain, bias, cfg.norm_eps)

            if cfg.normalization == "branch":
                stream = stream + norm(total)
            elif cfg.normalization == "post":
                stream = norm(stream + total)
            else:
                stream = stream + total
        read = stream if cfg.readout == "flatten" else stream[-1:]
        predictions.append((read * model.unembed.W_U).sum() + model.unembed.b_U)
    return torch.stack(predictions)


@given(config=configs, seed=st.integers(0, 1000))
def test_forward_is_equation_9(config, seed):
    model, inputs = build(config, seed)
    torch.testing.assert_close(model(inputs), naive(model, inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_sites_have_their_shapes(config):
    model, inputs = build(config)
    _, cache = model.run_with_cache(inputs, names_filter=lambda name: True)
    b, p, h, d = 3, config.n_context + 1, config.n_heads, config.d_model
    shapes = {"hook_embed": (b, p, d), "hook_prediction": (b,)}
    for i in range(config.n_layers):
        block = {name: (b, p, d) for name in ("hook_resid_pre", "hook_resid_post", "hook_attn_out")}
        block |= {f"attn.hook_{name}": (b, p, h, d) for name in ("q", "k", "v", "result")}
        block |= {"attn.hook_state": (b, h, d, d), "attn.hook_attn_scores": (b, h, p, p)}
        block |= {"attn.hook_out": (b, p, d)}
        if config.normalization != "none":
            block |= {f"ln1_post.hook_{name}": (b, p, 1) for name in ("mean", "scale")}
            block |= {"ln1_post.hook_normalized": (b, p, d)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    assert {name: tuple(value.shape) for name, value in cache.items()} == shapes


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_invariants_hold_exactly(config):
    model, inputs = build(config)
    output, cache = model.run_with_cache(inputs)
    assert torch.equal(output, cache["hook_prediction"])
    assert torch.equal(cache["hook_embed"], cache["blocks.0.hook_resid_pre"])
    for i in range(config.n_layers):
        at = f"blocks.{i}."
        assert torch.equal(cache[at + "attn.hook_result"].sum(2), cache[at + "attn.hook_out"])
        total = cache[at + "hook_resid_pre"] + cache[at + "hook_attn_out"]
        if config.normalization == "post":
            # The norm stands on the stream itself: its quotient is the next stream.
            assert torch.equal(cache[at + "attn.hook_out"], cache[at + "hook_attn_out"])
            normed_from = total
        else:
            assert torch.equal(total, cache[at + "hook_resid_post"])
            normed_from = cache[at + "attn.hook_out"]
        if config.normalization != "none":
            mean, scale = cache[at + "ln1_post.hook_mean"], cache[at + "ln1_post.hook_scale"]
            assert torch.equal((normed_from - mean) / scale, cache[at + "ln1_post.hook_normalized"])
            variance = normed_from.var(-1, unbiased=False, keepdim=True)
            torch.testing.assert_close(scale, (variance + config.norm_eps).sqrt())
        if i:
            before = cache[f"blocks.{i - 1}.hook_resid_post"]
            assert torch.equal(before, cache[at + "hook_resid_pre"])


def test_scores_and_state_tell_the_same_result():
    model, inputs = build(ModelConfig(n_context=6, exclude_query=True))
    _, cache = model.run_with_cache(inputs, names_filter=lambda name: "attn." in name)
    scores, v = cache["blocks.1.attn.hook_attn_scores"], cache["blocks.1.attn.hook_v"]
    assert (scores[..., -1] == 0).all()
    result = torch.einsum("bhqk,bkhd->bqhd", scores, v)
    torch.testing.assert_close(result, cache["blocks.1.attn.hook_result"])


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_an_edit_changes_what_is_downstream_and_nothing_upstream(config):
    model, inputs = build(config)
    names = list(model.hook_dict)
    _, clean = model.run_with_cache(inputs, names_filter=names)
    for position, edited in enumerate(names):

        def edit(tensor, hook):
            return tensor * 1.5 + 0.3

        output, cache = model.run_with_cache(inputs, names_filter=names, fwd_hooks=[(edited, edit)])
        assert not torch.equal(cache[edited], clean[edited]), edited
        for name in names[:position]:
            assert torch.equal(cache[name], clean[name]), (edited, name)
        assert not torch.equal(output, clean["hook_prediction"]), edited
        for name in names[position + 1 :]:
            if not _beside(edited, name):
                assert not torch.equal(cache[name], clean[name]), (edited, name)


def _beside(edited: str, name: str) -> bool:
    """Whether two sites of one attention layer, in forward order, do not feed each other."""
    apart = {"q": "k v state", "k": "v", "v": "attn_scores", "state": "attn_scores"}
    block, _, site = edited.partition(".attn.hook_")
    other_block, _, other = name.partition(".attn.hook_")
    return block == other_block and other in apart.get(site, "").split()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_self_patch_changes_nothing(config):
    model, inputs = build(config)
    names = list(model.hook_dict)
    clean_output, clean = model.run_with_cache(inputs, names_filter=names)
    hooks = [(name, lambda tensor, hook: clean[hook.name].clone()) for name in names]
    output, cache = model.run_with_cache(inputs, names_filter=names, fwd_hooks=hooks)
    assert torch.equal(output, clean_output)
    assert all(torch.equal(cache[name], clean[name]) for name in names)


def test_edits_of_scale_and_normalized_take_effect():
    model, inputs = build(CONFIGS[3])
    _, clean = model.run_with_cache(inputs)
    site = "blocks.1.ln1_post."
    double = (site + "hook_scale", lambda tensor, hook: 2 * tensor)
    _, cache = model.run_with_cache(inputs, fwd_hooks=[double])
    half = clean[site + "hook_normalized"] / 2
    assert torch.equal(cache[site + "hook_normalized"], half)
    layer = model.blocks[1].ln1_post
    torch.testing.assert_close(cache["blocks.1.hook_attn_out"], half * layer.w + layer.b)


def test_an_edit_of_the_scores_acts_like_the_edited_sum():
    model, inputs = build(ModelConfig(n_context=4, n_layers=1, normalization="none"))
    site = "blocks.0.attn.hook_attn_scores"

    def mask(tensor, hook):
        return tensor.tril()

    _, clean = model.run_with_cache(inputs, names_filter=lambda name: True)
    _, cache = model.run_with_cache(inputs, fwd_hooks=[(site, mask)])
    expected = torch.einsum("bhqk,bkhd->bqhd", clean[site].tril(), clean["blocks.0.attn.hook_v"])
    torch.testing.assert_close(cache["blocks.0.attn.hook_result"], expected)


def test_scores_exist_only_on_request():
    model, inputs = build(CONFIGS[0])
    calls = []
    attn = model.blocks[0].attn
    attn.hook_attn_scores.register_forward_hook(lambda *_: calls.append(1))
    _, cache = model.run_with_cache(inputs)
    assert calls == []
    assert not any(name.endswith("attn_scores") for name in cache)
    model.run_with_cache(inputs, names_filter="blocks.0.attn.hook_attn_scores")
    assert calls == [1]


def test_query_readout_takes_any_context_length():
    model, _ = build(ModelConfig(n_context=6, readout="query"))
    assert model(torch.randn(2, 40, 3)).shape == (2,)


def test_float32_agrees_with_float64():
    for config in CONFIGS:
        model, inputs = build(config)
        exact = model(inputs)
        torch.testing.assert_close(model.float()(inputs).double(), exact, rtol=1e-3, atol=1e-4)


def test_weights_are_a_function_of_the_generator():
    def weights(seed):
        model = LinearAttentionTransformer(ModelConfig(), torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_parameters_are_those_of_the_config(config):
    model = LinearAttentionTransformer(config)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes == config.parameter_shapes()
    assert sum(value.numel() for value in model.parameters()) == config.n_parameters


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 3), r"shape \(7, 3\), expected \[batch, 7, 3\]"),
        ((2, 6, 3), r"expected \[batch, 7, 3\]"),
        ((2, 7, 4), r"expected \[batch, 7, 3\]"),
    ],
)
def test_inputs_of_another_shape_are_refused(shape, message):
    model, _ = build(CONFIGS[0])
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(shape))


def test_inputs_on_another_device_are_refused():
    model, inputs = build(CONFIGS[0])
    with pytest.raises(ValueError, match="inputs are on meta, the model on cpu"):
        model(inputs.to("meta"))


@pytest.mark.parametrize(
    ("kind", "convert"), [("numpy.ndarray", torch.Tensor.numpy), ("list", torch.Tensor.tolist)]
)
def test_inputs_that_are_no_tensor_are_named(kind, convert, monkeypatch):
    # The suite checks annotations; a user has the message of the model itself.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, inputs = build(CONFIGS[0])
    with pytest.raises(ValueError, match=f"inputs are a {kind}; give a torch.Tensor"):
        model(convert(inputs))


@pytest.mark.parametrize(
    "sizes", [{"d_model": 10**7}, {"n_layers": 10**9}, {"n_heads": 10**12}, {"n_context": 10**13}]
)
def test_absurd_sizes_are_refused_before_memory_is_taken(sizes):
    with pytest.raises(ValueError, match=r"needs .* GiB; this machine has .* Choose smaller"):
        LinearAttentionTransformer(ModelConfig(**sizes))


@pytest.mark.parametrize(
    "options",
    [{"d_model": 0}, {"normalization": "pre"}, {"readout": "mean"}, {"norm_eps": -1}, {"width": 4}],
)
def test_bad_configs_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ModelConfig(**options)


def test_affine_needs_a_norm():
    with pytest.raises(ValueError, match="norm_affine=True needs a normalization"):
        ModelConfig(normalization="none", norm_affine=True)
