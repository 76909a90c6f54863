"""The command line of an analysis: settings, read before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import tyro
from pydantic import ValidationError

from models.frozen import Frozen

# The shipped model with the smallest error on fresh prompts.
DEFAULT_CHECKPOINT = "varied_l1_3e-4_seed0"


class AnalysisConfig(Frozen):
    """Settings every script shares.

    Attributes:
        checkpoint: a shipped name, a checkpoint folder, or "constructed",
            "gradient_descent", "untrained".
        seed: seed of all randomness; the same seed gives the same bytes.
        output: folder for the results. By default reports/<analysis>, and for other settings than
            those on record there (or the defaults) results/<analysis>/<checkpoint>.
    """

    checkpoint: str = DEFAULT_CHECKPOINT
    seed: int = 0
    output: Path | None = None

    def __init__(self, **settings: Any):
        """Settings by name; ValueError on one out of its range, in the words of its option."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ValueError("; ".join(map(_in_words, error.errors()))) from None


C = TypeVar("C", bound=AnalysisConfig)


def read_command_line(config_type: type[C], doc: str) -> C:
    """Settings from the command line; --help and mistakes end the process (0 and 2).

    A script calls it above the imports that take seconds, and `probe.report.script.main` once
    more when it runs.

    Args:
        config_type: the analysis's settings.
        doc: description shown by --help.
    """
    return tyro.cli(config_type, description=doc)


def _in_words(problem: Any) -> str:
    """One problem of a `ValidationError`, with the option and the value."""
    words = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return words
    option = str(problem["loc"][0]).replace("_", "-")
    return f"--{option} {problem['input']}: {words[0].lower()}{words[1:]}"
