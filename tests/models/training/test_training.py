import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from filelock import FileLock
from pydantic import ValidationError

import models
from models import ModelConfig, PromptConfig, TrainConfig, train
from models.checkpoint import provenance, training_prompts
from models.training import grid as training
from models.training import loop, sweep
from models.training import run_folder as runfolder
from models.training.ensemble import Layout, Member, initial_state
from models.training.optimizer import Adam, learning_rate
from models.training.prompt_stream import PromptStream
from tests.models.training.runs import TINY, quietly, same_weights, step_of, tiny, weights_of

SHAPES = {
    "paper": {},
    "affine": {"norm_affine": True},
    "post, query readout": {"normalization": "post", "readout": "query"},
    "no norm, query excluded": {"normalization": "none", "exclude_query": True},
    "two covariates": {"n_covariates": 2, "d_model": 5, "n_layers": 3, "n_heads": 2},
}


# --- optimizer


def adam(shape, method="subgradient", clip=1e9, dtype=np.float64):
    return Adam(
        np.zeros(shape, dtype), np.zeros(shape, dtype), np.ones(shape[1], bool), (0.9, 0.99), clip,
        method,
    )  # fmt: skip


def test_adam_is_torchs_adam_with_torchs_clip():
    rng = np.random.default_rng(0)
    weights, start = np.zeros((2, 5)), torch.zeros(2, 5, dtype=torch.float64)
    ours = adam(weights.shape, clip=1.0)
    rows = [row.clone().requires_grad_() for row in start]
    theirs = torch.optim.Adam(rows, lr=0.03, betas=(0.9, 0.99), eps=1e-8)
    for t in range(1, 50):
        grads = rng.normal(size=weights.shape) * [[0.1], [3.0]]
        for row, grad in zip(rows, grads, strict=True):
            row.grad = torch.from_numpy(grad.copy())
            torch.nn.utils.clip_grad_norm_([row], 1.0)
        theirs.step()
        ours.step(weights, grads, t, 0.03, np.zeros(2))
    # torch's clip adds 1e-6 to the norm, hence the tolerance.
    np.testing.assert_allclose(weights, torch.stack(rows).detach(), rtol=1e-5)


def test_proximal_step_ends_at_the_soft_threshold_with_exact_zeros():
    # Minimum of sum k/2 (w - a)² + λ|w|: a shrunk by λ/k. A threshold of ηλ would miss it.
    aim = np.array([[2.0, -1.0, 0.3, -0.05]])
    stiffness = np.array([[1.0, 5.0, 0.2, 1.0]])
    weights = np.full((1, 4), 0.7)
    optimizer = adam(weights.shape, "proximal")
    for t in range(1, 6001):
        rate = learning_rate(t - 1, 6000, 0.02, 200, 1e-4)
        optimizer.step(weights, stiffness * (weights - aim), t, rate, np.array([0.1]))
    expected = np.sign(aim) * np.maximum(np.abs(aim) - 0.1 / stiffness, 0)
    np.testing.assert_allclose(weights, expected, atol=2e-4)
    assert np.array_equal(weights == 0, expected == 0)


def test_subgradient_penalty_is_part_of_the_gradient():
    plain, penalised = np.array([[0.5, -0.5, 0.0]]), np.array([[0.5, -0.5, 0.0]])
    grads = np.array([[0.1, 0.2, 0.3]])
    slope = np.array([[0.05, -0.05, 0.0]])
    adam(plain.shape).step(plain, grads + slope, 1, 0.1, np.zeros(1))
    adam(plain.shape).step(penalised, grads.copy(), 1, 0.1, np.array([0.05]))
    np.testing.assert_array_equal(plain, penalised)


def test_moments_without_gradient_become_zero_and_not_subnormal():
    weights = np.ones((1, 2), np.float32)
    optimizer = adam(weights.shape, dtype=np.float32)
    for t in range(1, 1001):
        grads = np.array([[1.0, 0.0]], np.float32) * (t == 1)
        optimizer.step(weights, grads, t, 0.01, np.zeros(1))
    assert (optimizer.m == 0).all()


def test_learning_rate_rises_linearly_then_falls_to_its_last_share():
    rates = [learning_rate(step, 4000, 0.01, 200, 1e-3) for step in range(4000)]
    assert rates[0] == pytest.approx(0.01 / 200)
    assert rates[199] == pytest.approx(0.01) == rates[200]
    assert rates[-1] == pytest.approx(1e-5)
    assert all(a > b for a, b in itertools.pairwise(rates[200:]))
    assert learning_rate(0, 1, 0.01, 200, 1e-3) == pytest.approx(0.01)


# --- prompts


def stream(prompts=None, seed=0, batch=4, n_prompts=None, noisy_y=False):
    prompts = prompts or PromptConfig(n_context=5)
    return PromptStream(
        prompts, seed, batch, n_prompts, noisy_y, torch.float64, torch.device("cpu")
    )


def test_prompts_depend_on_seed_distribution_and_step_alone():
    ahead, again = stream(), stream()
    first = [ahead.at(step)[0] for step in range(3)]
    assert torch.equal(again.at(2)[0], first[2])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(stream(seed=1).at(0)[0], first[0])
    assert not torch.equal(stream(PromptConfig(n_context=5, noise_std=0.2)).at(0)[0], first[0])


def test_targets_are_least_squares_or_the_noisy_y_of_the_same_line():
    x, y, least_squares = stream(batch=2000).at(0)
    same_x, same_y, noisy = stream(batch=2000, noisy_y=True).at(0)
    assert torch.equal(x, same_x)
    assert torch.equal(y, same_y)
    prompts = models.prompts_from_arrays(x[0, :-1].T, y.T, x[0, -1])
    torch.testing.assert_close(prompts.least_squares, least_squares)
    # The median of |N(0, .1²)| is .067; least squares through 5 samples adds its own error.
    assert 0.07 < (noisy - least_squares).abs().median() < 0.15


def test_a_fixed_set_is_reshuffled_every_epoch():
    fixed = stream(batch=4, n_prompts=12)
    epochs = [torch.cat([fixed.at(3 * epoch + k)[2] for k in range(3)]) for epoch in range(2)]
    assert len(epochs[0].unique()) == 12
    assert not torch.equal(*epochs)
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)


# --- the loop


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_losses_and_first_step_are_those_of_the_transformer(shape, backend):
    """Loss, W_V scale, clip and Adam against the model itself with torch's optimizer."""
    shape = ModelConfig(**{**dict(TINY["model"]), **shape})
    prompts = PromptConfig(n_context=5, n_covariates=shape.n_covariates)
    config = tiny(model=shape, prompts=(prompts,), dtype="float64", backend=backend, steps=1)
    config = config.model_copy(update={"l1": (0.0,), "seeds": (3,)})
    losses = []
    member = Member("one", prompts, 0.0, 3)
    state = initial_state(config, [member])
    loop.advance(config, [member], state, lambda _, loss: losses.append(float(loss[0])))

    model = models.LinearAttentionTransformer(shape, torch.Generator().manual_seed(3)).double()
    x, y, targets = stream(prompts, seed=3, batch=16).at(0)
    inputs = torch.zeros(16, 6, shape.n_covariates + 2, dtype=torch.float64)
    inputs[..., 0], inputs[..., 1:-1], inputs[:, :-1, -1] = 1, x.permute(2, 1, 0), y.T
    loss = (model(inputs) - targets).square().mean()
    assert losses[0] == pytest.approx(loss.item(), rel=1e-9)

    grads = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    scaled = [g / 6 if name.endswith("W_V") else g for g, name in zip(grads, names, strict=True)]
    norm = math.sqrt(sum(float(g.square().sum()) for g in scaled))
    layout = Layout(shape)
    trained = layout.split(state.arrays["weights"])
    for (name, value), grad in zip(model.named_parameters(), scaled, strict=True):
        before = value.detach() * (6 if name.endswith("W_V") else 1)
        step = grad / max(norm, 1.0)
        after = before - 1e-2 * step / (step.abs() + 1e-8)
        np.testing.assert_allclose(trained[name][0], after, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(("backend", "dtype"), [("kernel", "float32"), ("torch", "float64")])
def test_a_model_does_not_depend_on_its_company(backend, dtype):
    config = tiny(
        prompts=(PromptConfig(n_context=5), PromptConfig(n_context=5, x_mean_std=1)),
        backend=backend,
        dtype=dtype,
    )
    together = quietly(config)
    for index, (prompts, l1, seed) in enumerate(
        itertools.product(config.prompts, config.l1, config.seeds)
    ):
        alone = config.model_copy(update={"prompts": (prompts,), "l1": (l1,), "seeds": (seed,)})
        assert same_weights(quietly(alone), [together[index]])
    assert len({weights_of(model).tobytes() for model in together}) == 8


def test_torch_threads_change_nothing_and_are_left_as_they_were():
    before = torch.get_num_threads()
    reference = quietly(tiny(backend="torch"))
    try:
        torch.set_num_threads(1)
        assert same_weights(quietly(tiny(backend="torch")), reference)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_backends_agree():
    kernel = quietly(tiny(dtype="float64", steps=30, l1_method="subgradient"))
    autograd = quietly(tiny(dtype="float64", steps=30, l1_method="subgradient", backend="torch"))
    for left, right in zip(kernel, autograd, strict=True):
        np.testing.assert_allclose(weights_of(left), weights_of(right), rtol=1e-6, atol=1e-8)


def test_training_learns_and_the_proximal_penalty_makes_zeros():
    config = tiny(
        model=ModelConfig(n_context=10),
        prompts=(PromptConfig(n_context=10),),
        l1=(0.0, 3e-2),
        seeds=(0,),
        steps=1500,
        batch_size=64,
    )
    free, sparse = quietly(config)
    assert training.normalised_mse(free, config.prompts[0]) < 0.2
    assert (weights_of(free) == 0).sum() == 0
    assert (weights_of(sparse) == 0).mean() > 0.3


def test_layer_norm_is_not_penalised():
    layout = Layout(ModelConfig(norm_affine=True, d_model=4, n_layers=2))
    assert (~layout.penalised).sum() == 2 * 2 * 4


def poisoned(monkeypatch, at_step):
    """Make the gradients of model 1 infinite from one step on."""
    from models.training.kernel import FusedKernel

    calls, compute = itertools.count(), FusedKernel.loss_and_gradients

    def spoil(self, *args):
        losses, grads = compute(self, *args)
        if next(calls) >= at_step:
            grads["embed.W_E"][1] = np.inf
        return losses, grads

    monkeypatch.setattr(FusedKernel, "loss_and_gradients", spoil)


def test_a_diverging_model_is_frozen_reported_and_spoils_no_other(monkeypatch, tmp_path):
    healthy = quietly(tiny())
    poisoned(monkeypatch, at_step=20)
    with pytest.warns(UserWarning, match=r"prompts0_l1_0_seed1 diverged at step 20"):
        mixed = quietly(tiny(), tmp_path / "run")
    for index in (0, 2, 3):
        assert same_weights([mixed[index]], [healthy[index]])
    assert np.isfinite(weights_of(mixed[1])).all()
    record = provenance(tmp_path / "run" / "prompts0_l1_0_seed1")
    assert (record["status"], record["steps"]) == ("diverged", 20)
    assert len(record["loss_curve"]["loss"]) == 20
    assert provenance(tmp_path / "run" / "prompts0_l1_0_seed0")["status"] == "finished"


def test_absurd_losses_count_as_divergence():
    config = tiny(model=TINY["model"].model_copy(update={"normalization": "none", "n_layers": 4}))
    config = config.model_copy(update={"learning_rate": 30.0, "l1": (0.0,), "steps": 200})
    with pytest.warns(UserWarning, match="diverged"):
        result = quietly(config)
    assert all(np.isfinite(weights_of(model)).all() for model in result)


def test_a_model_that_diverges_at_once_does_not_hold_up_its_sweep(tmp_path, monkeypatch):
    """Covariates up to e^20 go beyond float32 in the first forward pass, in training and after."""
    wild = PromptConfig(n_context=5, x_log_scale=20.0)
    config = tiny(
        model=ModelConfig(n_context=5, n_layers=4, normalization="none"),
        prompts=(*TINY["prompts"], wild),
        seeds=(0,),
        l1=(1e-3,),
    )
    with pytest.warns(UserWarning, match="prompts1_l1_1e-3_seed0 diverged at step 0"):
        trained = quietly(config, tmp_path)
    tame, lost = (provenance(tmp_path / f"prompts{k}_l1_1e-3_seed0") for k in range(2))
    assert (lost["status"], lost["steps"], lost["normalised_mse"]) == ("diverged", 0, None)
    assert lost["loss_curve"] == {"step": [], "loss": []}
    assert tame["status"] == "finished"
    assert math.isfinite(tame["normalised_mse"])
    alone = config.model_copy(update={"prompts": config.prompts[:1]})
    assert same_weights(quietly(alone), trained[:1])

    monkeypatch.setattr(sweep, "initial_state", pytest.fail)
    assert same_weights(quietly(config, tmp_path), trained)


def test_weights_that_a_step_would_make_infinite_stay_as_they_were(tmp_path):
    # The penalty of the second model is beyond float32.
    config = tiny(l1=(0.0, 1e39), seeds=(0,), l1_method="subgradient", l1_ramp=0.0)
    with pytest.warns(UserWarning, match="l1_1e39_seed0 diverged at step 0"):
        healthy, frozen = quietly(config, tmp_path)
    fresh = models.LinearAttentionTransformer(config.model, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(weights_of(frozen), weights_of(fresh), rtol=1e-6)
    record = provenance(tmp_path / "prompts0_l1_1e39_seed0")
    assert (record["status"], record["steps"]) == ("diverged", 0)
    assert math.isfinite(record["normalised_mse"])
    assert same_weights([healthy], quietly(tiny(l1=(0.0,), seeds=(0,), l1_method="subgradient")))


# --- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 1)}, "seeds=.* twice"),
        ({"l1": (-1e-3,)}, "must not be negative"),
        ({"l1": ()}, "at least 1"),
        ({"seeds": (-1,)}, "from 0"),
        ({"n_prompts": 8}, "lower batch_size"),
        ({"prompts": (PromptConfig(n_context=9),)}, "n_context=5, its prompts n_context=9"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"learning_rate": math.nan}, "finite"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        tiny(**changes)


def test_names_must_be_distinct_plain_folders(tmp_path):
    for name, message in [
        (lambda *_: "same", "'same' twice"),
        (lambda label, l1, seed: f"../{label}{l1}{seed}", "plain folder name"),
    ]:
        with pytest.raises(ValueError, match=message):
            quietly(tiny(), tmp_path, name=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("l1", "text"), [(0.0, "0"), (3e-4, "3e-4"), (1e-3, "1e-3"), (0.25, "2.5e-1"), (1.0, "1e0")]
)
def test_names_show_the_penalty(l1, text):
    assert training.default_name("varied", l1, 2) == f"varied_l1_{text}_seed2"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"batch_size": 10**8}, {}, r"batch_size=100,000,000, for 2 seeds .* Lower batch_size"),
        ({"n_prompts": 10**12}, {}, r"n_prompts=1,000,000,000,000, .* Lower n_prompts or batch"),
        ({"batch_size": 10**9}, {"n_jobs": 2}, "batch_size=1,000,000,000, for"),
        ({"batch_size": 3 * 10**6, "backend": "torch"}, {}, "batch_size=3,000,000, for"),
    ],
)
def test_prompts_beyond_memory_are_refused_before_any_work(
    changes, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "machine_memory", lambda: 2**33)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        quietly(tiny(**changes), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_backend_is_chosen_that_computes_the_model(monkeypatch):
    odd = ModelConfig.model_construct(**{**dict(TINY["model"]), "normalization": "rms"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend, chosen in (("auto", "torch"), ("torch", "torch")):
        config = tiny(backend=backend).model_copy(update={"model": odd})
        assert training._backend(config) == chosen
        assert training._backend(tiny(backend="auto")) == "kernel"
    config = tiny(backend="kernel").model_copy(update={"model": odd})
    with pytest.raises(ValueError, match=r"'kernel': .*normalization='rms'.*backend='torch'"):
        quietly(config)


def test_the_command_module_does_not_hide_the_function():
    assert models.TrainConfig is training.TrainConfig
    code = """
import models, models.train
from models.training import grid
grid_train, models.train.train = grid.train, lambda *args, **kwargs: (args, kwargs)
assert callable(models.train), models.train
assert models.train(1, output=2) == ((1,), {"output": 2})
from models import train
assert train(3) == ((3,), {})
assert callable(models.train.main)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the run's folder


def test_finished_models_are_checkpoints_with_their_provenance(tmp_path):
    config = tiny(steps=450, l1=(0.0, 0.1))
    trained = quietly(config, tmp_path, name=lambda label, l1, seed: f"{label}-{l1:g}-{seed}")
    assert [path.name for path in sorted(tmp_path.glob("[!.]*"))] == [
        "prompts0-0-0", "prompts0-0-1", "prompts0-0.1-0", "prompts0-0.1-1", "run.json",
    ]  # fmt: skip
    folder = tmp_path / "prompts0-0.1-1"
    assert same_weights([models.load(folder)], [trained[3]])
    assert training_prompts(folder) == config.prompts[0]
    record = provenance(folder)
    assert (record["seed"], record["l1"], record["steps"]) == (1, 0.1, 450)
    assert TrainConfig(**record["training"]) == config
    assert record["normalised_mse"] == training.normalised_mse(trained[3], config.prompts[0])
    assert record["versions"].keys() == {"python", "numpy", "torch", "numba"}
    loss, sparsity = record["loss_curve"], record["sparsity_curve"]
    assert len(loss["loss"]) == len(loss["step"]) == len(sparsity["zero"]) == 200
    assert loss["step"][-1] == 450
    assert sparsity["below_0.001"][-1] >= sparsity["zero"][-1] > 0
    assert np.mean(loss["loss"][:20]) > np.mean(loss["loss"][-20:])


def test_a_finished_run_is_only_loaded(tmp_path, monkeypatch, capsys):
    first = quietly(tiny(), tmp_path)
    monkeypatch.setattr(sweep, "initial_state", pytest.fail)
    assert same_weights(train(tiny(), tmp_path), first)
    assert "all 4 models" in capsys.readouterr().out


def test_a_removed_model_is_trained_again_and_the_same(tmp_path):
    first = quietly(tiny(), tmp_path)
    gone = tmp_path / "prompts0_l1_0_seed1"
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()
    assert same_weights(quietly(tiny(), tmp_path), first)


def test_another_config_in_the_same_folder_is_refused_by_name(tmp_path):
    quietly(tiny(), tmp_path)
    with pytest.raises(training.TrainingError, match=r"l1_ramp was 0\.3, is now 0.2;"):
        quietly(tiny(l1_ramp=0.2), tmp_path)
    with pytest.raises(training.TrainingError, match=r"models was \['prompts0_l1_0_"):
        quietly(tiny(), tmp_path, name=lambda label, l1, seed: f"{label}_{l1}_{seed}")


def test_a_record_without_a_newer_field_is_continued(tmp_path):
    first = quietly(tiny(), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    del record["run"]["prompts"][0]["kind"], record["run"]["clip_norm"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert same_weights(quietly(tiny(), tmp_path), first)
    # Negative control: what is recorded counts.
    record["run"]["clip_norm"] = 0.5
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(training.TrainingError, match=r"clip_norm was 0\.5, is now 1\.0"):
        quietly(tiny(), tmp_path)


def test_a_folder_in_use_is_refused(tmp_path):
    quietly(tiny(), tmp_path)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(training.TrainingError, match="another process is training"),
    ):
        quietly(tiny(), tmp_path)
    quietly(tiny(), tmp_path)


def test_a_killed_process_frees_its_folder(tmp_path):
    hold = f"""
from models.training.run_folder import RunFolder
with RunFolder.hold({str(tmp_path)!r}, {{}}, [], dict):
    print("held", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(training.TrainingError, match="another process is training"),
            runfolder.RunFolder.hold(tmp_path, {}, [], dict),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with runfolder.RunFolder.hold(tmp_path, {}, [], dict):
            pass


def test_unusable_folders_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "initial_state", pytest.fail)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(training.TrainingError, match="File exists"):
        quietly(tiny(), tmp_path / "file")
    with pytest.raises(training.TrainingError, match="Not a directory"):
        quietly(tiny(), tmp_path / "file" / "deeper")
    foreign = tmp_path / "prompts0_l1_0_seed1"
    foreign.mkdir()
    with pytest.raises(training.TrainingError, match="already holds prompts0_l1_0_seed1"):
        quietly(tiny(), tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(training.TrainingError, match=r"run\.json is damaged"):
        quietly(tiny(), tmp_path)


def test_a_full_disk_stops_with_the_earlier_state_intact(tmp_path, monkeypatch):
    reference = quietly(tiny())
    saves, sync = itertools.count(), os.fsync

    def full(handle):
        if next(saves) >= 3:  # run.json and two states fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(training.TrainingError, match=r"step 30 .*No space left.*intact"):
            quietly(tiny(), tmp_path, save_steps=10)
    (state,) = (tmp_path / ".state").iterdir()
    with runfolder.safe_open(state, "np") as file:
        assert file.metadata()["step"] == "20"
    assert same_weights(quietly(tiny(), tmp_path), reference)
    assert not (tmp_path / ".state").exists()


def test_a_damaged_state_is_named(tmp_path):
    quietly(tiny(), tmp_path)
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state" / "0.safetensors").write_bytes(b"half")
    for path in (tmp_path / "prompts0_l1_0_seed1").iterdir():
        path.unlink()
    with pytest.raises(training.TrainingError, match=r"0.safetensors is damaged.*delete it"):
        quietly(tiny(), tmp_path)


def test_killed_at_random_moments_a_run_ends_with_the_same_weights(tmp_path):
    config = tiny(steps=3000, n_prompts=80)
    reference = quietly(config)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.training.grid"])
    moments = random.Random(0)
    killed_at = []
    while True:
        saved = step_of(tmp_path)
        process = context.Process(
            target=train, args=(config, tmp_path), kwargs={"save_steps": 7, "progress": False}
        )
        process.start()
        while process.is_alive() and step_of(tmp_path) == saved:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))
        if len(killed_at) < 5:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        killed_at.append(step_of(tmp_path))
    assert killed_at  # it was killed, and went on from where it was
    assert same_weights([models.load(path) for path in sorted(tmp_path.glob("p*"))], reference)
    assert not (tmp_path / ".state").exists()


# --- the command


@pytest.fixture
def command(monkeypatch):
    """Run ``python -m models.train`` in this process, which has paid for its imports."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["models.train", *words])
        runpy.run_module("models.train", run_name="__main__")

    return run


def test_the_command_trains_and_shows_its_progress(tmp_path, command, capsys):
    prompts = '{"n_context": 5, "x_mean_std": 1}'
    command(
        *("--seeds", "4", "--l1", "0", "1e-3", "--steps", "9", "--batch-size", "8"),
        *("--model.n-context", "5", "--target", "noisy_y", "--prompts", prompts),
        *("--output", str(tmp_path)),
    )
    assert "2/2 models alive" in capsys.readouterr().err
    record = json.loads((tmp_path / "prompts0_l1_1e-3_seed4/training.json").read_text())
    assert record["training"]["target"] == "noisy_y"
    assert record["prompts"]["x_mean_std"] == 1
    assert callable(models.train)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.n-context", "20"], "error: the model has n_context=20, its prompts n_cont"),
        (["--prompts", '{"n_context": 2}'], "error: --prompts .* greater than or equal to 3"),
        (["--prompts", "varried"], "error: --prompts varried: .*give varied, uniform, plain"),
        (["--l1", "-1"], r"error: l1=\(-1.0,\) must not be negative"),
        (["--output", "/dev/null"], "error: cannot use /dev/null as output"),
        (["--model.d-model", "1000000"], "error: a model with d_model=1000000, .* needs"),
    ],
)
def test_the_command_explains_what_is_wrong(words, message, command):
    with pytest.raises(SystemExit, match=message):
        command(*words)
