"""How exact is the constructed closed form, and what limits it?

Normalised mean squared error of the construction against least squares, for p = 1..4
covariates: against the number of context samples N (the query row among the keys, theory:
N^-2) and, with the query row excluded, against the scale R (theory: R^-4), in float64 and
float32. The best R of each precision is marked. The named checkpoint is drawn at its own N.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from probe.report.command import AnalysisConfig, read_command_line

Count = Annotated[int, Field(ge=1)]
# Further out, squares leave the range of float32.
Scale = Annotated[float, Field(ge=1e-15, le=1e15)]


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        covariates: numbers of covariates p.
        contexts: numbers of context samples N of the first sweep, at least p + 2.
        scales: R of the first sweep, one line each.
        scale_grid: R of the second sweep.
        scale_context: N of the second sweep, at least p + 2.
        rows: context samples per cell, shared out into prompts.
    """

    covariates: tuple[Count, ...] = (1, 2, 3, 4)
    contexts: tuple[Count, ...] = (20, 100, 1000, 10_000)
    scales: tuple[Scale, ...] = (10, 100, 1000)
    scale_grid: tuple[Scale, ...] = (1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 1e5, 1e6, 1e7)
    scale_context: int = 50
    rows: int = Field(400_000, ge=1000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("covariates", "contexts", "scales", "scale_grid"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is empty; give at least one number")
        fewest = max(self.covariates) + 2
        for name, given in (("contexts", self.contexts), ("scale-context", (self.scale_context,))):
            if min(given) < fewest:
                raise ValueError(
                    f"--{name} {min(given)}: too few samples for p = {fewest - 2}; least squares "
                    f"with an intercept needs at least {fewest}"
                )
        return self


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models import PromptConfig, Prompts, closed_form, sample_prompts
from models.training.evaluation import normalised_error
from probe import Subject, load_subject
from probe.figures.style import PALETTE, TWO_COLUMNS
from probe.report.script import Output, main

DTYPES = {"float64": torch.float64, "float32": torch.float32}
# Prompt rows per cell: long contexts get fewer prompts, at least MIN_PROMPTS.
MIN_PROMPTS = 40
# Blocks of prompts that the bootstrap resamples.
BLOCKS = 100


def run(config: Config) -> Output:
    """Measure both sweeps and place the checkpoint beside them."""
    subject = load_subject(config.checkpoint)
    generator = torch.Generator().manual_seed(config.seed)
    rows = []
    for p in config.covariates:
        for n in config.contexts:
            prompts = _draw(config, n, p, generator)
            for scale in config.scales:
                model = closed_form(n, p, scale)
                rows.append(_row("N", p, n, scale, "float64", model, prompts, config.seed))
        prompts = _draw(config, config.scale_context, p, generator)
        for scale in config.scale_grid:
            for name, dtype in DTYPES.items():
                model = closed_form(config.scale_context, p, scale, exclude_query=True, dtype=dtype)
                row = _row("R", p, config.scale_context, scale, name, model, prompts, config.seed)
                rows.append(row)
    scores = pd.DataFrame(rows)
    scores = pd.concat([scores, pd.DataFrame([_checkpoint_row(subject, config, generator)])])
    shown = scores[scores.sweep == "N"].pivot_table(
        index=["p", "n_context"], columns="scale", values="normalised_mse"
    )
    shown.columns = [f"R={scale:g}" for scale in shown.columns]
    best = best_scales(scores)
    notes = [
        f"best R in {row.dtype}, p={row.p}, query row excluded: {row.scale:g} "
        f"(normalised MSE {row.normalised_mse:.1e})"
        for row in best.itertuples()
    ]
    figures = {"construction_error": (figure(scores), scores)}
    shown = shown.reset_index()
    return Output(scores, shown, figures, subject.sha256, tuple(notes), source=subject.source)


def best_scales(scores: pd.DataFrame) -> pd.DataFrame:
    """Row with the smallest error for every dtype and p of the sweep over R."""
    sweep = scores[scores.sweep == "R"].reset_index(drop=True)
    return sweep.loc[sweep.groupby(["dtype", "p"]).normalised_mse.idxmin()]


def figure(scores: pd.DataFrame) -> Figure:
    """Error against N beside error against R, with the theoretical slopes."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(TWO_COLUMNS, 2.8), sharey=True)
    error_against_context(scores, left)
    error_against_scale(scores, right)
    return drawing


def error_against_context(scores: pd.DataFrame, ax: Axes) -> Axes:
    """Error against N at the largest R, one line per p, with slope -2."""
    sweep = scores[scores.sweep == "N"]
    sweep = sweep[sweep.scale == sweep.scale.max()]
    for colour, (p, line) in zip(PALETTE, sweep.groupby("p"), strict=False):
        _line(ax, line, "n_context", colour, f"p = {p}")
    n = np.sort(sweep.n_context.unique()).astype(float)
    start = sweep[sweep.n_context == n[0]].normalised_mse.min()
    ax.plot(n, start * (n / n[0]) ** -2 / 3, "k:", lw=1, label="slope −2")
    own = scores[scores.sweep == "checkpoint"].iloc[0]
    ax.plot(own.n_context, own.normalised_mse, "k*", ms=7, label=own.model)
    ax.set(xscale="log", yscale="log", xlabel="context samples N")
    ax.set(
        ylabel="MSE / variance of target",
        title=f"query row among the keys, R = {sweep.scale.max():g}",
    )
    ax.legend(frameon=False)
    return ax


def error_against_scale(scores: pd.DataFrame, ax: Axes) -> Axes:
    """Error against R without the query row: float64 solid, float32 dashed, best R marked."""
    sweep = scores[scores.sweep == "R"]
    best = best_scales(scores)
    for colour, (p, lines) in zip(PALETTE, sweep.groupby("p"), strict=False):
        for dtype, style in (("float64", "-"), ("float32", "--")):
            label = f"p = {p}, {dtype}" if p == sweep.p.min() else None
            _line(ax, lines[lines.dtype == dtype], "scale", colour, label, style)
        marks = best[best.p == p]
        ax.plot(marks.scale, marks.normalised_mse, "o", color=colour, mfc="none", ms=6)
    r = np.sort(sweep.scale.unique())
    r = r[(r >= 10) & (r <= 1000)]
    if len(r):
        start = sweep[(sweep.scale == r[0]) & (sweep.dtype == "float64")].normalised_mse.min()
        ax.plot(r, start * (r / r[0]) ** -4.0 / 5, "k:", lw=1, label="slope −4")
    n = int(sweep.n_context.iloc[0])
    ax.set(xscale="log", yscale="log", xlabel="scale R", title=f"query row excluded, N = {n}")
    ax.legend(frameon=False)
    return ax


def _line(ax: Axes, line: pd.DataFrame, x: str, colour: str, label: str | None, style="-") -> None:
    ax.plot(line[x], line.normalised_mse, style, color=colour, marker=".", ms=3, lw=1, label=label)
    ax.fill_between(line[x], line.ci_low, line.ci_high, color=colour, alpha=0.2, lw=0)


def _draw(config: Config, n: int, p: int, generator: torch.Generator) -> Prompts:
    batch = max(MIN_PROMPTS, config.rows // n)
    return sample_prompts(PromptConfig(n_context=n, n_covariates=p), batch, generator)


@torch.no_grad()
def _row(sweep, p, n, scale, dtype, model, prompts: Prompts, seed: int) -> dict:
    """Normalised MSE with a bootstrap interval over prompts."""
    losses = (model(prompts.inputs).double() - prompts.target).square()
    error = normalised_error(losses, prompts.target).numpy()
    blocks = np.array([part.mean() for part in np.array_split(error, min(BLOCKS, len(error)))])
    rng = np.random.default_rng(seed)
    means = blocks[rng.integers(len(blocks), size=(500, len(blocks)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "sweep": sweep,
        "model": "construction",
        "p": p,
        "n_context": n,
        "scale": scale,
        "dtype": dtype,
        "n_prompts": len(error),
        "normalised_mse": error.mean(),
        "ci_low": low,
        "ci_high": high,
    }


def _checkpoint_row(subject: Subject, config: Config, generator: torch.Generator) -> dict:
    n, p = subject.prompts.n_context, subject.prompts.n_covariates
    prompts = sample_prompts(subject.prompts, max(MIN_PROMPTS, config.rows // n), generator)
    row = _row("checkpoint", p, n, np.nan, "float64", subject.model, prompts, config.seed)
    return row | {"model": subject.name}


if __name__ == "__main__":
    main("construction_error", Config, run, __doc__)
