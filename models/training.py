"""Training an ensemble of transformers on in-context regression.

`train` takes a `TrainConfig` and trains every combination of seed, l1 penalty and
prompt distribution. Given an output folder it writes a checkpoint per model, can be
killed at any moment, and continues where it was when called again with the same
config. The defaults train models that compute least squares in closed form.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tqdm import tqdm

from models.checkpoint import CheckpointError, load, save
from models.config import ModelConfig, PromptConfig
from models.ensemble import SMALL, Layout, Member, curve_steps
from models.optimizer import L1Method
from models.prompts import sample_prompts
from models.runfolder import RunFolder, TrainingError
from models.sweep import Result, Sweep
from models.transformer import LinearAttentionTransformer

__all__ = ["DISTRIBUTIONS", "TrainConfig", "TrainingError", "default_name", "train"]

# Named prompt distributions, all with 50 samples of one covariate.
DISTRIBUTIONS = {
    "varied": PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1.0),
    "uniform": PromptConfig(n_context=50, x_distribution="uniform"),
    "plain": PromptConfig(n_context=50),
}
EVALUATION_SEED = 20_260_715
EVALUATION_PROMPTS = 4096


class TrainConfig(BaseModel):
    """What to train: every combination of `seeds`, `l1` and `prompts`.

    Attributes:
        model: shape of every model; its n_context and n_covariates are those of the prompts.
        prompts: prompt distributions.
        l1: weights λ of the penalty λ‖w‖₁, on all parameters but the gain and bias of
            layer norm; on (N+1) W_V in place of W_V (see `models.ensemble`).
        seeds: each sets initial weights and prompts.
        steps: optimizer steps.
        batch_size: prompts per step.
        n_prompts: size of a fixed training set; None draws fresh prompts at every step.
        target: "least_squares", or "noisy_y", the y of the query drawn like the others.
        l1_method: "proximal" gives exact zeros, "subgradient" does not; see `models.optimizer`.
        l1_ramp: share of the run over which λ grows from 0.
        learning_rate: peak of Adam's rate.
        warmup_steps: of the rate, at most a tenth of the run.
        final_rate: last rate over the peak, at the end of a cosine.
        betas: Adam's decay rates.
        clip_norm: largest gradient norm of a model.
        dtype: of weights and prompts.
        backend: "kernel" (fused, CPU), "torch" (autograd, on the GPU if there is one), or
            "auto": torch with a GPU, else kernel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: ModelConfig = ModelConfig(n_context=50)
    prompts: tuple[PromptConfig, ...] = Field((DISTRIBUTIONS["varied"],), min_length=1)
    l1: tuple[float, ...] = Field((3e-4, 1e-3, 3e-3), min_length=1)
    seeds: tuple[int, ...] = Field(tuple(range(8)), min_length=1)
    steps: int = Field(40_000, ge=1)
    batch_size: int = Field(256, ge=1)
    n_prompts: int | None = Field(None, ge=1)
    target: Literal["least_squares", "noisy_y"] = "least_squares"
    l1_method: L1Method = "proximal"
    l1_ramp: float = Field(0.3, ge=0, le=1)
    learning_rate: float = Field(1e-2, gt=0)
    warmup_steps: int = Field(200, ge=0)
    final_rate: float = Field(1e-3, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.99)
    clip_norm: float = Field(1.0, gt=0)
    dtype: Literal["float32", "float64"] = "float32"
    backend: Literal["auto", "kernel", "torch"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for prompts in self.prompts:
            for name in ("n_context", "n_covariates"):
                ours, theirs = getattr(self.model, name), getattr(prompts, name)
                if ours != theirs:
                    raise ValueError(
                        f"the model has {name}={ours}, its prompts {name}={theirs}; "
                        f"give both the same"
                    )
        for name in ("prompts", "l1", "seeds"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values} has a value twice; name each once")
        if min(self.l1) < 0:
            raise ValueError(f"l1={self.l1} must not be negative")
        if not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError(f"seeds={self.seeds} must be from 0 to 2^63 - 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be at least 0 and below 1")
        if self.n_prompts is not None and self.n_prompts < self.batch_size:
            raise ValueError(
                f"n_prompts={self.n_prompts} is less than batch_size={self.batch_size}; "
                f"lower batch_size to at most n_prompts"
            )
        return self


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
        ValueError: if `name` does not give distinct folder names, or a model does not fit
            in memory.
    """
    config = config.model_copy(update={"backend": _backend(config.backend)})
    config.model.require_memory()
    members = _members(config, name)
    sweep = Sweep(config, n_jobs, scheduler, save_seconds, save_steps, progress)
    if output is None:
        results = {result.member.name: result for result in sweep.run(members)}
        return [_model(config, results[member.name]) for member in members]

    names = [member.name for member in members]
    with RunFolder.hold(output, config.model_dump(mode="json"), names) as folder:
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


def normalised_mse(model: LinearAttentionTransformer, prompts: PromptConfig) -> float:
    """Mean squared error against least squares over the variance of least squares.

    On 4096 fresh prompts that no training run sees, always the same ones.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    sample = sample_prompts(prompts, EVALUATION_PROMPTS, generator)
    with torch.no_grad():
        predictions = torch.cat([model(part).double() for part in sample.inputs.split(256)])
    error = (predictions - sample.least_squares).square().mean()
    return float(error / sample.least_squares.var(correction=0))


def _backend(asked: str) -> str:
    if asked == "auto":
        return "torch" if torch.cuda.is_available() else "kernel"
    return asked


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

    def curve(values: np.ndarray) -> list[float]:
        return [float(f"{value:.6g}") for value in values[: len(ends)]]

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
        normalised_mse=normalised_mse(model, member.prompts),
        evaluation={"seed": EVALUATION_SEED, "n_prompts": EVALUATION_PROMPTS},
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "torch", "numba")},
        },
    )
