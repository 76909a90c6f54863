"""Train the shipped checkpoints of several covariates.

Covariates have a scale, a mean and a correlation of their own in every prompt. "p2": two
covariates, D = 5, L = 3, H = 2, correlation up to 0.8, 6 seeds at each of four l1 penalties.
Variants of it, 6 seeds at one penalty: "p2_corr0" and "p2_corr95" (no correlation, up to
0.95) and "p2_d7" (D = 7, where the determinant construction fits). "p3" and "p3_corr95" (the
latter at two penalties): three covariates, D = 6, L = 4. Variants start from the same weights,
seed by seed, where shapes allow.

An interrupted run continues when started again; a finished one trains nothing.
"""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from models import CheckpointError, ModelConfig, PromptConfig, TrainConfig, save, train
from models.checkpoint import SHIPPED, provenance
from models.training import TrainingError, default_name
from probe.reporting import table

PENALTIES = (1e-4, 3e-4, 1e-3, 3e-3)


class Config(BaseModel):
    """Settings of the zoo.

    Attributes:
        seeds: models per penalty.
        output: folder of the checkpoints.
        steps: optimizer steps of every model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seeds: int = Field(6, ge=1)
    output: Path = SHIPPED
    steps: int = Field(40_000, ge=1)


def runs(config: Config) -> dict[str, TrainConfig]:
    """What is trained, by the label that names the checkpoints."""
    return {
        "p2": _settings(config, l1=PENALTIES),
        "p2_corr0": _settings(config, correlation=0.0),
        "p2_corr95": _settings(config, correlation=0.95),
        "p2_d7": _settings(config, d_model=7),
        "p3": _settings(config, p=3, n_context=60, d_model=6),
        "p3_corr95": _settings(
            config, p=3, n_context=60, d_model=6, correlation=0.95, l1=(1e-4, 1e-3)
        ),
    }


def run(config: Config) -> pd.DataFrame:
    """Train what is missing.

    Returns:
        DataFrame with columns name, l1, seed, status, normalised_mse.

    Raises:
        TrainingError, CheckpointError: if a folder cannot be used.
    """
    rows = []
    for label, settings in runs(config).items():
        names = [default_name(label, l1, seed) for l1 in settings.l1 for seed in settings.seeds]
        if not all((config.output / name / "training.json").is_file() for name in names):
            work = config.output / f".training_{label}"
            trained = train(settings, work, name=partial(_name, label))
            for model, name in zip(trained, names, strict=True):
                save(model, config.output / name, **provenance(work / name))
            shutil.rmtree(work)
        for name in names:
            record = provenance(config.output / name)
            rows.append({"name": name} | {key: record[key] for key in ("l1", "seed", "status")})
            rows[-1]["normalised_mse"] = record["normalised_mse"]
    return pd.DataFrame(rows)


def _name(label: str, distribution: str, l1: float, seed: int) -> str:
    return default_name(label, l1, seed)


def _settings(
    config: Config,
    p: int = 2,
    n_context: int = 40,
    d_model: int = 5,
    correlation: float = 0.8,
    l1: tuple[float, ...] = (1e-3,),
) -> TrainConfig:
    shape = {"n_context": n_context, "n_covariates": p}
    return TrainConfig(
        model=ModelConfig(d_model=d_model, n_layers=p + 1, **shape),
        prompts=(
            PromptConfig(x_log_scale=0.7, x_mean_std=1.0, x_correlation=correlation, **shape),
        ),
        l1=l1,
        seeds=tuple(range(config.seeds)),
        steps=config.steps,
        backend="kernel",
    )


def main() -> None:
    """Command line; errors of the input exit with 2."""
    try:
        config = tyro.cli(Annotated[Config, tyro.conf.arg(name="")], description=__doc__)
        trained = run(config)
    except (ValidationError, TrainingError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    Console().print(table(trained))


if __name__ == "__main__":
    main()
