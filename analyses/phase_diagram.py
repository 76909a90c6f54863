"""When does training find the closed form by normalization?

Trains models on a grid of prompt diversity (how much scale and mean of x differ from prompt to
prompt) and l1 weight, several seeds per cell, judges each on its own prompts, and tabulates the
share of seeds whose verdict is "closed form by normalization", with 95 % Wilson intervals.
Models and verdicts are kept in the work folder; the same command continues an interrupted run.
"""

from pathlib import Path

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the phase diagram; the defaults take about half an hour on two cores.

    Attributes:
        checkpoint: a model of your own, judged in the same way beside the diagram.
        log_scales: half width of the per-prompt log scale of x, uniform around 0.
        mean_stds: standard deviations of the per-prompt mean of x.
        l1: penalty weights.
        n_seeds: models per cell, trained from `seed`, `seed` + 1, ...
        steps: optimizer steps.
        n_context: samples per prompt.
        n_prompts: prompts per condition of the verdict.
        work: folder of models and verdicts.
        n_jobs: local processes; 1 trains all models together on all cores.
        scheduler: address of a Dask scheduler to train on, such as tcp://host:8786.
    """

    log_scales: tuple[float, ...] = (0.0, 0.35, 0.7)
    mean_stds: tuple[float, ...] = (0.0, 1.0)
    l1: tuple[float, ...] = (0.0, 3e-4, 1e-3, 3e-3)
    n_seeds: int = Field(8, ge=1)
    steps: int = Field(20_000, ge=1)
    n_context: int = Field(50, ge=3)
    n_prompts: int = Field(512, ge=64)
    work: Path = Path("trained/phase_diagram")
    n_jobs: int = Field(1, ge=1)
    scheduler: str | None = None


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import json

import joblib
import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models import PromptConfig, TrainConfig, train
from models.files import to_json, write_atomically
from models.training.grid import default_name
from probe import Subject, Verdict, division_test, identify, load_subject
from probe.figures.style import PALETTE, TWO_COLUMNS, heatmap
from probe.report.script import Output, in_parallel, main
from probe.subjects.counts import share
from probe.verdict.kinds import NORMALIZATION
from probe.verdict.thresholds import THRESHOLDS

CELL = ["x_mean_std", "x_log_scale", "l1"]
MEDIANS = ("normalised_mse", "division_r2", "residual_r2", "division_r2_diverse")
_TESTS = ("division_r2", "division_slope", "residual_r2", "residual_slope", "residual_share")


def run(config: Config) -> Output:
    """Train what is missing, judge what is not judged, count."""
    subject = load_subject(config.checkpoint)
    folders = _train(config)
    jobs = [joblib.delayed(_judged)(folder, config) for folder in folders]
    scores = pd.DataFrame(in_parallel(jobs, config.n_jobs, "verdicts"))
    cells = shares(scores)
    figures = {
        "phase_diagram": (phase_maps(cells), cells),
        "share_by_diversity": (share_lines(cells), cells),
    }
    notes = (
        f"{len(scores)} models of {config.steps} steps, each judged on its own prompts; "
        f"intervals: Wilson, 95 %.",
        f"{subject.name}: {_verdict(subject, config).label}",
    )
    hashes = dict(zip(scores.name, scores.sha256, strict=True)) | {subject.name: subject.sha256}
    scores = scores.drop(columns="sha256")
    source = {subject.name: subject.source}
    return Output(scores, _shown(cells), figures, hashes, notes, source=source)


def shares(scores: pd.DataFrame) -> pd.DataFrame:
    """Share of models judged "closed form by normalization" in each cell.

    Args:
        scores: a row per model, with its cell and `verdict`.

    Returns:
        DataFrame with columns x_mean_std, x_log_scale, l1, models, closed_form, share, ci_low,
        ci_high (Wilson, 95 %), and medians of `MEDIANS`.
    """
    rows = []
    for cell, group in scores.groupby(CELL, sort=True):
        found = int((group.verdict == NORMALIZATION).sum())
        row = {"models": len(group), "closed_form": found, **share(found, len(group))}
        row |= {name: group[name].median() for name in MEDIANS}
        rows.append(dict(zip(CELL, cell, strict=True)) | row)
    return pd.DataFrame(rows)


def phase_maps(cells: pd.DataFrame) -> Figure:
    """The share over scale spread and penalty, a panel per spread of the mean, one scale."""
    panels = list(cells.groupby("x_mean_std"))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(TWO_COLUMNS, 2.6), sharey=True, squeeze=False
    )
    for ax, (mean_std, group) in zip(axes[0], panels, strict=True):
        phase_map(group, ax, colorbar=ax is axes[0, -1])
        ax.set_title(f"mean of x ~ N(0, {mean_std:g}²)" if mean_std else "mean of x: 0")
        ax.label_outer()
    return figure


def phase_map(cells: pd.DataFrame, ax: Axes, colorbar: bool = True) -> Axes:
    """Heatmap of the share for one spread of the mean; cells show the share and its interval."""
    text = [f"{row.closed_form}/{row.models}\n{_interval(row)}" for row in cells.itertuples()]
    cells = cells.assign(text=text)
    shown, labels = (
        cells.pivot(index="l1", columns="x_log_scale", values=column)[::-1]
        for column in ("share", "text")
    )
    heatmap(
        shown, ax, labels=labels, colorbar=colorbar, colorbar_label="share: closed form by norm."
    )
    ax.set_xticklabels([f"{value:g}" for value in shown.columns])
    ax.set_yticklabels([f"{value:g}" for value in shown.index], rotation=0)
    ax.tick_params(left=False, bottom=False)
    ax.set(xlabel="half width of the log scale of x", ylabel="l1 weight")
    return ax


def share_lines(cells: pd.DataFrame) -> Figure:
    """The share against the spread of the scale with its interval, one line per penalty."""
    panels = list(cells.groupby("x_mean_std"))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(TWO_COLUMNS, 2.4), sharey=True, squeeze=False
    )
    for ax, (mean_std, group) in zip(axes[0], panels, strict=True):
        for k, (l1, line) in enumerate(group.groupby("l1")):
            reach = (line[["ci_low", "ci_high"]].T - line.share).abs().to_numpy()
            # Side by side, so that intervals do not hide one another.
            at = line.x_log_scale + 0.012 * (k - (group.l1.nunique() - 1) / 2)
            marker = {"marker": "osD^v"[k % 5], "ms": 3.5, "color": PALETTE[k % len(PALETTE)]}
            ax.errorbar(at, line.share, reach, lw=1, elinewidth=0.7, label=f"{l1:g}", **marker)
        ax.set(xlabel="half width of the log scale of x", ylim=(-0.03, 1.03))
        ax.set_title(f"mean of x ~ N(0, {mean_std:g}²)" if mean_std else "mean of x: 0")
    axes[0, 0].set_ylabel("share: closed form by norm.")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), title="l1", loc="outside right center")
    return figure


def _train(config: Config) -> list[Path]:
    """Folders of the trained models."""
    settings = TrainConfig(
        model={"n_context": config.n_context},
        prompts=tuple(
            _prompts(config, mean_std, log_scale)
            for mean_std in config.mean_stds
            for log_scale in config.log_scales
        ),
        l1=config.l1,
        seeds=tuple(range(config.seed, config.seed + config.n_seeds)),
        steps=config.steps,
    )
    models = config.work / "models"
    train(settings, models, n_jobs=config.n_jobs, scheduler=config.scheduler)
    return sorted(path.parent for path in models.glob("*/config.json"))


def _prompts(config: Config, mean_std: float, log_scale: float) -> PromptConfig:
    return PromptConfig(n_context=config.n_context, x_mean_std=mean_std, x_log_scale=log_scale)


def _judged(folder: Path, config: Config) -> dict[str, object]:
    """One row of the result; what was found is kept, until weights or thresholds change."""
    torch.set_num_threads(1)
    subject = load_subject(folder)
    asked = {"sha256": subject.sha256, "n_prompts": config.n_prompts, "seed": config.seed}
    asked["thresholds"] = json.loads(to_json(THRESHOLDS))
    kept = config.work / "verdicts" / f"{folder.name}.json"
    found = json.loads(kept.read_text()) if kept.is_file() else {}
    if found.get("asked") != asked:
        found = {"asked": asked, **_judge(subject, config)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, to_json(found).encode())
    prompts, record = subject.prompts, subject.record
    cell = f"mean_{prompts.x_mean_std:g}_scale_{prompts.x_log_scale:g}"
    return {
        "name": default_name(cell, record["l1"], record["seed"]),
        "x_mean_std": prompts.x_mean_std,
        "x_log_scale": prompts.x_log_scale,
        "l1": record["l1"],
        "seed": record["seed"],
        "status": record["status"],
        "normalised_mse": record["normalised_mse"],
        "verdict": found["verdict"]["kind"],
        **{name: found["verdict"][name] for name in _TESTS},
        "division_r2_diverse": found["division_r2_diverse"],
        "sha256": subject.sha256,
    }


def _judge(subject: Subject, config: Config) -> dict[str, object]:
    """The verdict on a model's own prompts, and the division test on the most diverse ones.

    Where V hardly varies, the division test on a model's own prompts has little to see.
    """
    most = {"x_mean_std": max(config.mean_stds), "x_log_scale": max(config.log_scales)}
    diverse = subject.prompts.model_copy(update=most)
    generator = torch.Generator().manual_seed(config.seed)
    division = division_test(subject.model, diverse, n_prompts=2000, generator=generator)
    verdict = _verdict(subject, config).to_dict()
    return {"verdict": verdict, "division_r2_diverse": float(division.r2.max())}


def _verdict(subject: Subject, config: Config) -> Verdict:
    generator = torch.Generator().manual_seed(config.seed)
    return identify(subject.model, subject.prompts, n_prompts=config.n_prompts, generator=generator)


def _shown(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per prompt distribution, a column per penalty."""
    cells = cells.assign(
        text=[f"{row.closed_form}/{row.models} {_interval(row)}" for row in cells.itertuples()]
    )
    wide = cells.pivot(index=["x_mean_std", "x_log_scale"], columns="l1", values="text")
    return wide.rename(columns=lambda l1: f"l1 {l1:g}").reset_index()


def _interval(row) -> str:
    return f"[{row.ci_low:.2f}, {row.ci_high:.2f}]"


if __name__ == "__main__":
    main("phase_diagram", Config, run, __doc__)
