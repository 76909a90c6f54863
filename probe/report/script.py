"""Scaffolding of the analysis scripts: output folder, provenance, tables in the terminal.

A script is a config and ``run(config) -> Output``; `main` does the rest. Outputs of a run are
written aside and moved in place at its end: a run that fails leaves earlier results as they were.
"""

from __future__ import annotations

import json
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
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pandas as pd
import torch
from joblib import Parallel
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from models.checkpoint import PREFIX
from models.files import to_json, write_atomically
from models.training.run_folder import TrainingError
from probe.figures.style import save_figure, style
from probe.report.command import AnalysisConfig, read_command_line
from probe.subjects.names import MADE_PREFIX

RECORD = "run.json"
REPORTS, RESULTS = Path("reports"), Path("results")
_PACKAGES = ("torch", "transformer-lens", "numpy", "scikit-learn", "pandas", "matplotlib")
# Settings that say where and how a run is made, not what comes out of it.
_WITHOUT_EFFECT = {"output", "jobs", "n_jobs"}


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
        source: where the studied checkpoint(s) came from (`probe.Subject.source`); None where the
            run made them.
    """

    scores: pd.DataFrame
    shown: pd.DataFrame
    figures: dict[str, tuple[Figure, pd.DataFrame]]
    sha256: str | dict[str, str]
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    source: str | dict[str, str] | None = None


def main(name: str, config_type: type[C], run: Callable[[C], Output], doc: str) -> None:
    """Run an analysis from the command line; errors of the input exit with 2.

    Args:
        name: of the analysis, which is also that of its folder (`output_folder`).
        config_type: its settings, an `AnalysisConfig`.
        run: the analysis.
        doc: description shown by --help.
    """
    console = Console()
    # Matrices here are too small for threads to pay, and one thread sums in one order.
    torch.set_num_threads(1)
    config = read_command_line(config_type, doc)
    try:
        folder = output_folder(name, config)
        _require_usable(folder)
        with style():
            output = run(config)
            written = write_output(folder, output, config)
    except (ValueError, OSError, TrainingError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    console.print(table(output.shown))
    for note in output.notes:
        console.print(note, markup=False, highlight=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def output_folder(name: str, config: AnalysisConfig) -> Path:
    """Where the results of an analysis go.

    reports/<name> is for one choice of settings: those on record there, or the defaults if there
    is no record yet. Results of other settings go to results/<name>/<checkpoint>, so that trying
    something out replaces no figure that a README shows.

    Args:
        name: of the analysis.
        config: its settings; `output` overrides all of this.
    """
    if config.output is not None:
        return config.output
    reports = REPORTS / name
    record = _record(reports)
    try:
        kept = type(config).model_validate(record["config"] if record else {})
    except ValueError:  # of a version with other settings
        kept = None
    if kept is not None and _choice(kept) == _choice(config):
        return reports
    checkpoint = config.checkpoint
    for prefix in (PREFIX, MADE_PREFIX):
        checkpoint = checkpoint.removeprefix(prefix)
    return RESULTS / name / os.path.basename(os.path.abspath(checkpoint))


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
    """Write scores.csv, figures/, pages and run.json; all of them or none.

    Files that an earlier run has listed in its run.json here, and this one does not write, are
    removed: nothing of another model stays beside the results. Other files are not touched.

    Returns:
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _listed(folder)
    staging = Path(tempfile.mkdtemp(prefix=".writing.", dir=folder))
    try:
        output.scores.to_csv(staging / "scores.csv", index=False, float_format="%.10g")
        for figure_name, (figure, data) in output.figures.items():
            save_figure(figure, staging / "figures", figure_name, data)
        for page, text in output.pages.items():
            (staging / page).write_text(text, encoding="utf-8")
        staged = [p.relative_to(staging) for p in staging.rglob("*") if p.is_file()]
        names = sorted(path.as_posix() for path in (*staged, Path(RECORD)))
        record = {
            "command": command(),
            "config": config.model_dump(mode="json"),
            "checkpoint_sha256": output.sha256,
            "files": names,
            "versions": versions(),
            **({} if output.source is None else {"source": output.source}),
            **output.facts,
        }
        text = to_json(record)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for path in staged:
            os.replace(staging / path, folder / path)
        # Last: what it lists is in place.
        write_atomically(folder / RECORD, text.encode())
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for name in earlier - set(names):
        (folder / name).unlink(missing_ok=True)
    return [folder / name for name in names]


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


def _choice(config: AnalysisConfig) -> dict[str, Any]:
    """The settings that decide what comes out."""
    return config.model_dump(exclude=_WITHOUT_EFFECT)


def _record(folder: Path) -> dict[str, Any]:
    """The run.json of an analysis in a folder; empty if there is none of an analysis."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    ours = isinstance(found, dict) and {"command", "config", "versions"} <= found.keys()
    return found if ours else {}


def _listed(folder: Path) -> set[str]:
    """Files of a folder that an earlier run says it wrote."""
    names = _record(folder).get("files", [])
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    found = set()
    for name in names:
        path, parts = folder / name, PurePosixPath(name).parts
        # A record that was edited must not reach out of the folder.
        inside = ".." not in parts and not os.path.isabs(name)
        if inside and path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            found.add(name)
    return found


def _require_usable(folder: Path) -> None:
    """Fail before the work, not after it."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"cannot write to {folder}: {existing} is not a writable folder")
    if (folder / RECORD).exists() and not _record(folder):
        raise ValueError(
            f"{folder} holds a {RECORD} that is not of an analysis (a training run has one too); "
            f"give another --output"
        )
