"""The fused kernel against automatic differentiation of the model it copies.

Errors are Euclidean distances per parameter tensor, relative to the norm of its true
gradient plus a hundredth of the norm of the model's whole gradient: behind a layer
norm of one or two features, some gradients vanish and only their rounding is left.
"""

import subprocess
import sys

import joblib
import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import LinearAttentionTransformer, ModelConfig
from models.training import kernel
from models.training.kernel import FusedKernel

TOLERANCE = {np.float64: 1e-10, np.float32: 1e-4}


@st.composite
def configs(draw) -> ModelConfig:
    normalization = draw(st.sampled_from(["branch", "post", "none"]))
    return ModelConfig(
        d_model=draw(st.integers(1, 16)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=draw(st.integers(1, 3)),
        n_context=draw(st.integers(1, 9)),
        n_covariates=draw(st.integers(1, 3)),
        normalization=normalization,
        norm_affine=normalization != "none" and draw(st.booleans()),
        norm_eps=draw(st.sampled_from([1e-5, 0.1])),
        readout=draw(st.sampled_from(["flatten", "query"])),
        exclude_query=draw(st.booleans()),
    )


def draw_problem(config, n_models, batch, dtype, n_groups=None, seed=0):
    """Random parameters and prompts: (params, x, y, targets)."""
    rng = np.random.default_rng(seed)
    n, p = config.n_context, config.n_covariates
    n_groups = n_models if n_groups is None else n_groups
    params = {
        name: rng.normal(size=(n_models, *shape), scale=0.4).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }
    for name in params:
        if name.endswith("ln1_post.w"):
            params[name] += dtype(1)
    return (
        params,
        rng.normal(size=(n_groups, p, n + 1, batch)).astype(dtype),
        rng.normal(size=(n_groups, n, batch)).astype(dtype),
        rng.normal(size=(n_groups, batch)).astype(dtype),
    )


def reference(config, params, x, y, targets, model_index, group_index):
    """Predictions, loss and gradients of one model by PyTorch in float64."""
    model = LinearAttentionTransformer(config).double()
    model.load_state_dict(
        {name: torch.tensor(value[model_index]).double() for name, value in params.items()}
    )
    n, p = config.n_context, config.n_covariates
    inputs = torch.zeros(x.shape[-1], n + 1, 2 + p, dtype=torch.float64)
    inputs[:, :, 0] = 1
    inputs[:, :, 1:-1] = torch.tensor(x[group_index]).permute(2, 1, 0)
    inputs[:, :-1, -1] = torch.tensor(y[group_index]).T
    predictions = model(inputs)
    loss = (predictions - torch.tensor(targets[group_index])).square().mean()
    names, values = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, values, materialize_grads=True)
    return (
        predictions.detach().numpy(),
        loss.item(),
        {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)},
    )


def assert_matches_autograd(config, n_models, batch, dtype, seed):
    problem = draw_problem(config, n_models, batch, dtype, seed=seed)
    fused = FusedKernel(config, batch, dtype)
    losses, gradients = fused.loss_and_gradients(*problem)
    predictions = fused.predictions(*problem[:3])
    tolerance = TOLERANCE[dtype]
    for m in range(n_models):
        true_predictions, true_loss, true_gradients = reference(config, *problem, m, m)
        size = np.linalg.norm(true_predictions) + np.linalg.norm(problem[3][m])
        assert np.linalg.norm(predictions[m] - true_predictions) <= tolerance * size
        assert abs(losses[m] - true_loss) <= tolerance * size**2 / batch
        assert gradients.keys() == true_gradients.keys() == problem[0].keys()
        whole = np.sqrt(sum(np.square(g).sum() for g in true_gradients.values()))
        for name, true in true_gradients.items():
            assert gradients[name].shape == problem[0][name].shape
            assert gradients[name].dtype == dtype
            error = np.linalg.norm(gradients[name][m] - true)
            assert error <= tolerance * (np.linalg.norm(true) + 1e-2 * whole), name


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=40)
@given(config=configs(), batch=st.integers(1, 40), seed=st.integers(0, 1000))
def test_loss_predictions_and_gradients_match_autograd(dtype, config, batch, seed):
    assert_matches_autograd(config, 2, batch, dtype, seed)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(d_model=21, n_heads=2, n_layers=1, n_context=6),
        ModelConfig(d_model=5, n_heads=2, n_layers=3, n_context=40, n_covariates=2),
        ModelConfig(n_context=300, readout="query", exclude_query=True),
    ],
    ids=["wide", "two covariates", "long context"],
)
def test_larger_shapes_match_autograd(config):
    assert_matches_autograd(config, 1, 24, np.float64, seed=0)


@pytest.fixture
def threads():
    """Sets the number of threads and restores it; skips what the machine lacks."""
    before = numba.get_num_threads()

    def set_threads(n):
        if n > numba.config.NUMBA_NUM_THREADS:
            pytest.skip(f"needs {n} threads")
        numba.set_num_threads(n)

    yield set_threads
    numba.set_num_threads(before)


class OtherConfig(ModelConfig):
    """The config of another class of model."""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ModelConfig(), ""),
        (ModelConfig(normalization="post", readout="query", exclude_query=True), ""),
        (ModelConfig.model_construct(normalization="rms"), "does not know normalization='rms'"),
        (ModelConfig.model_construct(readout="mean"), "readout='mean', only flatten, query"),
        (OtherConfig(), "models of ModelConfig, not of OtherConfig"),
    ],
)
def test_it_says_which_models_it_computes(config, reason):
    assert reason in FusedKernel.supports(config)
    assert bool(FusedKernel.supports(config)) == bool(reason)
    if reason:
        with pytest.raises(ValueError, match="the kernel"):
            FusedKernel(config, 8, np.float32)


CONFIG = ModelConfig(n_context=7, norm_affine=True)


def results(problem, group=None, dtype=np.float32):
    """Everything the kernel returns for one problem, losses and predictions included."""
    fused = FusedKernel(CONFIG, problem[1].shape[-1], dtype)
    losses, gradients = fused.loss_and_gradients(*problem, group)
    predictions = fused.predictions(*problem[:3], group)
    return {**gradients, "losses": losses, "predictions": predictions}


def assert_identical(left, right):
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_number_of_threads_does_not_change_a_bit(threads):
    problem = draw_problem(CONFIG, 5, 70, np.float32)
    threads(1)
    alone = results(problem)
    threads(2)
    assert_identical(alone, results(problem))


def test_company_does_not_change_a_bit():
    params, *prompts = draw_problem(CONFIG, 4, 70, np.float32)
    together = results((params, *prompts))
    for m in range(4):
        alone = results(
            ({name: value[[m]] for name, value in params.items()}, *(a[[m]] for a in prompts))
        )
        assert_identical(alone, {name: value[[m]] for name, value in together.items()})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_model_that_is_not_finite_stays_alone(bad):
    problem = draw_problem(CONFIG, 3, 33, np.float32)
    healthy = results(problem)
    problem[0]["blocks.0.attn.W_K"][1, 0, 2, 3] = bad
    mixed = results(problem)
    assert np.isnan(mixed["losses"][1])
    assert np.isnan(mixed["blocks.0.attn.W_Q"][1]).any()
    for name in healthy:
        np.testing.assert_array_equal(healthy[name][[0, 2]], mixed[name][[0, 2]], err_msg=name)


def test_models_share_the_prompts_of_their_group():
    params, *prompts = draw_problem(CONFIG, 5, 20, np.float32, n_groups=3)
    group = np.array([2, 0, 2, 1, 0])
    shared = results((params, *prompts), group)
    assert_identical(shared, results((params, *(a[group] for a in prompts))))


def test_layout_and_flags_of_the_arrays_do_not_matter():
    params, x, y, targets = draw_problem(CONFIG, 2, 20, np.float32)
    expected = results((params, x, y, targets))
    frozen = x.copy()
    frozen.flags.writeable = False
    strided = {name: np.repeat(value, 2, axis=0)[::2] for name, value in params.items()}
    assert_identical(expected, results((strided, frozen, np.asfortranarray(y), targets)))


def test_calls_keep_earlier_results_and_inputs():
    problem = draw_problem(CONFIG, 2, 20, np.float32)
    copies = [problem[0]["embed.W_E"].copy(), *(a.copy() for a in problem[1:])]
    fused = FusedKernel(CONFIG, 20, np.float32)
    _, first = fused.loss_and_gradients(*problem)
    kept = {name: value.copy() for name, value in first.items()}
    fused.loss_and_gradients(*draw_problem(CONFIG, 2, 20, np.float32, seed=1))
    assert_identical(kept, first)
    for before, after in zip(copies, [problem[0]["embed.W_E"], *problem[1:]], strict=True):
        np.testing.assert_array_equal(before, after)


def test_works_in_other_processes():
    problem = draw_problem(CONFIG, 2, 20, np.float32)
    fused = FusedKernel(CONFIG, 20, np.float32)
    expected, _ = fused.loss_and_gradients(*problem)
    run = joblib.delayed(fused.loss_and_gradients)
    for losses, _ in joblib.Parallel(n_jobs=2)([run(*problem), run(*problem)]):
        np.testing.assert_array_equal(losses, expected)


def test_import_loads_no_torch():
    code = "import models.training.kernel, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch):
    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernel.numba, "njit", njit)
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        assert kernel._compiled.__wrapped__() is kernel.loops.run_models


def _replace(problem, index, change):
    return tuple(change(value) if i == index else value for i, value in enumerate(problem))


@pytest.mark.parametrize(
    ("change", "group", "message"),
    [
        (lambda q: _replace(q, 1, lambda x: x[:, :, :-1]), None, r"x has shape \(2, 1, 7, 8\)"),
        (lambda q: _replace(q, 2, lambda y: y[:1]), None, r"y has shape \(1, 7, 8\)"),
        (lambda q: _replace(q, 3, lambda t: t[:, :3]), None, r"targets has shape \(2, 3\)"),
        (lambda q: _replace(q, 1, lambda x: x.astype(np.float64)), None, "x is float64"),
        (lambda q: _replace(q, 1, torch.from_numpy), None, "x is torch.float32"),
        (lambda q: _replace(q, 0, lambda p: p | {"extra": p["embed.b_E"]}), None, "extra"),
        (
            lambda q: _replace(q, 0, lambda p: {n: p[n] for n in p if n != "embed.b_E"}),
            None,
            "embed.b_E",
        ),
        (
            lambda q: _replace(q, 0, lambda p: p | {"embed.b_E": p["embed.b_E"][:1]}),
            None,
            r"embed.b_E has shape \(1, 4\)",
        ),
        (lambda q: _replace(q, 0, lambda p: {n: p[n][:0] for n in p}), None, "0 models"),
        (lambda q: _replace(q, 0, lambda p: {n: p[n][:1] for n in p}), None, "1 models and 2"),
        (lambda q: q, [0, 2], "group runs from 0 to 2"),
        (lambda q: q, [-1, 0], "group runs from -1 to 0"),
        (lambda q: q, [0.0, 1.0], "group has shape .* dtype float64"),
        (lambda q: q, [0], r"group has shape \(1,\)"),
    ],
)
def test_what_does_not_fit_is_named(change, group, message):
    problem = change(draw_problem(CONFIG, 2, 8, np.float32))
    with pytest.raises(ValueError, match=message):
        FusedKernel(CONFIG, 8, np.float32).loss_and_gradients(*problem, group)


@pytest.mark.parametrize(("batch", "dtype"), [(0, np.float32), (8, np.float16), (8, np.int64)])
def test_batch_and_dtype_are_checked(batch, dtype):
    with pytest.raises(ValueError, match=f"batch={batch}|dtype="):
        FusedKernel(CONFIG, batch, dtype)
