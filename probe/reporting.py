"""Scaffolding of the analysis scripts: command line, output folder, provenance.

A script is a config and ``run(config) -> Output``; `main` does the rest. Outputs of a run are
written aside and moved in place file by file at its end: a run that fails leaves earlier results
as they were.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
import tyro
from joblib import Parallel
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from models.checkpoint import to_json
from models.runfolder import TrainingError
from probe.figures import save_figure, style

# The shipped model with the smallest error on fresh prompts.
DEFAULT_CHECKPOINT = "varied_l1_3e-4_seed0"
_PACKAGES = ("torch", "transformer-lens", "numpy", "scikit-learn", "pandas", "matplotlib")


class AnalysisConfig(BaseModel):
    """Settings every script shares.

    Attributes:
        checkpoint: a shipped name, a checkpoint folder, or "constructed",
            "gradient_descent", "untrained".
        seed: seed of all randomness; the same seed gives the same bytes.
        output: folder for the results; reports/<analysis> by default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    checkpoint: str = DEFAULT_CHECKPOINT
    seed: int = 0
    output: Path | None = None


C = TypeVar("C", bound=AnalysisConfig)


@dataclass(frozen=True)
class Output:
    """What a run hands back.

    Attributes:
        scores: the tidy result, written as scores.csv.
        shown: the wide table printed in the terminal.
        figures: name -> (figure, its data).
        sha256: hash of the studied checkpoint(s).
        notes: lines printed below the table.
        facts: further JSON values for run.json.
        pages: file name -> text of pages written beside the tables.
    """

    scores: pd.DataFrame
    shown: pd.DataFrame
    figures: dict[str, tuple[Figure, pd.DataFrame]]
    sha256: str | dict[str, str]
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)


def main(name: str, config_type: type[C], run: Callable[[C], Output], doc: str) -> None:
    """Run an analysis from the command line; errors of the input exit with 2.

    Args:
        name: of the analysis; results go to reports/<name>/ unless told otherwise.
        config_type: its settings, a `AnalysisConfig`.
        run: the analysis.
        doc: description shown by --help.
    """
    console = Console()
    # Matrices here are too small for threads to pay, and one thread sums in one order.
    torch.set_num_threads(1)
    try:
        config = tyro.cli(config_type, description=doc)
        folder = config.output or Path("reports") / name
        _require_writable(folder)
        with style():
            output = run(config)
            written = write_output(folder, output, config)
    except (ValidationError, ValueError, OSError, TrainingError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    console.print(table(output.shown))
    for note in output.notes:
        console.print(note, markup=False, highlight=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def in_parallel(calls: Sequence[Any], jobs: int, label: str) -> list[Any]:
    """Results of `joblib.delayed` calls in their order, with a progress bar.

    Args:
        calls: made with `joblib.delayed`.
        jobs: processes.
        label: what a call is about.
    """
    results = Parallel(n_jobs=jobs, return_as="generator")(calls)
    bar = tqdm(results, desc=label, total=len(calls), leave=False, disable=len(calls) < 2)
    return list(bar)


def write_output(folder: Path, output: Output, config: AnalysisConfig) -> list[Path]:
    """Write scores.csv, figures/, pages and run.json; all of them or none."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".writing.", dir=folder))
    try:
        output.scores.to_csv(staging / "scores.csv", index=False, float_format="%.10g")
        for figure_name, (figure, data) in output.figures.items():
            save_figure(figure, staging / "figures", figure_name, data)
        for page, text in output.pages.items():
            (staging / page).write_text(text, encoding="utf-8")
        record = {
            "command": command(),
            "config": config.model_dump(mode="json"),
            "checkpoint_sha256": output.sha256,
            "versions": versions(),
            **output.facts,
        }
        (staging / "run.json").write_text(to_json(record))
        written = []
        for source in sorted(p for p in staging.rglob("*") if p.is_file()):
            target = folder / source.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
            written.append(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return written


def command() -> str:
    """The command line that runs this process."""
    return shlex.join(["python", *sys.argv])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape results."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def table(frame: pd.DataFrame, title: str | None = None) -> Table:
    """A frame as a terminal table: text left, numbers right and rounded, NaN as a dash."""
    # Compact, so that wide tables fit 80 columns.
    compact = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    result = Table(title=title, padding=0, **compact)
    for i, column in enumerate(frame.columns):
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        # Numbers, and the first column, which says what a row is about, are never cut.
        widest = max((cell_len(_cell(value)) for value in frame[column]), default=0)
        result.add_column(
            str(column),
            justify="right" if numeric else "left",
            min_width=widest if numeric or not i else None,
            no_wrap=not i,
        )
    for row in frame.itertuples(index=False):
        result.add_row(*(_cell(value) for value in row))
    return result


def number(value: float) -> str:
    """A number as tables show it: three decimals, or an exponent; NaN as a dash."""
    if math.isnan(value):
        return "–"
    small = value != 0 and abs(value) < 0.001
    return f"{value:.1e}" if small or abs(value) >= 1e4 else f"{value:.3f}"


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else escape(str(value))


def _require_writable(folder: Path) -> None:
    """Fail before the work, not after it."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"cannot write to {folder}: {existing} is not a writable folder")
