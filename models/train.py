"""Command line of training: ``python -m models.train --help``.

``import models.train`` puts this module where the function `models.training.grid.train` was:
called, it does the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from pydantic import ValidationError

from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from models.training.config import DISTRIBUTIONS, TrainConfig
from models.training.grid import train
from models.training.run_folder import TrainingError


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[LinearAttentionTransformer]:
        """Train every model of a config; see `models.training.grid.train`."""
        return train(*args, **kwargs)


if __name__ != "__main__":
    sys.modules[__name__].__class__ = _CallableModule

_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _prompts_from_text(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A prompt distribution is one word: a name, or a JSON object of `PromptConfig` fields."""
    if info.type is not PromptConfig:
        return None

    def parse(words: list[str]) -> PromptConfig:
        if words[0] in DISTRIBUTIONS:
            return DISTRIBUTIONS[words[0]]
        try:
            return PromptConfig(**json.loads(words[0]))
        except (TypeError, ValueError) as error:  # tyro would show the word, but no reason
            reason = _messages(error) if isinstance(error, ValidationError) else error
            sys.exit(
                f"error: --prompts {words[0]}: {reason}; give {', '.join(DISTRIBUTIONS)}, or a "
                f'JSON object such as \'{{"n_context": 50, "x_log_scale": 0.7}}\''
            )

    def show(prompts: PromptConfig) -> list[str]:
        names = [name for name, known in DISTRIBUTIONS.items() if known == prompts]
        return [names[0] if names else prompts.model_dump_json(exclude_defaults=True)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(DISTRIBUTIONS)}}}|JSON",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, PromptConfig),
        str_from_instance=show,
    )


def main(
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig(),  # noqa: B008
    output: Path = Path("trained"),
    n_jobs: int = 1,
    scheduler: str | None = None,
    save_seconds: float = 20.0,
    save_steps: int = 5000,
) -> None:
    """Train an ensemble of transformers; the same command continues an interrupted run.

    Args:
        config: what to train.
        output: folder for the checkpoints.
        n_jobs: local processes; 1 trains in one process on all cores.
        scheduler: address of a Dask scheduler to train on, such as tcp://host:8786.
        save_seconds: time between saved states.
        save_steps: steps between saved states.
    """
    try:
        train(
            config,
            output,
            n_jobs=n_jobs,
            scheduler=scheduler,
            save_seconds=save_seconds,
            save_steps=save_steps,
        )
    except (TrainingError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to continue")


def _messages(error: ValidationError) -> str:
    parts = [
        f"{'.'.join(map(str, part['loc']))}: {part['msg']}" if part["loc"] else part["msg"]
        for part in error.errors()
    ]
    return "; ".join(part.removeprefix("Value error, ") for part in parts)


if __name__ == "__main__":
    try:
        with _registry:
            tyro.cli(main, prog="python -m models.train")
    except ValidationError as error:
        sys.exit(f"error: {_messages(error)}")
