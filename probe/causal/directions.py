"""From "is there" to "is used": edits of activations and what they do to the prediction.

- `ablate` replaces a site by zero, its mean, or another prompt's value;
- `ablate_direction` removes what a linear probe reads, against random directions;
- `interchange` writes prompt B's value of one statistic into prompt A, and compares the
  change with the one the target would make.

Probes are those of `probe.probing.linear`, fitted on prompts of their own. A probe reads
``x weights``; its direction in activation space is `LinearMap.pattern`, so that

    x ← x + (target - probe(x)) pattern

makes it read `target`, the same edit in whatever basis or units the site is written. With
the mean as target this is the least edit that leaves no probe anything to read (Belrose et
al., arXiv 2306.03819). Losses and changes are in units of the variance of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from models.architecture.sites import Studied
from models.tasks.task import Task
from probe.activations.table import with_titles
from probe.causal.effect import Effect, edited
from probe.probing.linear import Group, fit_maps, plan_positions
from probe.quantities.statistics import chosen_statistics, statistic_values
from probe.stats.moments import LinearMap
from probe.stats.regression import fit_line, require_samples

# A probe that explains less than this gives no direction to write along.
READABLE_R2 = 0.5


@torch.no_grad()
def ablate_direction(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None = None,
    statistic: str | Collection[str] | None = None,
    positions: Literal["all", "query"] = "all",
    *,
    n_random: int = 10,
    n_train: int | None = None,
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
        statistic: names of the task's statistics; None for all.
        positions: "all" fits and removes a direction at each position, "query" only there.
            Head states and predictions have no positions.
        n_random: random directions per site and statistic.
        n_train: prompts that the probes are fitted on; by default as many as the sites need
            (`probe.probing.linear.enough_prompts`).
        n_prompts: fresh prompts to measure on.
        generator: source of prompts, directions and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, statistic, probe_r2 (the best over positions), the columns
        of `ablate` without mode, and random_effect, random_low, random_high: mean, least and
        greatest effect of the random directions. NaN where no probe finds the statistic; the
        random ones also where activations vary along one direction only. ``.attrs["titles"]`` has
        words for the sites.

    Raises:
        ValueError: on unknown names, no random direction, or too few prompts (says how many are
            needed).
    """
    require_samples(n_prompts)
    if n_random < 1:
        raise ValueError(
            f"n_random={n_random}: without random directions an effect has nothing to be compared "
            f"with; give at least 1"
        )
    generator = generator or torch.Generator().manual_seed(0)
    chosen = chosen_statistics(prompt_config, statistic)
    maps = _probes(model, prompt_config, sites, positions, n_train, generator)
    prompts = prompt_config.sample(n_prompts, generator)
    measure = Effect(model, prompts, generator)
    rows = []
    for (site, where), probe in _shown(maps):
        for column, each in chosen.items():
            readable = probe.r2[:, column] >= READABLE_R2
            row = {
                "site": site,
                "statistic": each.name,
                "probe_r2": float(probe.r2[:, column].max()),
            }
            rows.append(row)
            if not readable.any():
                continue
            target = probe.target_mean[column]
            edit = WriteReading(model.sites[site].axes, where, probe, column, target, readable)
            row |= measure(edited(model, prompts, site, edit))
            if (probe.whiten[readable] != 0).any(1).sum(1).max() < 2:
                continue
            random = []
            for _ in range(n_random):
                control = dataclasses.replace(edit, probe=_random_direction(probe, generator))
                random.append(measure.effect(edited(model, prompts, site, control)))
            row["random_effect"] = sum(random) / n_random
            row |= {"random_low": min(random), "random_high": max(random)}
    random_columns = ["random_effect", "random_low", "random_high"]
    columns = ["site", "statistic", "probe_r2", *Effect.COLUMNS, *random_columns]
    return with_titles(pd.DataFrame(rows, columns=columns), model)


@torch.no_grad()
def interchange(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None = None,
    statistic: str | Collection[str] | None = None,
    positions: Literal["all", "query"] = "all",
    *,
    n_train: int | None = None,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Write prompt B's value of one statistic into prompt A, and watch the prediction.

    The change is regressed on the change of the target when that statistic of A takes B's
    value and the others stay. Slope 1: the site is where the model takes the statistic from.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only.
        statistic: names of the task's statistics; None for all (V only for one covariate).
        positions: "all" writes at each position along that position's probe, "query" only
            there. Positions whose probe has R² below `READABLE_R2` are left alone.
        n_train: prompts that the probes are fitted on; by default as many as the sites need
            (`probe.probing.linear.enough_prompts`).
        n_prompts: fresh pairs (A, B) to measure on.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, statistic, probe_r2 (the best over positions), slope,
        slope_low, slope_high, r2, ci_low, ci_high (of r2); 95 % bootstrap intervals over pairs.
        NaN where no position can be written. ``.attrs["titles"]`` has words for the sites.

    Raises:
        ValueError: on unknown names, one variance among several covariates, or too few
            prompts (says how many are needed).
    """
    require_samples(n_prompts)
    generator = generator or torch.Generator().manual_seed(0)
    chosen = chosen_statistics(prompt_config, statistic)
    if statistic is None:
        chosen = {column: each for column, each in chosen.items() if each.counterfactual}
    for each in chosen.values():
        if each.counterfactual is None:
            raise ValueError(f"{each.name}: {each.refusal}")
    maps = _probes(model, prompt_config, sites, positions, n_train, generator)
    a = prompt_config.sample(n_prompts, generator)
    b = prompt_config.sample(n_prompts, generator)
    written = statistic_values(prompt_config, b)
    expected = {column: each.swapped(a, b) - a.target for column, each in chosen.items()}
    before = model(a.inputs)
    rows = []
    for (site, where), probe in _shown(maps):
        for column, each in chosen.items():
            readable = probe.r2[:, column] >= READABLE_R2
            row = {
                "site": site,
                "statistic": each.name,
                "probe_r2": float(probe.r2[:, column].max()),
            }
            if readable.any():
                target = written[:, column]
                edit = WriteReading(model.sites[site].axes, where, probe, column, target, readable)
                change = edited(model, a, site, edit) - before
                line = fit_line(expected[column], change, generator, f"the change of {each.name}")
                row |= dataclasses.asdict(line)
            rows.append(row)
    numbers = ["slope", "slope_low", "slope_high", "r2", "ci_low", "ci_high"]
    table = pd.DataFrame(rows, columns=["site", "statistic", "probe_r2", *numbers])
    return with_titles(table, model)


@dataclasses.dataclass(frozen=True)
class WriteReading:
    """Edit of a site's activation that makes a probe read `target`.

    Attributes:
        axes: words for the axes of the activation.
        where: position of each view.
        probe: [v, f, q].
        column: which statistic.
        target: a number, or one per prompt, [b].
        views: which views are edited, [v]; all by default.
    """

    axes: tuple[str, ...]
    where: tuple[str, ...]
    probe: LinearMap
    column: int
    target: Tensor
    views: Tensor | None = None

    def __call__(self, activation: Tensor) -> Tensor:
        """The activation, edited in a copy."""
        edited = activation.clone()
        if "position" in self.axes:
            rows = edited.movedim(self.axes.index("position"), 1)
        else:
            rows = edited[:, None]
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


def _shown(maps: dict[Group, LinearMap]) -> Iterable[tuple[Group, LinearMap]]:
    """The probes, with a bar on a terminal."""
    return tqdm(maps.items(), desc="writing", unit="site", disable=None, leave=False)


def _probes(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None,
    positions: Literal["all", "query"],
    n_train: int | None,
    generator: torch.Generator,
) -> dict[Group, LinearMap]:
    if positions not in ("all", "query"):
        raise ValueError(f"positions={positions!r} must be 'all' or 'query'")
    context = map(str, range(prompt_config.n_context)) if positions == "all" else ()
    plan = plan_positions(model, prompt_config, sites, ("query", "state", *context))
    return fit_maps(model, prompt_config, plan, n_train, generator)
