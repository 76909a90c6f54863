"""Linear probes that a sceptic believes: every R² beside three controls.

x̄ is linear in the flattened prompt and in many activations of a random network, so
that R² alone says little. Each number therefore stands beside what the same probe finds in

- the raw input at the same positions,
- untrained models of the same shape (the best of several draws),
- the site itself with targets permuted across prompts,

and *selectivity* is R² minus the largest of the three.

Probes are ridge regressions in closed form from streamed second moments (`probe.stats.moments`),
fitted on one set of prompts and scored on fresh ones; each prompt passes once through each
model, and memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from models.architecture.sites import Studied
from models.tasks.task import Task, TaskPrompts
from probe.activations.collect import require_finite
from probe.activations.table import with_titles
from probe.quantities.statistics import statistic_values
from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.moments import LinearMap, Moments

CONTROLS = ("r2_input", "r2_untrained", "r2_shuffled")
# Where each site is probed unless asked otherwise.
NATURAL_POSITIONS = ("query", "state")
# Overfitting lowers R² by about features / prompts: at most a tenth.
PROMPTS_PER_FEATURE = 10
# Prompts to fit on where nobody says how many and the sites need no more.
TRAIN_PROMPTS = 20_000
_BLOCKS = 100
_BATCH_BYTES = 2**24

# A site and the positions whose probes run side by side, one view each.
Group = tuple[str, tuple[str, ...]]
# Features by group, [v, b, f].
Features = dict[Group, Tensor]


def fit_probes(
    model: Studied | Sequence[Studied],
    prompt_config: Task,
    sites: str | Collection[str] | None = None,
    positions: Collection[str] = NATURAL_POSITIONS,
    *,
    n_train: int | None = None,
    n_test: int = 20_000,
    n_untrained: int = 8,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Probe sites of a model for the sufficient statistics of its prompts.

    Args:
        model: a model, or several of one class and shape (seeds): R² is then their mean.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only.
        positions: "query", context positions "0" .. "N-1", "flatten" (all at once), "state"
            (head states have no position). Each site is probed at those that it has.
        n_train: prompts to fit on; by default `TRAIN_PROMPTS`, or what the widest site needs.
        n_test: fresh prompts to score on.
        n_untrained: draws of untrained models; another such model exceeds the best of n with
            probability 1 / (n + 1).
        generator: source of prompts, untrained models and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, position, statistic, r2, ci_low, ci_high, r2_input,
        r2_untrained, r2_shuffled, selectivity; ``.attrs["titles"]`` has words for the sites. r2 is
        ``1 - Σ(t - probe)² / Σ(t - t̄)²`` on the fresh prompts. The interval is a 95 % bootstrap
        over blocks of fresh prompts, and over models when there are several. For head states the
        input control is the flattened prompt. R² of a statistic that does not vary is undefined:
        NaN.

    Raises:
        ValueError: on unknown sites or positions, models of different classes or shapes, prompts
            that do not fit the model, or too few prompts (says how many are needed).
    """
    models = [model] if isinstance(model, Studied) else list(model)
    if not models or any(_shape(m) != _shape(models[0]) for m in models):
        raise ValueError("give one model, or several of one class that share one ModelConfig")
    if n_untrained < 1:
        raise ValueError(f"n_untrained={n_untrained} must be at least 1")
    if n_test < _BLOCKS:
        raise ValueError(
            f"n_test={n_test} must be at least {_BLOCKS}, the blocks of prompts that are resampled"
        )
    generator = generator or torch.Generator().manual_seed(0)
    plan = plan_positions(models[0], prompt_config, sites, positions)
    n_train = enough_prompts(models[0], prompt_config, plan, n_train, with_input=True)
    # A seed of their own, or a model drawn from a generator in the same state is its own control.
    fresh = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    untrained = [models[0].untrained(fresh) for _ in range(n_untrained)]
    sources = [
        *(partial(read_sites, m, plan=plan) for m in (*models, *untrained)),
        partial(_read_input, plan=plan),
    ]
    batch = batch_size(models[0], prompt_config)
    probes = _fit(sources, prompt_config, n_train, batch, generator)
    errors = score_probes(sources, probes, prompt_config, n_test, batch, generator)
    names = [statistic.name for statistic in prompt_config.statistics]
    return with_titles(_tabulate(errors, len(models), names, generator), models[0])


def _shape(model: Studied) -> tuple[Any, ...]:
    """What models must share to be probed as one."""
    config = getattr(model, "config", None)
    return type(model), model.sites, dict(model.axis_sizes), model.dtype, config


def plan_positions(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None,
    positions: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """Positions at which each site is probed, in forward order of the sites.

    Raises:
        ValueError: on unknown sites or positions, or a named site that has none of them.
    """
    known = (*map(str, range(prompt_config.n_context)), "query", "flatten", "state")
    positions = (positions,) if isinstance(positions, str) else tuple(positions)
    for position in positions:
        if position not in known:
            raise ValueError(
                f"unknown position {position!r}; give some of query, 0 .. "
                f"{prompt_config.n_context - 1}, flatten, state, as strings"
            )
    plan = {}
    for site in model.select_sites(sites):
        axes = model.sites[site].axes
        if "position" in axes:
            here = tuple(p for p in known[:-1] if p in positions)
        else:
            only = "state" if model.sites[site].role == "state" else "query"
            here = (only,) if only in positions else ()
        if here:
            plan[site] = here
        elif sites is not None:
            raise ValueError(
                f"site {site!r} (axes {' '.join(axes)}) has none of the positions "
                f"{', '.join(positions)}"
            )
    if not plan:
        raise ValueError(f"no site has any of the positions {', '.join(positions) or '(none)'}")
    return plan


def enough_prompts(
    model: Studied,
    prompt_config: Task,
    plan: dict[str, tuple[str, ...]],
    n_train: int | None = None,
    with_input: bool = False,
) -> int:
    """Prompts to fit probes on: `n_train` where it is given, else as many as the sites need.

    Args:
        model: the model.
        prompt_config: distribution of the prompts.
        plan: positions at which each site is probed (`plan_positions`).
        n_train: prompts asked for; None for `TRAIN_PROMPTS`, or more if a site needs more.
        with_input: whether the prompt itself is probed beside the sites.

    Raises:
        ValueError: if `n_train` is below `PROMPTS_PER_FEATURE` prompts per feature of a site.
    """
    site, position, widest = _widest(model, prompt_config, plan, with_input)
    needed = PROMPTS_PER_FEATURE * widest
    if n_train is None:
        return max(TRAIN_PROMPTS, needed)
    if n_train < needed:
        raise ValueError(
            f"{n_train} prompts are too few to fit {widest} features at {site!r} ({position}); "
            f"n_train must be at least {needed}"
        )
    return n_train


def needed_prompts(
    model: Studied,
    prompt_config: Task,
    sites: str | Collection[str] | None = None,
    positions: Collection[str] = NATURAL_POSITIONS,
) -> int:
    """Fewest prompts that `fit_probes` takes for these sites and positions."""
    plan = plan_positions(model, prompt_config, sites, positions)
    return PROMPTS_PER_FEATURE * _widest(model, prompt_config, plan, with_input=True)[2]


def _widest(
    model: Studied, prompt_config: Task, plan: dict[str, tuple[str, ...]], with_input: bool
) -> tuple[str, str, int]:
    """Site and position with the most features to fit, and how many."""
    sizes = {**model.axis_sizes, "position": prompt_config.n_context + 1}
    widths: dict[Group, int] = {}
    for site, here in plan.items():
        axes = [axis for axis in model.sites[site].axes if axis != "batch"]
        if "position" in axes:
            axes.remove("position")
        width = prod(sizes[axis] for axis in axes)
        widths |= {(site, (p,)): width * _rows(p, sizes["position"]) for p in here}
    if with_input:
        columns = prompt_config.n_covariates + 1
        for group in _input_positions(plan):
            widths["input", (group,)] = columns * _rows(group, sizes["position"])
    (site, (position,)), widest = max(widths.items(), key=lambda item: item[1])
    return site, position, widest


def _rows(position: str, n_positions: int) -> int:
    return n_positions if position == "flatten" else 1


@torch.no_grad()
def read_sites(model: Studied, prompts: Any, plan: dict[str, tuple[str, ...]]) -> Features:
    """Features of planned sites of prompts (or of inputs), in groups of one size, from one pass.

    Only what is probed is copied: the query row of a site, not all of it.
    """
    features: Features = {}

    def read(site: str, activation: Tensor, hook: Any) -> None:
        axes = model.sites[site].axes
        if "position" in axes:
            rows = activation.movedim(axes.index("position"), 1)
        else:
            rows = activation[:, None]
        for group, x in _views(rows, plan[site]):
            require_finite(site, x.movedim(1, 0))
            features[site, group] = x

    with model.hooks(fwd_hooks=[(site, partial(read, site)) for site in plan]):
        model(getattr(prompts, "inputs", prompts))
    return features


def _views(rows: Tensor, positions: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Split [b, p, ...] into one view per single position, and one for all of them flattened."""
    single = tuple(p for p in positions if p != "flatten")
    if single:
        index = [-1 if p in NATURAL_POSITIONS else int(p) for p in single]
        # Selecting before flattening: only what is probed is copied.
        selected = rows[:, index].movedim(1, 0)
        yield single, selected.reshape(*selected.shape[:2], -1)
    if "flatten" in positions:
        yield ("flatten",), rows.flatten(1)[None].clone()


def _read_input(prompts: TaskPrompts, plan: dict[str, tuple[str, ...]]) -> Features:
    """The prompt itself where the sites are."""
    return {("input", group): x for group, x in _views(prompts.tokens, _input_positions(plan))}


def _input_positions(plan: dict[str, tuple[str, ...]]) -> list[str]:
    """Where the prompt is probed; a head state is compared with all of it."""
    return sorted({"flatten" if p == "state" else p for here in plan.values() for p in here})


def batch_size(model: Studied, prompt_config: Task) -> int:
    """Prompts per forward pass, so that a batch's activations stay near the caches."""
    width, heads = (model.axis_sizes.get(axis, 1) for axis in ("d_model", "head"))
    scalars = (prompt_config.n_context + 1) * width * (4 * heads + 8)
    return min(max(_BATCH_BYTES // (8 * scalars), 16), 4096)


def fit_maps(
    model: Studied,
    prompt_config: Task,
    plan: dict[str, tuple[str, ...]],
    n_train: int | None,
    generator: torch.Generator,
) -> dict[Group, LinearMap]:
    """The probes themselves, for interventions: targets are the statistics, in order.

    Raises:
        ValueError: on too few prompts (says how many are needed).
    """
    n_train = enough_prompts(model, prompt_config, plan, n_train)
    source = partial(read_sites, model, plan=plan)
    batch = batch_size(model, prompt_config)
    return _fit([source], prompt_config, n_train, batch, generator, shuffled=False)[0]


def _fit(
    sources: Sequence[Callable[[TaskPrompts], Features]],
    prompt_config: Task,
    n_train: int,
    batch: int,
    generator: torch.Generator,
    shuffled: bool = True,
) -> list[dict[Group, LinearMap]]:
    """Fit the probes of every source on the same prompts.

    Targets are the statistics, then (`shuffled`) the same permuted across prompts.
    """
    moments: list[dict[Group, Moments]] = [{} for _ in sources]
    for prompts in _batches(prompt_config, n_train, batch, generator, "fitting probes"):
        targets = (
            _targets(prompt_config, prompts, generator)
            if shuffled
            else statistic_values(prompt_config, prompts)
        )
        for source, sums in zip(sources, moments, strict=True):
            for key, x in source(prompts).items():
                sums.setdefault(key, Moments()).update(x, targets)
    return [{key: m.ridge() for key, m in sums.items()} for sums in moments]


def _batches(
    task: Task, n_prompts: int, batch: int, generator: torch.Generator, doing: str
) -> Iterator[TaskPrompts]:
    """Fresh prompts, with a bar on a terminal that says what they are for."""
    with tqdm(total=n_prompts, desc=doing, unit=" prompts", disable=None, leave=False) as bar:
        for start in range(0, n_prompts, batch):
            size = min(batch, n_prompts - start)
            yield task.sample(size, generator)
            bar.update(size)


def _targets(task: Task, prompts: TaskPrompts, generator: torch.Generator) -> Tensor:
    """Statistics, then the same permuted across prompts, [b, 2 q]."""
    values = statistic_values(task, prompts)
    return torch.cat([values, values[torch.randperm(len(prompts), generator=generator)]], dim=1)


@dataclass(frozen=True)
class BlockErrors:
    """Sums over blocks k of fresh prompts, from which R² of any resample follows.

    Attributes:
        count: prompts, [k].
        first: Σ (t - c) about the training mean c, [k, 2q].
        second: Σ (t - c)², [k, 2q].
        squared: Σ (t - probe)² by source and group, [k, v, 2q].
        varies: which targets vary, [2q].
    """

    count: Tensor
    first: Tensor
    second: Tensor
    squared: list[dict[Group, Tensor]]
    varies: Tensor

    def r2(self, source: int, key: Group, draws: Tensor) -> Tensor:
        """R² when block k is drawn draws[r, k] times, [r, v, 2q]."""
        total = draws @ self.second - (draws @ self.first).square() / (draws @ self.count)[:, None]
        squared = torch.einsum("rk,kvq->rvq", draws, self.squared[source][key])
        return (1 - squared / total[:, None]).where(self.varies, torch.nan)


def score_probes(
    sources: Sequence[Callable[[TaskPrompts], Features]],
    probes: list[dict[Group, LinearMap]],
    prompt_config: Task,
    n_test: int,
    batch: int,
    generator: torch.Generator,
) -> BlockErrors:
    """Squared errors of the probes on fresh prompts."""
    reference = next(iter(probes[0].values()))
    width = len(reference.target_mean)
    zeros = partial(torch.zeros, dtype=torch.float64)
    count, first, second = zeros(_BLOCKS), zeros(_BLOCKS, width), zeros(_BLOCKS, width)
    squared = [
        {key: zeros(_BLOCKS, len(probe.weights), width) for key, probe in fitted.items()}
        for fitted in probes
    ]
    seen = 0
    for prompts in _batches(prompt_config, n_test, batch, generator, "scoring probes"):
        targets = _targets(prompt_config, prompts, generator)
        block = torch.arange(seen, seen + len(prompts)) * _BLOCKS // n_test
        seen += len(prompts)
        centred = targets - reference.target_mean
        count.index_add_(0, block, torch.ones(len(prompts), dtype=torch.float64))
        first.index_add_(0, block, centred)
        second.index_add_(0, block, centred.square())
        for source, fitted, sums in zip(sources, probes, squared, strict=True):
            for key, x in source(prompts).items():
                error = (targets - fitted[key](x)).square().movedim(1, 0)
                sums[key].index_add_(0, block, error)
    return BlockErrors(count, first, second, squared, reference.target_varies)


def _tabulate(
    errors: BlockErrors, n_models: int, names: Sequence[str], generator: torch.Generator
) -> pd.DataFrame:
    """One row per site, position and statistic; sources are models, untrained, input."""
    n_blocks, n_statistics = len(errors.count), len(names)
    once = torch.ones(1, n_blocks, dtype=torch.float64)
    block_draws = resample_counts(n_blocks, generator)
    model_draws = resample_counts(n_models, generator) / n_models
    untrained = range(n_models, len(errors.squared) - 1)
    raw = {
        position: r2
        for group in errors.squared[-1]
        for position, r2 in zip(group[1], errors.r2(-1, group, once)[0], strict=True)
    }
    rows = []
    for group in errors.squared[0]:
        site, positions = group
        mean = torch.stack([errors.r2(m, group, once)[0] for m in range(n_models)]).mean(0)
        drawn = torch.stack([errors.r2(m, group, block_draws) for m in range(n_models)])
        low, high = percentiles(torch.einsum("rm,mrvq->rvq", model_draws, drawn))
        random = torch.stack([errors.r2(m, group, once)[0] for m in untrained]).amax(0)
        for view, position in enumerate(positions):
            at_input = raw["flatten" if position == "state" else position]
            for i, name in enumerate(names):
                controls = (at_input[i], random[view, i], mean[view, n_statistics + i])
                rows.append(
                    (site, position, name, mean[view, i], low[view, i], high[view, i], *controls)
                )
    columns = ["site", "position", "statistic", "r2", "ci_low", "ci_high", *CONTROLS]
    table = pd.DataFrame(rows, columns=columns)
    numbers = columns[3:]
    table[numbers] = table[numbers].astype(float)
    table["selectivity"] = table["r2"] - strongest_control(table)
    return table


def strongest_control(table: pd.DataFrame) -> pd.Series:
    """The largest of the three controls of each row of a `fit_probes` table."""
    return table[list(CONTROLS)].max(axis=1, skipna=False)
