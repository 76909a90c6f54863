"""What the layer over transformer-lens promises beyond it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformer_lens import ActivationCache, HookedRootModule

from models import LinearAttentionTransformer, ModelConfig
from models.architecture.sites import layers_of, site_with, sites_with

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


@pytest.mark.parametrize("exclude_query", [False, True])
@pytest.mark.parametrize("normalization", ["branch", "post", "none"])
def test_the_gradient_at_every_site_is_that_of_the_prediction(normalization, exclude_query):
    # Against central differences along one random direction per site.
    config = ModelConfig(
        d_model=4, n_context=5, normalization=normalization, exclude_query=exclude_query
    )
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(3)).double()
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    output, cache = model.run_with_cache(inputs, names_filter=list(model.sites), incl_bwd=True)
    for site in model.sites:
        direction = torch.randn(cache[site].shape, generator=generator, dtype=torch.float64)
        step = 1e-6 * direction
        there, back = (
            model.run(inputs, writes={site: lambda t, s=sign, d=step: t + s * d})[0].sum()
            for sign in (1, -1)
        )
        slope = float((there - back).detach()) / 2e-6
        found = float((cache[f"{site}_grad"] * direction).sum())
        assert found == pytest.approx(slope, rel=1e-4, abs=1e-7), site
    scores = cache["blocks.0.attn.hook_attn_scores_grad"]
    assert scores.abs().sum() > 0
    with torch.no_grad():
        assert output.equal(model(inputs))


def test_hooks_of_one_thread_leave_the_calls_of_others_alone(model, inputs):
    plain = model(inputs).detach()
    hooked = model.run(inputs, writes={SCALE: lambda scale: 2 * scale})[0].detach()
    assert not hooked.equal(plain)

    def run(edited: bool) -> int:
        wrong = 0
        for _ in range(50):
            if edited:
                found = model.run(inputs, [SCALE], {SCALE: lambda scale: 2 * scale})[0]
                wrong += not found.equal(hooked)
            else:
                wrong += not model(inputs).equal(plain)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, [True, False, True, False])) == [0, 0, 0, 0]
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_context_leaves_hooks_of_other_contexts_in_place(model, inputs):
    seen = []
    outer = model.hooks([(SCALE, lambda tensor, hook: seen.append("outer"))])
    inner = model.hooks([(SCALE, lambda tensor, hook: seen.append("inner"))])
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # not in the order they were entered
    model(inputs)
    inner.__exit__(None, None, None)
    model(inputs)
    assert seen == ["inner"]


class TestCachingHooks:
    def test_copies_of_every_call(self, model, inputs):
        cache = model.add_caching_hooks(SCALE)
        model(inputs)
        kept = cache[SCALE].clone()
        model.run(inputs, writes={"blocks.0.hook_resid_pre": lambda t: t.mul_(3)})
        assert not cache[SCALE].equal(kept)
        cache[SCALE].zero_()
        assert model(inputs).isfinite().all()
        model.reset_hooks()
        assert not model.hook_dict[SCALE].has_hooks()

    def test_no_views(self, model, inputs):
        # What is cached at a site does not change with the tensor that went on from it.
        cache = model.add_caching_hooks("hook_embed")
        with torch.no_grad():
            model.run_with_hooks(
                inputs, fwd_hooks=[("blocks.0.hook_resid_pre", lambda t, hook: t.zero_())]
            )
        assert cache["hook_embed"].abs().sum() > 0

    def test_typos_are_refused(self, model):
        with pytest.raises(ValueError, match="unknown site 'hook_embd'; near matches: hook_embed"):
            model.add_caching_hooks("hook_embd")
        with pytest.raises(ValueError, match="matches none"):
            model.add_caching_hooks(lambda name: "mlp" in name)

    def test_get_caching_hooks_is_strict_too(self, model, inputs):
        with pytest.raises(ValueError, match="unknown site"):
            model.get_caching_hooks(["hook_embd"])
        cache, forward, backward = model.get_caching_hooks(SCALE, incl_bwd=True)
        with model.hooks(forward, backward):
            model(inputs).sum().backward()
        assert cache.keys() == {SCALE, f"{SCALE}_grad"}


class TestRun:
    def test_reads_what_writes_have_done(self, model, inputs):
        value = torch.full((2, 6, 1), 2.0, dtype=model.dtype)
        prediction, read = model.run(inputs, ["hook_prediction", SCALE], {SCALE: value})
        assert read[SCALE].equal(value)
        assert read["hook_prediction"].equal(prediction)
        assert not prediction.equal(model(inputs))

    def test_a_write_keeps_shape_and_dtype(self, model, inputs):
        with pytest.raises(ValueError, match="returned shape"):
            model.run(inputs, writes={SCALE: torch.ones(1)})


def test_sites_say_what_they_are_for(model):
    assert [site.name for site in sites_with(model, "divisor")] == [
        f"blocks.{layer}.ln1_post.hook_scale" for layer in layers_of(model)
    ]
    assert site_with(model, "state", 1).title == "layer 1: head state"
    with pytest.raises(ValueError, match=r"2 sites of the role 'divisor' .*name one"):
        site_with(model, "divisor")
    with pytest.raises(ValueError, match="not applicable: layer 7 has no site of the role 'added'"):
        site_with(model, "added", 7)
