"""Training of the checkpoints that ship with the package, and their table.

One covariate, 50 samples: "varied" (scale and mean of x differ from prompt to prompt), 8 seeds
at each of three l1 penalties; "uniform" (x ~ U(0, 1)) and "plain" (x ~ N(0, 1)), in which V
hardly varies, 4 seeds at one penalty. Several covariates, each with a scale, a mean and a
correlation of its own in every prompt: "p2" (D = 5, L = 3, correlation up to 0.8), 6 seeds at
each of four penalties; its variants "p2_corr0" and "p2_corr95" (no correlation, up to 0.95) and
"p2_d7" (D = 7, where the determinant construction fits); "p3" and, at two penalties, "p3_corr95":
three covariates, D = 6, L = 4. All start from the same weights, seed by seed, where shapes allow.

An interrupted run continues when started again; a finished one trains nothing. The table has
one row per model: normalised MSE on fresh prompts, how many parameters are exactly zero and how
many below 1e-3, and the active heads of each layer.
"""

from pathlib import Path

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line

ALL = "zoo"


class Config(AnalysisConfig):
    """Settings of the training.

    Attributes:
        checkpoint: a run ("varied", "p2", ...) or the name of one of its models; "zoo" is all.
        seed: of the first model of each run; the others count up from it.
        folder: of the checkpoints; that of the package by default.
        steps: optimizer steps of every model.
    """

    checkpoint: str = ALL
    seed: int = Field(0, ge=0)
    folder: Path | None = None
    steps: int = Field(40_000, ge=1)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import shutil
from functools import partial

import pandas as pd

from models import ModelConfig, PromptConfig, TrainConfig, load, save, train
from models.checkpoint import SHIPPED, checkpoint_hash, provenance
from models.training.config import DISTRIBUTIONS
from models.training.grid import default_name
from probe.report.script import Output, main
from probe.subjects.sparsity import active_heads, exact_zeros

PENALTIES = (3e-4, 1e-3, 3e-3)
SMALL = 1e-3
HEADINGS = {
    "name": "checkpoint",
    "status": "status",
    "normalised_mse": "norm. MSE",
    "exact_zeros": "zeros",
    "below_1e-3": "< 1e-3",
    "active_heads": "heads",
}
# Settings that name many models; the folder name and the record tell which one it is.
GRID = {"prompts", "l1", "seeds"}


def runs(config: Config) -> dict[str, TrainConfig]:
    """What is trained, by the label that names the checkpoints."""
    three = partial(_several, config, p=3, n_context=60, d_model=6)
    return {
        "varied": _settings(config, DISTRIBUTIONS["varied"], PENALTIES, n_seeds=8),
        "uniform": _settings(config, DISTRIBUTIONS["uniform"]),
        "plain": _settings(config, DISTRIBUTIONS["plain"]),
        "p2": _several(config, l1=(1e-4, *PENALTIES)),
        "p2_corr0": _several(config, correlation=0.0),
        "p2_corr95": _several(config, correlation=0.95),
        "p2_d7": _several(config, d_model=7),
        "p3": three(),
        "p3_corr95": three(correlation=0.95, l1=(1e-4, 1e-3)),
    }


def names(label: str, settings: TrainConfig) -> list[str]:
    """Names of the checkpoints of a run, in the order of training."""
    return [default_name(label, l1, seed) for l1 in settings.l1 for seed in settings.seeds]


def run(config: Config) -> Output:
    """Train what is missing, and tabulate what was asked for."""
    chosen = {
        label: settings
        for label, settings in runs(config).items()
        if config.checkpoint in (ALL, label, *names(label, settings))
    }
    if not chosen:
        raise ValueError(
            f"checkpoint={config.checkpoint!r} is no run and no model of one; "
            f"the runs are {', '.join(runs(config))}, and {ALL} for all"
        )
    folder, rows = config.folder or SHIPPED, []
    for label, settings in chosen.items():
        _train(label, settings, folder)
        rows += [_row(label, folder / name) for name in names(label, settings)]
    scores = pd.DataFrame(rows)
    hashes = {name: checkpoint_hash(folder / name) for name in scores.name}
    notes = (f"checkpoints in {folder}",)
    shown = scores[list(HEADINGS)].rename(columns=HEADINGS)
    return Output(scores, shown, {}, hashes, notes)


def _train(label: str, settings: TrainConfig, folder: Path) -> None:
    wanted = names(label, settings)
    if all(_finished(folder / name, settings) for name in wanted):
        return
    work = folder / f".training_{label}"
    trained = train(settings, work, name=lambda _, l1, seed: default_name(label, l1, seed))
    for model, name in zip(trained, wanted, strict=True):
        save(model, folder / name, **provenance(work / name))
    shutil.rmtree(work)


def _finished(folder: Path, settings: TrainConfig) -> bool:
    """Whether a folder holds a model trained like this; what else was trained plays no part."""
    if not (folder / "training.json").is_file():
        return False
    record = provenance(folder)
    # Read as configs: a record lacks the fields that are newer than it.
    before = TrainConfig(**record["training"])
    same = all(
        getattr(before, name) == getattr(settings, name)
        for name in TrainConfig.model_fields.keys() - GRID
    )
    return same and PromptConfig(**record["prompts"]) == settings.prompts[0]


def _settings(
    config: Config,
    prompts: PromptConfig,
    l1: tuple[float, ...] = (1e-3,),
    n_seeds: int = 4,
    **shape: int,
) -> TrainConfig:
    size = {"n_context": prompts.n_context, "n_covariates": prompts.n_covariates}
    return TrainConfig(
        model=ModelConfig(**size, **shape),
        prompts=(prompts,),
        l1=l1,
        seeds=tuple(range(config.seed, config.seed + n_seeds)),
        steps=config.steps,
        backend="kernel",
    )


def _several(
    config: Config,
    p: int = 2,
    n_context: int = 40,
    d_model: int = 5,
    correlation: float = 0.8,
    l1: tuple[float, ...] = (1e-3,),
) -> TrainConfig:
    prompts = PromptConfig(
        n_context=n_context,
        n_covariates=p,
        x_log_scale=0.7,
        x_mean_std=1.0,
        x_correlation=correlation,
    )
    return _settings(config, prompts, l1, n_seeds=6, d_model=d_model, n_layers=p + 1)


def _row(label: str, folder: Path) -> dict[str, object]:
    model, record = load(folder), provenance(folder)
    parameters = [value.detach() for value in model.parameters()]
    return {
        "name": folder.name,
        "run": label,
        "l1": record["l1"],
        "seed": record["seed"],
        "status": record["status"],
        "normalised_mse": record["normalised_mse"],
        "parameters": model.cfg.n_parameters,
        "exact_zeros": exact_zeros(model),
        "below_1e-3": sum(int((value.abs() < SMALL).sum()) for value in parameters),
        "active_heads": "-".join(map(str, active_heads(model))),
    }


if __name__ == "__main__":
    main("train_zoo", Config, run, __doc__)
