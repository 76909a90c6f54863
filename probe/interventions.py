"""From "is there" to "is used": edits of activations and what they do to the prediction.

- `ablate` replaces a site by zero, its mean, or another prompt's value;
- `ablate_direction` removes what a linear probe reads, against random directions;
- `interchange` writes prompt B's value of one statistic into prompt A, and compares the
  change with the one least squares would make.

Probes are those of `probe.linear`, fitted on prompts of their own. A probe reads
``x weights``; its direction in activation space is `LinearMap.pattern`, so that

    x ← x + (target - probe(x)) pattern

makes it read `target`, the same edit in whatever basis or units the site is written. With
the mean as target this is the least edit that leaves no probe anything to read (Belrose et
al., arXiv 2306.03819). Losses and changes are in units of the variance of least squares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal, get_args

import pandas as pd
import torch
from torch import Tensor

from models.config import PromptConfig
from models.hooks import StrictHookPoint
from models.prompts import Prompts, sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import axes_of, collect
from probe.linear import Group, fit_maps, plan_positions
from probe.moments import LinearMap, fit_line, percentiles, resample_counts
from probe.quantities import statistic_names, statistics

Mode = Literal["zero", "mean", "resample"]
# A probe that explains less than this gives no direction to write along.
READABLE_R2 = 0.5


@torch.no_grad()
def ablate(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    sites: str | Collection[str] | None = None,
    mode: Mode = "mean",
    *,
    reference: Prompts | None = None,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Replace whole sites, one at a time, at all positions.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only (zero: nor a
            norm scale).
        mode: "zero", "mean" (per position, over the reference prompts), or "resample" (the
            activation on a reference prompt drawn at random for each prompt).
        reference: prompts that "mean" and "resample" take activations from; by default
            `n_prompts` fresh ones of `prompt_config`.
        n_prompts: prompts to measure on.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with one row per site: site, mode, loss (mean squared error to least squares),
        loss_ablated, effect (their difference), ci_low, ci_high, change (mean squared change of
        the prediction), change_low, change_high; 95 % bootstrap intervals over prompts.

    Raises:
        ValueError: on an unknown site or mode, zero at a norm scale, or an edit that makes
            the prediction NaN or infinite.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; give one of {', '.join(get_args(Mode))}")
    generator = generator or torch.Generator().manual_seed(0)
    names = model.select_sites(sites)
    divisors = [name for name in names if name.endswith("hook_scale")]
    if mode == "zero" and divisors:
        if sites is not None:
            raise ValueError(
                f"zero at {divisors[0]!r} would divide by zero; use mode='mean' or 'resample'"
            )
        names = [name for name in names if name not in divisors]
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    if reference is None:
        reference = sample_prompts(prompt_config, n_prompts, generator)
    donors = torch.randint(len(reference), (n_prompts,), generator=generator)
    measure = _Effect(model, prompts, generator)
    rows = []
    for site in names:
        if mode == "zero":
            replacement = torch.zeros((), dtype=measure.before.dtype)
        else:
            donated = collect(model, reference.inputs, site)[site]
            replacement = donated.mean(0) if mode == "mean" else donated[donors]
        after = _edited(model, prompts, site, replacement.expand_as)
        rows.append({"site": site, "mode": mode, **measure(after)})
    return pd.DataFrame(rows)


@torch.no_grad()
def ablate_direction(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    sites: str | Collection[str] | None = None,
    statistic: str | Collection[str] | None = None,
    positions: Literal["all", "query"] = "all",
    *,
    n_random: int = 10,
    n_train: int = 20_000,
    n_prompts: int = 2000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Remove the direction in which a probe finds a statistic.

    The controls remove random directions of equal norm. The norm is that in which the site's
    activations have unit variance in every direction (Mahalanobis), so that controls stay
    where activations are and do not depend on the basis. Directions are removed where the
    probe has R² of at least `READABLE_R2`.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only.
        statistic: names as in `probe.quantities`; None for all.
        positions: "all" fits and removes a direction at each position, "query" only there.
            Head states and predictions have no positions.
        n_random: random directions per site and statistic.
        n_train: prompts that the probes are fitted on.
        n_prompts: fresh prompts to measure on.
        generator: source of prompts, directions and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, statistic, probe_r2 (the best over positions), the columns
        of `ablate` without mode, and random_effect, random_low, random_high: mean, least and
        greatest effect of the random directions. NaN where no probe finds the statistic; the
        random ones also where activations vary along one direction only.

    Raises:
        ValueError: on unknown names, or too few prompts (says how many are needed).
    """
    generator = generator or torch.Generator().manual_seed(0)
    columns = _statistic_columns(statistic, prompt_config)
    maps = _probes(model, prompt_config, sites, positions, n_train, generator)
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    measure = _Effect(model, prompts, generator)
    rows = []
    for (site, where), probe in maps.items():
        for name, column in columns.items():
            readable = probe.r2[:, column] >= READABLE_R2
            row = {"site": site, "statistic": name, "probe_r2": float(probe.r2[:, column].max())}
            rows.append(row)
            if not readable.any():
                continue
            edit = _Write(site, where, probe, column, probe.target_mean[column], readable)
            row |= measure(_edited(model, prompts, site, edit))
            if (probe.whiten[readable] != 0).any(1).sum(1).max() < 2:
                continue
            random = []
            for _ in range(n_random):
                control = dataclasses.replace(edit, probe=_random_direction(probe, generator))
                random.append(measure.effect(_edited(model, prompts, site, control)))
            row["random_effect"] = sum(random) / n_random
            row |= {"random_low": min(random), "random_high": max(random)}
    random_columns = ["random_effect", "random_low", "random_high"]
    columns = ["site", "statistic", "probe_r2", *_Effect.COLUMNS, *random_columns]
    return pd.DataFrame(rows, columns=columns)


@torch.no_grad()
def interchange(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    sites: str | Collection[str] | None = None,
    statistic: str | Collection[str] | None = None,
    positions: Literal["all", "query"] = "all",
    *,
    n_train: int = 20_000,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Write prompt B's value of one statistic into prompt A, and watch the prediction.

    The change is regressed on the change of least squares when that statistic of A takes B's
    value and the others stay. Slope 1: the site is where the model takes the statistic from.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only.
        statistic: names as in `probe.quantities`; None for all (V only for one covariate).
        positions: "all" writes at each position along that position's probe, "query" only
            there. Positions whose probe has R² below `READABLE_R2` are left alone.
        n_train: prompts that the probes are fitted on.
        n_prompts: fresh pairs (A, B) to measure on.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, statistic, probe_r2 (the best over positions), slope,
        slope_low, slope_high, r2, ci_low, ci_high (of r2); 95 % bootstrap intervals over pairs.
        NaN where no position can be written.

    Raises:
        ValueError: on unknown names, one variance among several covariates, or too few
            prompts (says how many are needed).
    """
    generator = generator or torch.Generator().manual_seed(0)
    columns = _statistic_columns(statistic, prompt_config)
    if statistic is None and prompt_config.n_covariates > 1:
        columns = {name: i for name, i in columns.items() if not name.startswith("x_var")}
    maps = _probes(model, prompt_config, sites, positions, n_train, generator)
    a = sample_prompts(prompt_config, n_prompts, generator)
    b = sample_prompts(prompt_config, n_prompts, generator)
    written = statistics(b)
    expected = {name: counterfactual(a, b, name) - a.least_squares for name in columns}
    before = model(a.inputs)
    rows = []
    for (site, where), probe in maps.items():
        for name, column in columns.items():
            readable = probe.r2[:, column] >= READABLE_R2
            row = {"site": site, "statistic": name, "probe_r2": float(probe.r2[:, column].max())}
            if readable.any():
                edit = _Write(site, where, probe, column, written[:, column], readable)
                change = _edited(model, a, site, edit) - before
                line = fit_line(expected[name], change, generator, f"the change of {name}")
                row |= dataclasses.asdict(line)
            rows.append(row)
    numbers = ["slope", "slope_low", "slope_high", "r2", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=["site", "statistic", "probe_r2", *numbers])


def counterfactual(a: Prompts, b: Prompts, statistic: str) -> Tensor:
    """Least squares on A with one statistic taken from B, [batch].

    ``ȳ + slope · (u - x̄)`` with slope = x_cov⁻¹ xy_cov; replacing x_mean, x_var or xy_cov
    leaves the other moments as they are.

    Raises:
        ValueError: on x_var with several covariates: one variance alone does not make a
            covariance matrix.
    """
    if statistic == "least_squares":
        return b.least_squares
    if statistic == "y_mean":
        return a.least_squares + b.y_mean - a.y_mean
    base, _, number = statistic.rpartition("_")
    base, j = (base, int(number) - 1) if number.isdigit() else (statistic, 0)
    of_a, of_b = (getattr(p, base).reshape(len(p), -1)[:, j] for p in (a, b))
    p = a.n_covariates
    slope = a.slope.reshape(len(a), p)
    centred = a.query - a.x_mean.reshape(len(a), p)
    if base == "x_mean":
        return a.least_squares - slope[:, j] * (of_b - of_a)
    if base == "slope":
        return a.least_squares + (of_b - of_a) * centred[:, j]
    if base == "xy_cov":
        unit = torch.eye(p, dtype=slope.dtype)[j].expand_as(slope)
        moved = torch.linalg.solve(a.x_cov, unit) * (of_b - of_a)[:, None]
        return a.least_squares + (moved * centred).sum(1)
    if p > 1:
        raise ValueError(
            f"{statistic}: one variance of {p} covariates cannot change alone; "
            f"choose a mean, covariance or slope"
        )
    return a.least_squares + (a.xy_cov / of_b - a.slope) * centred[:, 0]


@dataclasses.dataclass(frozen=True)
class _Write:
    """Edit of a site's activation that makes a probe read `target`.

    Attributes:
        site: its name.
        where: position of each view.
        probe: [v, f, q].
        column: which statistic.
        target: a number, or one per prompt, [b].
        views: which views are edited, [v]; all by default.
    """

    site: str
    where: tuple[str, ...]
    probe: LinearMap
    column: int
    target: Tensor
    views: Tensor | None = None

    def __call__(self, activation: Tensor) -> Tensor:
        edited = activation.clone()
        axes = axes_of(self.site)
        rows = edited.movedim(axes.index("position"), 1) if "position" in axes else edited[:, None]
        for view, position in enumerate(self.where):
            if self.views is not None and not self.views[view]:
                continue
            row = rows[:, int(position) if position.isdigit() else -1]
            flat = row.reshape(len(row), -1).double()
            centred = flat - self.probe.feature_mean[view]
            weights = self.probe.weights[view, :, self.column]
            reading = self.probe.target_mean[self.column] + centred @ weights
            step = (self.target - reading)[:, None] * self.probe.pattern[view, :, self.column]
            row += step.reshape(row.shape).to(row.dtype)
        return edited


def _random_direction(probe: LinearMap, generator: torch.Generator) -> LinearMap:
    """Probes that read one random direction of unit variance, the same for every statistic."""
    ranked = (probe.whiten != 0).any(1)
    random = torch.randn(ranked.shape, generator=generator, dtype=torch.float64) * ranked
    random /= random.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    shape = probe.weights.shape
    return dataclasses.replace(
        probe,
        weights=(probe.whiten @ random[:, :, None]).expand(shape),
        pattern=(probe.spread @ random[:, :, None]).expand(shape),
    )


class _Effect:
    """Loss of the untouched model on prompts, and effects of edits against it."""

    COLUMNS = (
        *("loss", "loss_ablated", "effect", "ci_low", "ci_high"),
        *("change", "change_low", "change_high"),
    )

    def __init__(
        self, model: LinearAttentionTransformer, prompts: Prompts, generator: torch.Generator
    ):
        self.unit = prompts.least_squares.var(correction=0)
        if not self.unit > 0:
            raise ValueError(
                f"least squares does not vary over {len(prompts)} prompt(s); use more prompts"
            )
        self.truth = prompts.least_squares
        self.before = model(prompts.inputs)
        self.loss = (self.before - self.truth).square() / self.unit
        self.draws = resample_counts(len(prompts), generator) / len(prompts)

    def effect(self, after: Tensor) -> float:
        """Increase of the loss."""
        return float(((after - self.truth).square() / self.unit - self.loss).mean())

    def __call__(self, after: Tensor) -> dict[str, float]:
        """Loss, effect and change with intervals over prompts."""
        increase = (after - self.truth).square() / self.unit - self.loss
        change = (after - self.before).square() / self.unit
        ci_low, ci_high = percentiles(self.draws @ increase)
        change_low, change_high = percentiles(self.draws @ change)
        loss = self.loss.mean()
        effect = (loss, loss + increase.mean(), increase.mean(), ci_low, ci_high)
        values = (*effect, change.mean(), change_low, change_high)
        return dict(zip(self.COLUMNS, map(float, values), strict=True))


def _edited(model: LinearAttentionTransformer, prompts: Prompts, site: str, edit) -> Tensor:
    """Predictions with `edit` applied to the activation at a site, in float64."""

    def apply(activation: Tensor, hook: StrictHookPoint) -> Tensor:
        return edit(activation)

    prediction = model.run_with_hooks(prompts.inputs, fwd_hooks=[(site, apply)])
    finite = prediction.isfinite()
    if not finite.all():
        prompt = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"the edit at {site!r} makes the prediction NaN or infinite, first in prompt {prompt}"
        )
    return prediction.double()


def _statistic_columns(
    statistic: str | Collection[str] | None, prompt_config: PromptConfig
) -> dict[str, int]:
    """Name -> column in `statistics`, for the statistics asked for."""
    names = statistic_names(prompt_config.n_covariates)
    if statistic is None:
        asked: Collection[str] = names
    else:
        asked = (statistic,) if isinstance(statistic, str) else statistic
    for name in asked:
        if name not in names:
            raise ValueError(f"unknown statistic {name!r}; give some of {', '.join(names)}")
    return {name: names.index(name) for name in asked}


def _probes(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    sites: str | Collection[str] | None,
    positions: Literal["all", "query"],
    n_train: int,
    generator: torch.Generator,
) -> dict[Group, LinearMap]:
    if positions not in ("all", "query"):
        raise ValueError(f"positions={positions!r} must be 'all' or 'query'")
    context = map(str, range(prompt_config.n_context)) if positions == "all" else ()
    plan = plan_positions(model, prompt_config, sites, ("query", "state", *context))
    return fit_maps(model, prompt_config, plan, n_train, generator)
