"""Training an ensemble of transformers on in-context regression.

`train` takes a `TrainConfig` and trains every combination of seed, l1 penalty and
prompt distribution. Given an output folder it writes a checkpoint per model, can be
killed at any moment, and continues where it was when called again with the same
config. The defaults train models that compute least squares in closed form.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from tqdm import tqdm

from models.architecture.config import machine_memory
from models.architecture.transformer import LinearAttentionTransformer
from models.checkpoint import CheckpointError, load, save
from models.training.config import DISTRIBUTIONS, TrainConfig
from models.training.ensemble import SMALL, Layout, Member, curve_steps
from models.training.evaluation import EVALUATION_PROMPTS, EVALUATION_SEED, normalised_mse
from models.training.kernel import FusedKernel
from models.training.run_folder import RunFolder, TrainingError
from models.training.sweep import Result, Sweep

Name = Callable[[str, float, int], str]


def default_name(distribution: str, l1: float, seed: int) -> str:
    """Folder of a model, such as ``varied_l1_3e-4_seed2``."""
    mantissa, exponent = f"{l1:e}".split("e")
    penalty = f"{float(mantissa):g}e{int(exponent)}" if l1 else "0"
    return f"{distribution}_l1_{penalty}_seed{seed}"


def train(
    config: TrainConfig,
    output: str | os.PathLike[str] | None = None,
    name: Name = default_name,
    n_jobs: int = 1,
    scheduler: str | None = None,
    save_seconds: float = 20.0,
    save_steps: int = 5000,
    progress: bool = True,
) -> list[LinearAttentionTransformer]:
    """Train every model of `config`.

    The weights are a function of `config` alone, to the last bit on one kind of CPU:
    processes, machines, threads, interruptions and the other models change nothing.
    (On a GPU, the other models change the rounding.)

    Args:
        config: what to train.
        output: folder for the checkpoints and, meanwhile, the state of the run; None
            keeps everything in memory. The same call continues a run that was killed,
            and only loads one that is finished.
        name: (label of the distribution, l1, seed) -> folder name of the model. The
            label is the key in `DISTRIBUTIONS`, else "prompts" and the index.
        n_jobs: local processes; 1 trains in this one, on all of numba's threads.
        scheduler: address of a Dask scheduler, ``tcp://host:port``, to train on its
            workers instead; needs the extra ``cluster``.
        save_seconds: time between saved states.
        save_steps: steps between saved states.
        progress: show a progress bar.

    Returns:
        `LinearAttentionTransformer` models, ordered by distribution, then penalty,
        then seed. A model that diverged holds its last finite weights; a warning
        names it, and its training.json has the status "diverged".

    Raises:
        TrainingError: if the output folder is in use, holds another run or cannot be
            written, or if Dask is asked for and missing.
        ValueError: if `name` does not give distinct folder names, the kernel is asked for and
            does not compute such models, or a model or a step does not fit in memory.
    """
    config = config.model_copy(update={"backend": _backend(config)})
    config.model.require_memory()
    members = _members(config, name)
    n_groups = len(config.seeds) * len(config.prompts)
    if scheduler is not None:
        n_groups = 1  # of one worker
    elif n_jobs != 1:
        n_groups = min(n_groups, joblib.effective_n_jobs(n_jobs))
    _require_memory(config, n_groups)
    sweep = Sweep(config, n_jobs, scheduler, save_seconds, save_steps, progress)
    if output is None:
        results = {result.member.name: result for result in sweep.run(members)}
        return [_model(config, results[member.name]) for member in members]

    names = [member.name for member in members]
    with RunFolder.hold(output, _recorded(config), names, _completed) as folder:
        pending = [member for member in members if not folder.finished(member.name)]
        if not pending and progress:
            tqdm.write(f"all {len(members)} models in {folder.path} are finished: nothing to train")
        for result in sweep.run(pending, folder):
            try:
                _save(config, result, folder.path / result.member.name)
            except CheckpointError as error:
                raise TrainingError(
                    f"{error}; the saved state is intact: run the same command again to continue"
                ) from error
        folder.clear_states()
        return [load(folder.path / each) for each in names]


def _backend(config: TrainConfig) -> str:
    """The backend that "auto" stands for; raises ValueError if the one asked for cannot."""
    reason = FusedKernel.supports(config.model)
    if config.backend == "auto":
        return "torch" if reason or torch.cuda.is_available() else "kernel"
    if config.backend == "kernel" and reason:
        raise ValueError(f"backend='kernel': {reason}; choose backend='torch'")
    return config.backend


def _recorded(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _completed(run: dict[str, Any]) -> dict[str, Any]:
    """A recorded config with the defaults of fields that are newer than the record."""
    return _recorded(TrainConfig(**run))


def _require_memory(config: TrainConfig, n_groups: int) -> None:
    """Refuse prompts that this machine cannot hold, before any work."""
    on_gpu = config.backend == "torch" and torch.cuda.is_available()
    n_models = 0 if config.backend == "kernel" else len(config.l1) * n_groups if on_gpu else 1
    needed = config.bytes_at_once(n_groups, n_models)
    if on_gpu:
        where, memory = "the GPU", torch.cuda.get_device_properties(0).total_memory
    else:
        where, memory = "this machine", machine_memory()
    if needed > memory:
        kept = "" if config.n_prompts is None else f" and n_prompts={config.n_prompts:,}"
        raise ValueError(
            f"batch_size={config.batch_size:,}{kept}, for {n_groups} seeds and distributions at a "
            f"time, need at least {needed / 2**30:,.1f} GiB; {where} has {memory / 2**30:,.1f} "
            f"GiB. Lower {'batch_size' if config.n_prompts is None else 'n_prompts or batch_size'}"
        )


def _members(config: TrainConfig, name: Name) -> list[Member]:
    """The grid in its fixed order; raises ValueError unless names are distinct folder names."""
    labels = {prompts: label for label, prompts in DISTRIBUTIONS.items()}
    members = [
        Member(name(labels.get(prompts, f"prompts{index}"), l1, seed), prompts, l1, seed)
        for index, prompts in enumerate(config.prompts)
        for l1 in config.l1
        for seed in config.seeds
    ]
    names = [member.name for member in members]
    for each in names:
        if not each or each.startswith(".") or Path(each).name != each:
            raise ValueError(f"name gives {each!r}, which is no plain folder name; change it")
        if names.count(each) > 1:
            raise ValueError(f"name gives {each!r} twice; put distribution, l1 and seed into it")
    return members


def _model(config: TrainConfig, result: Result) -> LinearAttentionTransformer:
    """The trained model, with 1/(N+1) folded into W_V; warns if it diverged."""
    layout, weights = Layout(config.model), result.arrays["weights"]
    state = layout.split((weights * layout.fold.astype(weights.dtype))[None])
    model = LinearAttentionTransformer(config.model).to(getattr(torch, config.dtype))
    model.load_state_dict({name: torch.as_tensor(value[0]) for name, value in state.items()})
    if result.diverged is not None:
        warnings.warn(
            f"{result.member.name} diverged at step {result.diverged}: it holds its last finite "
            f"weights; try another seed or a lower learning_rate (now {config.learning_rate})",
            stacklevel=4,
        )
    return model


def _save(config: TrainConfig, result: Result, folder: Path) -> None:
    """Write the checkpoint of a finished model."""
    model, arrays, member = _model(config, result), result.arrays, result.member
    stopped = config.steps if result.diverged is None else result.diverged
    ends = curve_steps(config.steps)
    lengths = np.diff(ends, prepend=0)
    ends = ends[ends <= stopped]

    def curve(values: np.ndarray) -> list[float | None]:
        return [_or_null(float(f"{value:.6g}")) for value in values[: len(ends)]]

    save(
        model,
        folder,
        prompts=member.prompts,
        seed=member.seed,
        l1=member.l1,
        training=config,
        status="finished" if result.diverged is None else "diverged",
        steps=stopped,
        loss_curve={"step": ends.tolist(), "loss": curve(arrays["loss"] / lengths)},
        sparsity_curve={
            "step": ends.tolist(),
            "zero": curve(arrays["zero"]),
            f"below_{SMALL:g}": curve(arrays["small"]),
        },
        normalised_mse=_or_null(normalised_mse(model, member.prompts)),
        evaluation={"seed": EVALUATION_SEED, "n_prompts": EVALUATION_PROMPTS},
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "torch", "numba")},
        },
    )


def _or_null(value: float) -> float | None:
    """A number that JSON can hold: what a diverged model gives may be infinite or NaN."""
    return value if math.isfinite(value) else None
