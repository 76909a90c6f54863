"""Linear probes that a sceptic believes: every R² beside three controls.

x̄ is linear in the flattened prompt and in many activations of a random network, so
that R² alone says little. Each number therefore stands beside what the same probe finds in

- the raw input at the same positions,
- untrained models of the same shape (the best of several draws),
- the site itself with targets permuted across prompts,

and *selectivity* is R² minus the largest of the three.

Probes are ridge regressions in closed form from streamed second moments (`probe.moments`),
fitted on one set of prompts and scored on fresh ones; each prompt passes once through each
model, and memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from models.config import PromptConfig
from models.hooks import StrictHookPoint
from models.prompts import Prompts, sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import axes_of, require_finite
from probe.moments import LinearMap, Moments, percentiles, resample_counts
from probe.quantities import statistic_names, statistics

CONTROLS = ("r2_input", "r2_untrained", "r2_shuffled")
# Where each site is probed unless asked otherwise.
NATURAL_POSITIONS = ("query", "state")
# Overfitting lowers R² by about features / prompts: at most a tenth.
PROMPTS_PER_FEATURE = 10
_BLOCKS = 100
_BATCH_BYTES = 2**24

# A site and the positions whose probes run side by side, one view each.
Group = tuple[str, tuple[str, ...]]
# Features by group, [v, b, f].
Features = dict[Group, Tensor]


def fit_probes(
    model: LinearAttentionTransformer | Sequence[LinearAttentionTransformer],
    prompt_config: PromptConfig,
    sites: str | Collection[str] | None = None,
    positions: Collection[str] = NATURAL_POSITIONS,
    *,
    n_train: int = 20_000,
    n_test: int = 20_000,
    n_untrained: int = 8,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Probe sites of a model for the sufficient statistics of its prompts.

    Args:
        model: a model, or several of one shape (seeds): R² is then their mean.
        prompt_config: distribution of the prompts.
        sites: names; None for every site that is not computed on request only.
        positions: "query", context positions "0" .. "N-1", "flatten" (all at once), "state"
            (head states have no position). Each site is probed at those that it has.
        n_train: prompts to fit on.
        n_test: fresh prompts to score on.
        n_untrained: draws of untrained models; another such model exceeds the best of n with
            probability 1 / (n + 1).
        generator: source of prompts, untrained models and resamples; seeded with 0 by default.

    Returns:
        DataFrame with columns site, position, statistic, r2, ci_low, ci_high, r2_input,
        r2_untrained, r2_shuffled, selectivity. r2 is ``1 - Σ(t - probe)² / Σ(t - t̄)²`` on the
        fresh prompts. The interval is a 95 % bootstrap over blocks of fresh prompts, and over
        models when there are several. For head states the input control is the flattened
        prompt. R² of a statistic that does not vary is undefined: NaN.

    Raises:
        ValueError: on unknown sites or positions, models of different shapes, prompts that do
            not fit the model, or too few prompts (says how many are needed).
    """
    models = [model] if isinstance(model, LinearAttentionTransformer) else list(model)
    if not models or any(m.cfg != models[0].cfg for m in models):
        raise ValueError("give one model, or several that share one ModelConfig")
    if n_untrained < 1:
        raise ValueError(f"n_untrained={n_untrained} must be at least 1")
    if n_test < _BLOCKS:
        raise ValueError(
            f"n_test={n_test} must be at least {_BLOCKS}, the blocks of prompts that are resampled"
        )
    generator = generator or torch.Generator().manual_seed(0)
    plan = plan_positions(models[0], prompt_config, sites, positions)
    # A seed of their own, or a model drawn from a generator in the same state is its own control.
    fresh = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    untrained = [
        LinearAttentionTransformer(models[0].cfg, fresh).to(models[0].embed.W_E.dtype)
        for _ in range(n_untrained)
    ]
    sources = [
        *(partial(read_sites, m, plan=plan) for m in (*models, *untrained)),
        partial(_read_input, plan=plan),
    ]
    batch = batch_size(models[0], prompt_config)
    probes = _fit(sources, prompt_config, n_train, batch, generator)
    errors = _score(sources, probes, prompt_config, n_test, batch, generator)
    names = statistic_names(prompt_config.n_covariates)
    return _tabulate(errors, len(models), names, generator)


def plan_positions(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
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
        axes = axes_of(site)
        if "position" in axes:
            here = tuple(p for p in known[:-1] if p in positions)
        else:
            only = "state" if "head" in axes else "query"
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


@torch.no_grad()
def read_sites(
    model: LinearAttentionTransformer, inputs: Tensor, plan: dict[str, tuple[str, ...]]
) -> Features:
    """Features of planned sites, in groups of one size, from one forward pass.

    Only what is probed is copied: the query row of a site, not all of it.
    """
    features: Features = {}

    def read(activation: Tensor, hook: StrictHookPoint) -> None:
        site = hook.name
        axes = axes_of(site)
        if "position" in axes:
            rows = activation.movedim(axes.index("position"), 1)
        else:
            rows = activation[:, None]
        for group, x in _views(rows, plan[site]):
            require_finite(site, x.movedim(1, 0))
            features[site, group] = x

    with model.hooks(fwd_hooks=[(site, read) for site in plan]):
        model(inputs)
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


def _read_input(inputs: Tensor, plan: dict[str, tuple[str, ...]]) -> Features:
    """The prompt itself where the sites are; a head state reads all of it."""
    asked = {"flatten" if p == "state" else p for here in plan.values() for p in here}
    return {("input", group): x for group, x in _views(inputs[:, :, 1:], sorted(asked))}


def batch_size(model: LinearAttentionTransformer, prompt_config: PromptConfig) -> int:
    """Prompts per forward pass, so that a batch's activations stay near the caches."""
    cfg = model.cfg
    scalars = (prompt_config.n_context + 1) * cfg.d_model * (4 * cfg.n_heads + 8)
    return min(max(_BATCH_BYTES // (8 * scalars), 16), 4096)


def fit_maps(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    plan: dict[str, tuple[str, ...]],
    n_train: int,
    generator: torch.Generator,
) -> dict[Group, LinearMap]:
    """The probes themselves, for interventions: targets are the statistics, in order.

    Raises:
        ValueError: on too few prompts (says how many are needed).
    """
    source = partial(read_sites, model, plan=plan)
    batch = batch_size(model, prompt_config)
    return _fit([source], prompt_config, n_train, batch, generator, shuffled=False)[0]


def _fit(
    sources: Sequence[Callable[[Tensor], Features]],
    prompt_config: PromptConfig,
    n_train: int,
    batch: int,
    generator: torch.Generator,
    shuffled: bool = True,
) -> list[dict[Group, LinearMap]]:
    """Fit the probes of every source on the same prompts.

    Targets are the statistics, then (`shuffled`) the same permuted across prompts.
    """
    moments: list[dict[Group, Moments]] = [{} for _ in sources]
    for prompts in _batches(prompt_config, n_train, batch, generator):
        targets = _targets(prompts, generator) if shuffled else statistics(prompts)
        for source, sums in zip(sources, moments, strict=True):
            for key, x in source(prompts.inputs).items():
                if key not in sums:
                    _require_prompts(key, x.shape[2], n_train)
                    sums[key] = Moments()
                sums[key].update(x, targets)
    return [{key: m.ridge() for key, m in sums.items()} for sums in moments]


def _require_prompts(key: Group, n_features: int, n_train: int) -> None:
    needed = PROMPTS_PER_FEATURE * n_features
    if n_train < needed:
        raise ValueError(
            f"{n_train} prompts are too few to fit {n_features} features at {key[0]!r} "
            f"({key[1]}); n_train must be at least {needed}"
        )


def _batches(
    config: PromptConfig, n_prompts: int, batch: int, generator: torch.Generator
) -> Iterator[Prompts]:
    for start in range(0, n_prompts, batch):
        yield sample_prompts(config, min(batch, n_prompts - start), generator)


def _targets(prompts: Prompts, generator: torch.Generator) -> Tensor:
    """Statistics, then the same permuted across prompts, [b, 2 q]."""
    values = statistics(prompts)
    return torch.cat([values, values[torch.randperm(len(prompts), generator=generator)]], dim=1)


@dataclass(frozen=True)
class _Errors:
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


def _score(
    sources: Sequence[Callable[[Tensor], Features]],
    probes: list[dict[Group, LinearMap]],
    prompt_config: PromptConfig,
    n_test: int,
    batch: int,
    generator: torch.Generator,
) -> _Errors:
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
    for prompts in _batches(prompt_config, n_test, batch, generator):
        targets = _targets(prompts, generator)
        block = torch.arange(seen, seen + len(prompts)) * _BLOCKS // n_test
        seen += len(prompts)
        centred = targets - reference.target_mean
        count.index_add_(0, block, torch.ones(len(prompts), dtype=torch.float64))
        first.index_add_(0, block, centred)
        second.index_add_(0, block, centred.square())
        for source, fitted, sums in zip(sources, probes, squared, strict=True):
            for key, x in source(prompts.inputs).items():
                error = (targets - fitted[key](x)).square().movedim(1, 0)
                sums[key].index_add_(0, block, error)
    return _Errors(count, first, second, squared, reference.target_varies)


def _tabulate(
    errors: _Errors, n_models: int, names: Sequence[str], generator: torch.Generator
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
    table["selectivity"] = table["r2"] - table[list(CONTROLS)].max(axis=1, skipna=False)
    return table
