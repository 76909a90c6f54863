"""What the layer over transformer-lens promises beyond it."""

import pytest
import torch
from transformer_lens import ActivationCache, HookedRootModule

from models import LinearAttentionTransformer, ModelConfig

SCALE = "blocks.1.ln1_post.hook_scale"


@pytest.fixture
def model(generator):
    return LinearAttentionTransformer(ModelConfig(n_context=5), generator).double()


@pytest.fixture
def inputs(generator):
    return torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)


def test_it_is_a_hooked_root_module_with_an_activation_cache(model, inputs):
    assert isinstance(model, HookedRootModule)
    _, cache = model.run_with_cache(inputs)
    assert isinstance(cache, ActivationCache)
    assert torch.equal(cache["scale", -1, "ln1_post"], cache[SCALE])
    assert torch.equal(cache["resid_post", 0], cache["blocks.0.hook_resid_post"])
    assert SCALE in cache
    _, plain = model.run_with_cache(inputs, return_cache_object=False)
    assert type(plain) is dict


def test_cached_tensors_are_copies(model, inputs):
    _, cache = model.run_with_cache(inputs)
    pointers = [value.untyped_storage().data_ptr() for value in cache.values()]
    assert len(set(pointers)) == len(pointers)
    kept = cache["blocks.0.hook_resid_post"].clone()
    cache["blocks.1.hook_resid_pre"].zero_()
    assert torch.equal(cache["blocks.0.hook_resid_post"], kept)
    assert not any(value.requires_grad for value in cache.values())


@pytest.mark.parametrize(
    "names",
    [SCALE, [SCALE], (SCALE,), {SCALE}, frozenset([SCALE]), lambda name: name == SCALE],
    ids=["str", "list", "tuple", "set", "frozenset", "callable"],
)
def test_every_kind_of_filter_works(model, inputs, names):
    _, cache = model.run_with_cache(inputs, names_filter=names)
    assert list(cache.keys()) == [SCALE]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.1.ln1.hook_scale", f"unknown site .*near matches: .*{SCALE}"),
        ([SCALE, "blocks.9.hook_resid_pre"], "unknown site 'blocks.9.hook_resid_pre'"),
        (lambda name: "mlp" in name, "matches none of the"),
        ([], "list of sites is empty"),
    ],
)
def test_a_filter_without_a_match_raises(model, inputs, names, message):
    with pytest.raises(ValueError, match=message):
        model.run_with_cache(inputs, names_filter=names)


def test_unknown_hook_names_raise_before_any_is_attached(model, inputs):
    hooks = [(SCALE, lambda tensor, hook: tensor), ("hook_embedding", lambda tensor, hook: tensor)]
    with pytest.raises(ValueError, match=r"near matches: hook_embed"):
        model.run_with_hooks(inputs, fwd_hooks=hooks)
    with pytest.raises(ValueError, match="unknown site 'nowhere'"):
        model.add_hook("nowhere", lambda tensor, hook: None)
    assert model.list_hooks() == {}


def test_the_cache_names_what_it_lacks(model, inputs):
    _, cache = model.run_with_cache(inputs)
    with pytest.raises(KeyError, match=r"blocks.0.hook_resid_pots.*near matches: .*resid_post"):
        cache["blocks.0.hook_resid_pots"]


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda t, hook: t[:, :1], ValueError, r"shape \(2, 1, 1\), expected \(2, 6, 1\)"),
        (lambda t, hook: t.mean(), ValueError, r"shape \(\), expected"),
        (lambda t, hook: t.float(), ValueError, "dtype torch.float32, expected torch.float64"),
        (lambda t, hook: t.to("meta"), ValueError, "device meta, expected cpu"),
        (lambda t, hook: 1.0, TypeError, "returned float"),
        (lambda t, hook: t.numpy(force=True), TypeError, "returned ndarray"),
    ],
)
def test_a_hook_may_not_change_the_kind_of_tensor(model, inputs, hook, error, message):
    with pytest.raises(error, match=message):
        model.run_with_hooks(inputs, fwd_hooks=[(SCALE, hook)])
    assert model.list_hooks() == {}


def test_hooks_are_gone_after_an_exception_and_the_callers_stay(model, inputs):
    seen = []
    model.add_hook(SCALE, lambda tensor, hook: seen.append(hook.name))

    def fail(tensor, hook):
        raise RuntimeError("from the hook")

    for run in (model.run_with_hooks, model.run_with_cache):
        with pytest.raises(RuntimeError, match="from the hook"):
            run(inputs, fwd_hooks=[("blocks.0.hook_resid_pre", fail)])
    model(inputs)
    model.run_with_cache(inputs)
    assert seen == [SCALE, SCALE]
    assert list(model.list_hooks()) == [SCALE]
    model.reset_hooks()
    assert model.list_hooks() == {}


def test_cache_and_hooks_run_at_once_and_the_cache_sees_the_edit(model, inputs):
    double = (SCALE, lambda tensor, hook: 2 * tensor)
    _, clean = model.run_with_cache(inputs)
    _, cache = model.run_with_cache(inputs, names_filter=[SCALE], fwd_hooks=[double])
    assert torch.equal(cache[SCALE], 2 * clean[SCALE])


def test_hooks_of_the_caller_come_first_in_nested_contexts(model, inputs):
    double = (SCALE, lambda tensor, hook: 2 * tensor)
    _, clean = model.run_with_cache(inputs)
    with model.hooks(fwd_hooks=[double]):
        _, cache = model.run_with_cache(inputs, names_filter=SCALE, fwd_hooks=[double])
        assert torch.equal(cache[SCALE], 4 * clean[SCALE])
        _, cache = model.run_with_cache(inputs, names_filter=SCALE)
        assert torch.equal(cache[SCALE], 2 * clean[SCALE])
    assert model.list_hooks() == {}


def test_gradients_are_cached_without_touching_parameters(model, inputs):
    output, cache = model.run_with_cache(inputs, incl_bwd=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(cache["hook_prediction_grad"], torch.ones_like(output))
    # Readout of the last stream is linear: its gradient is the readout weight.
    expected = model.unembed.W_U.expand(2, -1, -1)
    torch.testing.assert_close(cache["blocks.1.hook_resid_post_grad"], expected)
    # And one gradient against a finite difference.
    step = 1e-6
    nudge = ("blocks.0.hook_resid_pre", lambda tensor, hook: _nudged(tensor, step))
    moved = model.run_with_hooks(inputs, fwd_hooks=[nudge]).sum()
    slope = (moved - output.sum()) / step
    torch.testing.assert_close(
        cache["blocks.0.hook_resid_pre_grad"][1, 2, 3], slope, rtol=1e-4, atol=1e-6
    )


def _nudged(tensor, step):
    tensor = tensor.clone()
    tensor[1, 2, 3] += step
    return tensor


def test_gradients_need_a_graph(model, inputs):
    with torch.no_grad(), pytest.raises(ValueError, match="needs gradients"):
        model.run_with_cache(inputs, incl_bwd=True)


def test_backward_hooks_work_and_are_checked(model, inputs):
    seen = []
    with model.hooks(bwd_hooks=[(SCALE, lambda grad, hook: seen.append(grad.shape))]):
        model(inputs).sum().backward()
    assert seen == [(2, 6, 1)]


def test_one_prompt_can_lose_its_batch_axis(model, inputs):
    _, cache = model.run_with_cache(inputs[:1], names_filter=SCALE, remove_batch_dim=True)
    assert cache[SCALE].shape == (6, 1)


def test_decompositions_that_would_mislead_are_refused(model, inputs):
    _, cache = model.run_with_cache(inputs)
    for method in ("stack_head_results", "decompose_resid", "accumulated_resid", "logit_attrs"):
        with pytest.raises(TypeError, match="head outputs add into the residual stream"):
            getattr(cache, method)()


def test_permanent_hooks_survive_a_reset(model, inputs):
    seen = []
    model.add_perma_hook(SCALE, lambda tensor, hook: seen.append(1))
    model.reset_hooks()
    model(inputs)
    assert seen == [1]
