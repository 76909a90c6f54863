"""How long does one training step of an ensemble take, and what does the fused kernel save?

One step is loss and all gradients of every model on its own prompts. Four implementations
do the same work (compared first): one model at a time with autograd, the ensemble batched in
PyTorch, torch.func.vmap, and the fused kernel; each on one thread and on two. Then how the
two fastest grow with context length and ensemble size, what the kernel's compilation costs,
and peak memory. Times are microseconds per prompt and model: the median over repeats, taken
in turns so that a busy machine disturbs all alike, and their range.
"""

from pydantic import Field

from models import ModelConfig
from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the benchmark.

    Attributes:
        checkpoint: the model whose shape is timed (its weights play no part).
        n_models: models in the ensemble.
        batch: prompts per model.
        n_context: context samples per prompt.
        repeats: samples per figure.
    """

    checkpoint: str = "untrained"
    n_models: int = Field(8, ge=1)
    batch: int = Field(256, ge=1)
    n_context: int = Field(20, ge=1)
    repeats: int = Field(7, ge=1)

    def model(self, n_context: int) -> ModelConfig:
        """The shape that is timed, for prompts of `n_context` samples."""
        return load_subject(self.checkpoint).model.cfg.model_copy(update={"n_context": n_context})


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import matplotlib.pyplot as plt
import numba
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.func import functional_call, grad_and_value, vmap

from models.training.kernel import FusedKernel
from probe import load_subject
from probe.figures.style import TWO_COLUMNS
from probe.report.script import Output, main

KERNEL, BATCHED, VMAP, SINGLE = "kernel", "batched", "vmap", "autograd"
ALL = (SINGLE, BATCHED, VMAP, KERNEL)
FAST = (BATCHED, KERNEL)
CONTEXTS = (20, 50, 100, 200, 500, 1000, 2000)
ENSEMBLES = (1, 2, 4, 8, 16, 32)
# One sample calls a step until this many seconds have passed, so that timers do not matter.
SAMPLE_SECONDS = 0.02
# Prompts per model fall as contexts grow, down to this many: whole vectors, bounded memory.
MIN_BATCH = 16

Step = Callable[[], tuple[np.ndarray, dict[str, np.ndarray]]]


def run(config: Config) -> Output:
    """Time everything; the scores have one row per implementation, size and threads."""
    steps = make_steps(config.model(config.n_context), config.n_models, config.batch, config.seed)
    difference = largest_difference(steps)
    # Two threads where the machine has them.
    threads = tuple(range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1))
    parts = [timed(config, "ways", steps, threads, config.n_context, config.n_models)]
    for n_context in CONTEXTS:
        batch = _batch(config, n_context)
        steps = make_steps(config.model(n_context), config.n_models, batch, config.seed, FAST)
        parts.append(timed(config, "context", steps, threads, n_context, config.n_models))
    for n_models in ENSEMBLES:
        model = config.model(config.n_context)
        steps = make_steps(model, n_models, config.batch, config.seed, FAST)
        parts.append(timed(config, "ensemble", steps, threads, config.n_context, n_models))
    scores = pd.concat(parts, ignore_index=True)
    start = start_up(config)
    memory = peak_memory(config)
    notes = (
        f"Largest relative difference of a gradient between implementations: {difference:.1e}.",
        f"Kernel, first call with an empty cache {start['first']:.1f} s, "
        f"in a later process {start['later']:.2f} s.",
        *(
            f"Peak memory of a step, {name}: "
            + ", ".join(f"{mib:.1f} MiB at N={n}" for n, mib in by_context.items())
            for name, by_context in memory.items()
        ),
        "x kernel: median time over the kernel's at the same size and number of threads.",
    )
    figures = {"scaling": (scaling_figure(scores), scores)}
    facts = {"start_up_seconds": start, "peak_memory_mib": memory, "cpus": os.cpu_count()}
    subject = load_subject(config.checkpoint)
    return Output(
        scores, _shown(scores), figures, subject.sha256, notes, facts, source=subject.source
    )


def _batch(config: Config, n_context: int) -> int:
    """Prompts per model in the comparison of contexts."""
    return max(MIN_BATCH, config.batch * CONTEXTS[0] // n_context)


def make_steps(
    model: ModelConfig, n_models: int, batch: int, seed: int, names: tuple[str, ...] = ALL
) -> dict[str, Step]:
    """One training step of the same ensemble on the same prompts, several ways (float32)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    shapes = model.parameter_shapes()
    params = {name: normal(n_models, *shape, scale=0.3) for name, shape in shapes.items()}
    x = normal(n_models, model.n_covariates, model.n_context + 1, batch)
    y, targets = normal(n_models, model.n_context, batch), normal(n_models, batch)
    makers = {SINGLE: _single_step, BATCHED: _batched_step, VMAP: _vmap_step, KERNEL: _kernel_step}
    return {name: makers[name](model, params, x, y, targets) for name in names}


def _kernel_step(model: ModelConfig, params, x, y, targets) -> Step:
    kernel = FusedKernel(model, targets.shape[-1], targets.dtype)
    return lambda: kernel.loss_and_gradients(params, x, y, targets)


def _batched_step(model: ModelConfig, params, x, y, targets) -> Step:
    leaves = {name: torch.from_numpy(value).requires_grad_() for name, value in params.items()}
    tensors = [torch.from_numpy(array) for array in (x, y, targets)]

    def step():
        losses = _batched_loss(model, leaves, *tensors)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        arrays = (gradient.numpy() for gradient in gradients)
        return losses.detach().numpy(), dict(zip(leaves, arrays, strict=True))

    return step


def _batched_loss(model: ModelConfig, params, x, y, targets) -> torch.Tensor:
    """Losses of all models, by the fastest formula in PyTorch that is known for this model.

    With A_h = W_Q W_Kᵀ and S = QᵀQ the sum over heads is Q G, where G = Σ_h A_h S W_V,h is
    [d_model, d_model] per prompt: no tensor has both a head and a position axis.
    """
    y = torch.nn.functional.pad(y, (0, 0, 0, 1))
    rows = torch.cat([torch.ones_like(x[:, :1]), x, y[:, None]], dim=1).permute(0, 3, 2, 1)
    resid = rows @ params["embed.W_E"][:, None] + params["embed.b_E"][:, None, None]
    for layer in range(model.n_layers):
        resid = _batched_block(model, params, f"blocks.{layer}", resid)
    w_u = params["unembed.W_U"]
    read = torch.einsum("mbpd,mpd->mb", resid[:, :, -w_u.shape[1] :], w_u)
    return (read + params["unembed.b_U"][:, None] - targets).square().mean(dim=1)


def _batched_block(model: ModelConfig, params, name: str, resid: torch.Tensor) -> torch.Tensor:
    w_q, w_k, w_v = (params[f"{name}.attn.{matrix}"] for matrix in ("W_Q", "W_K", "W_V"))
    context = resid[:, :, :-1] if model.exclude_query else resid
    left = torch.einsum("mhij,mbjk->mbihk", w_q @ w_k.mT, context.mT @ context)
    attention = resid @ torch.einsum("mbihk,mhkl->mbil", left, w_v)
    if model.normalization == "none":
        return resid + attention
    normed = attention if model.normalization == "branch" else resid + attention
    normed = torch.nn.functional.layer_norm(normed, normed.shape[-1:], eps=model.norm_eps)
    if model.norm_affine:
        gain, bias = (params[f"{name}.ln1_post.{part}"][:, None, None] for part in "wb")
        normed = normed * gain + bias
    return resid + normed if model.normalization == "branch" else normed


def _rows(x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    """Prompts as the model takes them, [M, batch, N+1, 2+p]."""
    y = np.pad(y, ((0, 0), (0, 1), (0, 0)))
    features = np.concatenate([np.ones_like(x[:, :1]), x, y[:, None]], axis=1)
    return torch.from_numpy(features).permute(0, 3, 2, 1).contiguous()


def _build(model: ModelConfig):
    from models import LinearAttentionTransformer  # seconds of imports that only two ways need

    return LinearAttentionTransformer(model)


def _single_step(model: ModelConfig, params, x, y, targets) -> Step:
    rows, targets = _rows(x, y), torch.from_numpy(targets)
    models = [_build(model) for _ in targets]
    for m, one in enumerate(models):
        one.load_state_dict({name: torch.as_tensor(value[m]) for name, value in params.items()})

    def step():
        losses, gradients = [], []
        for m, one in enumerate(models):
            loss = (one(rows[m]) - targets[m]).square().mean()
            gradients.append(torch.autograd.grad(loss, list(one.parameters())))
            losses.append(loss.item())
        names = [name for name, _ in models[0].named_parameters()]
        stacked = [torch.stack(parts).numpy() for parts in zip(*gradients, strict=True)]
        return np.array(losses), dict(zip(names, stacked, strict=True))

    return step


def _vmap_step(model: ModelConfig, params, x, y, targets) -> Step:
    one, rows, targets = _build(model), _rows(x, y), torch.from_numpy(targets)
    tensors = {name: torch.from_numpy(value) for name, value in params.items()}

    def loss(own, prompts, target):
        return (functional_call(one, own, (prompts,)) - target).square().mean()

    ensemble = vmap(grad_and_value(loss))

    def step():
        gradients, losses = ensemble(tensors, rows, targets)
        return losses.numpy(), {name: value.numpy() for name, value in gradients.items()}

    return step


def largest_difference(steps: dict[str, Step]) -> float:
    """Largest distance between two implementations' gradients, relative to their norm."""
    _, reference = steps[SINGLE]()
    differences = []
    for name, step in steps.items():
        if name != SINGLE:
            _, gradients = step()
            norm = np.sqrt(sum(np.square(value).sum() for value in reference.values()))
            squares = sum(np.square(gradients[k] - reference[k]).sum() for k in reference)
            differences.append(float(np.sqrt(squares) / norm))
    return max(differences)


def timed(
    config: Config,
    comparison: str,
    steps: dict[str, Step],
    threads: tuple[int, ...],
    n_context: int,
    n_models: int,
) -> pd.DataFrame:
    """Time every step at every number of threads, taking turns.

    Returns:
        One row each, columns comparison, implementation, threads, n_context, n_models,
        batch, and microseconds per prompt and model: median, low, high; ratio to the kernel.
    """
    batch = _batch(config, n_context) if comparison == "context" else config.batch
    cases = list(product(steps, threads))
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    before = torch.get_num_threads(), numba.get_num_threads()
    try:
        for repeat in range(config.repeats + 1):
            for name, n_threads in cases:
                torch.set_num_threads(n_threads)
                numba.set_num_threads(n_threads)
                seconds = _sample(steps[name])
                if repeat:  # the first round warms up
                    samples[name, n_threads].append(seconds / (n_models * batch) * 1e6)
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])
    return pd.DataFrame(
        {
            "comparison": comparison,
            "implementation": name,
            "threads": n_threads,
            "n_context": n_context,
            "n_models": n_models,
            "batch": batch,
            "median": np.median(values),
            "low": min(values),
            "high": max(values),
            "ratio": np.median(values) / np.median(samples[KERNEL, n_threads]),
        }
        for (name, n_threads), values in samples.items()
    )


def _sample(step: Step) -> float:
    """Seconds per call."""
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SAMPLE_SECONDS or not calls:
        step()
        calls += 1
    return elapsed / calls


_START_UP = """
import sys, time
import numpy as np
from models.architecture.config import ModelConfig
from models.training.kernel import FusedKernel
model = ModelConfig.model_validate_json(sys.argv[1])
ones = lambda *shape: np.ones(shape, np.float32)
params = {name: ones(1, *shape) for name, shape in model.parameter_shapes().items()}
kernel, n = FusedKernel(model, 16, np.float32), model.n_context
start = time.perf_counter()
x = ones(1, model.n_covariates, n + 1, 16)
kernel.loss_and_gradients(params, x, ones(1, n, 16), ones(1, 16))
print(time.perf_counter() - start)
"""


def start_up(config: Config) -> dict[str, float]:
    """Seconds of the kernel's first call, with an empty cache and in a later process."""
    model = config.model(config.n_context).model_dump_json()
    with tempfile.TemporaryDirectory() as cache:
        seconds = [
            subprocess.run(
                [sys.executable, "-c", _START_UP, model],
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for _ in range(2)
        ]
    return {"first": float(seconds[0]), "later": float(seconds[1])}


def peak_memory(config: Config) -> dict[str, dict[int, float]]:
    """MiB that one step adds to a fresh process, by implementation and context length.

    Empty where the system does not tell (it is read from Linux's /proc).
    """
    if not Path("/proc/self/clear_refs").exists():
        return {}
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {name: pool.submit(_peaks, config, name) for name in (BATCHED, KERNEL)}
        return {name: job.result() for name, job in jobs.items()}


def _peaks(config: Config, name: str) -> dict[int, float]:
    torch.set_num_threads(1)
    numba.set_num_threads(1)

    def peak() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10

    model = config.model(CONTEXTS[0])
    make_steps(model, 1, MIN_BATCH, config.seed, (name,))[name]()  # loads the libraries
    result = {}
    for n_context in (CONTEXTS[0], CONTEXTS[-1]):
        batch = _batch(config, n_context)
        model = config.model(n_context)
        step = make_steps(model, config.n_models, batch, config.seed, (name,))[name]
        Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from here
        before = peak()
        step()
        result[n_context] = peak() - before
    return result


def scaling_figure(scores: pd.DataFrame) -> Figure:
    """Time per prompt and model against context length and ensemble size."""
    figure, axes = plt.subplots(1, 2, figsize=(TWO_COLUMNS, 2.6), sharey=True)
    panels = (("context", "n_context", "context samples N"), ("ensemble", "n_models", "models"))
    for ax, (comparison, column, label) in zip(axes, panels, strict=True):
        rows = scores[scores["comparison"] == comparison]
        for (name, threads), curve in rows.groupby(["implementation", "threads"]):
            ax.errorbar(
                curve[column],
                curve["median"],
                yerr=[curve["median"] - curve["low"], curve["high"] - curve["median"]],
                color="C0" if name == KERNEL else "C1",
                linestyle="-" if threads == 1 else "--",
                marker="o",
                markersize=3,
                capsize=2,
                label=f"{name}, {threads} thread{'s' * (threads > 1)}",
            )
        ax.set(xscale="log", yscale="log", xlabel=label)
        ax.set_xticks(sizes := sorted(set(rows[column])), [str(size) for size in sizes])
        ax.minorticks_off()
    axes[0].set_ylabel("µs per prompt and model")
    axes[1].legend(loc="upper right")
    return figure


def _shown(scores: pd.DataFrame) -> pd.DataFrame:
    """One row per comparison, size and implementation: medians, and multiples of the kernel's."""
    index = ["comparison", "n_context", "n_models", "implementation"]
    by_threads = scores.pivot(index=index, columns="threads", values=["median", "ratio"])
    order = pd.MultiIndex.from_frame(scores[index].drop_duplicates())
    shown = by_threads.loc[order]
    titles = {"median": "µs, {} thr.", "ratio": "x kernel, {}"}
    shown.columns = [titles[value].format(threads) for value, threads in shown.columns]
    names = {"n_context": "N", "n_models": "models", "implementation": "way"}
    return shown.reset_index().rename(columns=names)


if __name__ == "__main__":
    main("benchmark_training", Config, run, __doc__)
