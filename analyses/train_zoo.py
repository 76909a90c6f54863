"""Train the checkpoints that ship with the package, and tabulate them.

Three prompt distributions, all with 50 samples of one covariate. "varied" (scale and mean
of x differ from prompt to prompt): 8 seeds at each of three l1 penalties; "uniform"
(x ~ U(0, 1)) and "plain" (x ~ N(0, 1)), in which V hardly varies: 4 seeds at one penalty.
An interrupted run continues when started again; a finished one trains nothing.

zoo.csv has one row per model: normalised MSE on fresh prompts, how many parameters are
exactly zero and how many below 1e-3, and the active heads of each layer (`active_heads`).
"""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from models import (
    CheckpointError,
    LinearAttentionTransformer,
    TrainConfig,
    load,
    save,
    train,
)
from models.checkpoint import SHIPPED, provenance
from models.runfolder import write_atomically
from models.training import DISTRIBUTIONS, TrainingError, default_name
from probe.reporting import table

N_VARIED, N_OTHERS = 8, 4
OTHERS_L1 = 1e-3
SMALL = 1e-3
# A head this much weaker than the strongest of its layer is switched off.
ACTIVE = 1e-3
HEADINGS = {
    "normalised_mse": "norm. MSE",
    "exact_zeros": "zeros",
    "active_heads_0": "heads 0",
    "active_heads_1": "heads 1",
}


class Config(BaseModel):
    """Settings of the zoo.

    Attributes:
        seed: of the first model of each distribution; the others count up from it.
        output: folder of the checkpoints and of zoo.csv.
        steps: optimizer steps of every model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int = Field(0, ge=0)
    output: Path = SHIPPED
    steps: int = Field(40_000, ge=1)


def runs(config: Config) -> dict[str, TrainConfig]:
    """What is trained, by name of the run."""
    shared = {"steps": config.steps, "backend": "kernel"}
    return {
        "varied": TrainConfig(
            prompts=(DISTRIBUTIONS["varied"],),
            seeds=tuple(range(config.seed, config.seed + N_VARIED)),
            **shared,
        ),
        "others": TrainConfig(
            prompts=(DISTRIBUTIONS["uniform"], DISTRIBUTIONS["plain"]),
            l1=(OTHERS_L1,),
            seeds=tuple(range(config.seed, config.seed + N_OTHERS)),
            **shared,
        ),
    }


def run(config: Config) -> pd.DataFrame:
    """Train what is missing, and tabulate every model of the zoo.

    Raises:
        TrainingError, CheckpointError: if a folder cannot be used.
    """
    rows = []
    for label, settings in runs(config).items():
        names = [
            (distribution, default_name(distribution, l1, seed))
            for distribution in (_label(prompts) for prompts in settings.prompts)
            for l1 in settings.l1
            for seed in settings.seeds
        ]
        if not all(_finished(config.output / name, settings) for _, name in names):
            work = config.output / ".training" / label
            for model, (_, name) in zip(train(settings, work), names, strict=True):
                save(model, config.output / name, **provenance(work / name))
            shutil.rmtree(config.output / ".training")
        rows += [_row(distribution, name, config.output / name) for distribution, name in names]
    zoo = pd.DataFrame(rows)
    text = zoo.to_csv(index=False, float_format="%.4g")
    write_atomically(config.output / "zoo.csv", text.encode())
    return zoo


def active_heads(model: LinearAttentionTransformer) -> list[int]:
    """Heads that contribute, per layer.

    The contribution of head h is ‖A_h‖·‖B_h‖ (Frobenius; A_h = W_Q W_Kᵀ, B_h = W_V): neither
    factor means anything alone, since one can be scaled up and the other down. Under the
    branch norm, rows of B_h count without their mean, which layer norm removes. A head is
    active if it contributes at least 1e-3 of what the strongest head of its layer does.
    """
    counts = []
    for block in model.blocks:
        attn = block.attn
        qk = attn.W_Q @ attn.W_K.transpose(1, 2)
        ov = attn.W_V
        if model.cfg.normalization == "branch":
            ov = ov - ov.mean(dim=2, keepdim=True)
        strength = qk.norm(dim=(1, 2)) * ov.norm(dim=(1, 2))
        counts.append(int((strength > ACTIVE * strength.max()).sum()))
    return counts


def _row(distribution: str, name: str, folder: Path) -> dict[str, object]:
    model, record = load(folder), provenance(folder)
    parameters = [value.detach() for value in model.parameters()]
    return {
        "name": name,
        "distribution": distribution,
        "l1": record["l1"],
        "seed": record["seed"],
        "status": record["status"],
        "normalised_mse": record["normalised_mse"],
        "parameters": sum(value.numel() for value in parameters),
        "exact_zeros": sum(int((value == 0).sum()) for value in parameters),
        "below_1e-3": sum(int((value.abs() < SMALL).sum()) for value in parameters),
        **{f"active_heads_{layer}": n for layer, n in enumerate(active_heads(model))},
    }


def _label(prompts) -> str:
    return next(label for label, known in DISTRIBUTIONS.items() if known == prompts)


def _finished(folder: Path, settings: TrainConfig) -> bool:
    """Whether a folder holds a model of this very run."""
    if not (folder / "training.json").is_file():
        return False
    return provenance(folder).get("training") == settings.model_dump(mode="json")


def main() -> None:
    """Command line; errors of the input exit with 2."""
    try:
        config = tyro.cli(Annotated[Config, tyro.conf.arg(name="")], description=__doc__)
        zoo = run(config)
    except (ValidationError, TrainingError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console()
    shown = zoo.drop(columns=["distribution", "l1", "seed", "parameters"])
    console.print(table(shown.rename(columns=HEADINGS)))
    console.print(f"wrote {config.output / 'zoo.csv'}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
