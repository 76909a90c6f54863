r"""Several covariates: what does layer norm divide by?

Elimination divides by the variance of one covariate, then by the residual variance of the
next, and so on; Cramer's rule divides once, by the determinant of the covariance V. All of
these are *pivots*

    V_T|s = det V_{s ∪ T} / det V_s,

the determinant of the covariance of a block T given a set s: of one covariate (`V_2|1`: the
variance of x_2 given x_1), or of several at once (`det_12`). They are correlated, so that a
layer which divides by one of them seems to divide by all: a pivot counts as found only if
it beats every other one by a margin whose interval excludes 0.

The causal form exchanges the pivot. A model that eliminates s, then T with a multiplier
m = V_T|s(A) / V_T|s(B) too large, then all others, predicts

    β = V_TT⁻¹ C_T,  B = V_jT V_TT⁻¹   (after eliminating s)
    ŷ ← ȳ + .. + m βᵀx_T,  x_j ← x_j - m B x_T,  y ← y - m βᵀ x_T,  least squares on the rest.

That is what the prediction on A should become when layer norm is given the scale of B. The
norm divides constants too, and later layers measure their own quotients by them: the swap
rescales what varies in the norm's output and holds its mean over prompts and tokens.

A scale may follow a pivot without being proportional to it (signals beside the pivot keep it
from falling to 0). With m the ratio of the two *scales*, the same comparison asks whether the
layer's output is that step of the elimination, however well it is divided.

Shapes: b prompts, p covariates.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, site_with
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from models.tasks.task import Task
from probe.activations.collect import collect
from probe.causal.norm_scale import layer_divisors, require_norm, require_variances
from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.regression import require_samples, slopes_and_r2

# Calibrated on constructions: the layer that divides by a pivot has R² and slope near 1, also as
# a step. A layer that divides by a constant follows pivots at slopes of 1e-2 and less, whatever
# its R². What excludes wrong pivots, which reach .9, are the margins.
READABLE_R2 = 0.5
READABLE_SLOPE = 0.25
_LARGEST_RATIO = 2.0


@dataclasses.dataclass(frozen=True, order=True)
class Pivot:
    """Determinant of the covariance of `block` given `done`; covariates count from 1.

    Attributes:
        block: T, eliminated at once.
        done: s, eliminated before.
    """

    block: tuple[int, ...]
    done: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """``V_2``, ``V_2|1``, ``V_3|12``, ``det_12``."""
        block, done = ("".join(map(str, part)) for part in (self.block, self.done))
        kind = "V" if len(self.block) == 1 else "det"
        return f"{kind}_{block}" + f"|{done}" * bool(done)

    def value(self, x_cov: Tensor) -> Tensor:
        """Of covariance matrices [b, p, p]: [b]."""
        return _determinant(x_cov, self.done + self.block) / _determinant(x_cov, self.done)

    def exchanged(self, prompts: Prompts, ratio: Tensor) -> Tensor:
        """Prediction when what is divided by this pivot comes out `ratio` [b] times too large.

        Returns:
            Predictions, [b]; least squares where `ratio` is 1.
        """
        moments = ResidualMoments.of(prompts)
        one = torch.ones_like(ratio)
        for covariates, multiplier in ((self.done, one), (self.block, ratio)):
            moments = moments.eliminate(covariates, multiplier)
        return moments.eliminate(tuple(range(1, prompts.n_covariates + 1)), one).prediction


def candidates(n_covariates: int) -> list[Pivot]:
    """Every V_j given every subset of the others, and the determinant of every submatrix."""
    numbers = range(1, n_covariates + 1)
    pivots = [
        Pivot((j,), done)
        for size in range(n_covariates)
        for j in numbers
        for done in combinations([k for k in numbers if k != j], size)
    ]
    blocks = [Pivot(T) for size in numbers[1:] for T in combinations(numbers, size)]
    return pivots + blocks


@torch.no_grad()
def pivot_test(
    model: Studied,
    prompt_config: Task,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Which pivot each layer norm divides by, seen in its scale and in what a swap does.

    The logarithm of the scale at the query token is regressed on the logarithm of every
    candidate, over prompts. The margin of a candidate is its R² less the largest R² of the
    others, on the same resampled prompts. The swap puts the scales of unrelated prompts B, at
    all positions, in the place of those of A (constants are held). The change of the prediction
    is regressed on the change expected when that pivot is exchanged (`swap`); and, with ratios of
    scales held within a factor of 2, on the change when that step of the elimination is
    multiplied by the ratio (`step`).

    Args:
        model: a model whose layers divide (have a site of the role "divisor").
        prompt_config: distribution of the prompts, usually the training distribution; pivots
            can only be told apart where scales and correlation vary.
        n_prompts: number of prompts A, and of prompts B.
        generator: source of prompts and resamples; seeded with 0 by default.

    Returns:
        DataFrame with a row per layer and candidate: layer, candidate, r2, ci_low, ci_high,
        slope (1 in a model that divides by the candidate), margin, margin_low, margin_high,
        and r2, margin and slope of swap and step (swap_r2, swap_r2_low, ..), shuffled_r2 (a
        control: candidates of other prompts), best. Intervals: 95 %, bootstrap over prompts.
        `best` is true for at most one candidate of a layer: r2 and step_r2 at least 0.5, slope
        0.25; ahead of all others in scale or in step, behind in neither (margins with intervals
        above 0, or not below).

    Raises:
        ValueError: for a model without layer norm, a single covariate, or too few prompts.
    """
    require_samples(n_prompts)
    require_pivots(model, prompt_config)
    p = prompt_config.n_covariates
    generator = generator or torch.Generator().manual_seed(0)
    a = prompt_config.sample(n_prompts, generator)
    b = prompt_config.sample(n_prompts, generator)
    pivots = candidates(p)
    values = torch.stack([pivot.value(a.x_cov) for pivot in pivots])
    ratios = values / torch.stack([pivot.value(b.x_cov) for pivot in pivots])
    by_pivot = torch.stack(
        [pivot.exchanged(a, ratio) for pivot, ratio in zip(pivots, ratios, strict=True)]
    )
    draws = resample_counts(n_prompts, generator)
    shuffled = torch.randperm(n_prompts, generator=generator)
    layers = []
    for divisor in layer_divisors(model):
        scale, _, change = _swap(model, divisor, a, b)
        _, ratio, moderate = _swap(model, divisor, a, b, _LARGEST_RATIO)
        by_ratio = torch.stack([pivot.exchanged(a, ratio) for pivot in pivots])
        follows = CandidateLines.fit(values.log(), scale.log(), draws)
        swap = CandidateLines.fit(by_pivot - a.least_squares, change, draws)
        step = CandidateLines.fit(by_ratio - a.least_squares, moderate, draws)
        columns = follows.columns() | swap.columns("swap_") | step.columns("step_")
        columns["shuffled_r2"] = CandidateLines.fit(values.log(), scale.log()[shuffled], draws).r2
        names = {"layer": divisor.layer, "candidate": [pivot.name for pivot in pivots]}
        layers.append(pd.DataFrame(names | {key: c.numpy() for key, c in columns.items()}))
    table = pd.concat(layers, ignore_index=True)
    readable = (
        (table.r2 >= READABLE_R2) & (table.slope >= READABLE_SLOPE) & (table.step_r2 >= READABLE_R2)
    )
    ahead = (table.margin_low > 0) | (table.step_margin_low > 0)
    behind = (table.margin_high < 0) | (table.step_margin_high < 0)
    table = table.rename(columns={"r2_low": "ci_low", "r2_high": "ci_high"})
    return table.assign(best=readable & ahead & ~behind)


def require_pivots(model: Studied, task: Task) -> None:
    """Refuse a model without layer norm, and a single covariate.

    Raises:
        ValueError: saying why `pivot_test` is not applicable.
    """
    require_norm(model)
    require_variances(task)
    if task.n_covariates < 2:
        raise ValueError(
            "pivot test not applicable to one covariate, which has one pivot, V: use division_test"
        )


@torch.no_grad()
def pivot_points(
    model: Studied,
    prompt_config: PromptConfig,
    generator: torch.Generator,
    n_prompts: int = 500,
) -> pd.DataFrame:
    """Layer-norm scale at the query beside every candidate, prompt by prompt.

    Returns:
        DataFrame with columns layer, candidate, prompt, value, scale (in units of the layer's
        median).
    """
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    frames = []
    for divisor in layer_divisors(model):
        scale = collect(model, prompts, divisor.name)[divisor.name][:, -1, 0].double()
        for pivot in candidates(prompts.n_covariates):
            columns = {"layer": divisor.layer, "candidate": pivot.name, "prompt": range(n_prompts)}
            columns |= {"value": pivot.value(prompts.x_cov), "scale": scale / scale.median()}
            frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def pivot_label(table: pd.DataFrame) -> str | None:
    """The algorithm that a `pivot_test` spells out.

    Returns:
        "elimination (x2, x1)" if successive layers divide by V_2 and V_1|2, and so on for p
        covariates, all of them; "closed form by determinant" if a layer divides by the
        determinant of all covariates; None otherwise.
    """
    by_name = {pivot.name: pivot for pivot in candidates(_n_covariates(table))}
    everything = max(by_name.values(), key=lambda pivot: len(pivot.block)).block
    order: tuple[int, ...] = ()
    for name in table.loc[table.best].sort_values("layer").candidate:
        pivot = by_name[name]
        if pivot.block == everything:
            return "closed form by determinant"
        if len(pivot.block) == 1 and pivot.done == tuple(sorted(order)):
            order += pivot.block
    if len(order) < len(everything):
        return None
    return f"elimination ({', '.join(f'x{j}' for j in order)})"


def _n_covariates(table: pd.DataFrame) -> int:
    return sum(name.startswith("V_") and "|" not in name for name in table.candidate.unique())


def _swap(
    model: Studied,
    divisor: Site,
    a: Prompts,
    b: Prompts,
    largest_ratio: float = float("inf"),
) -> tuple[Tensor, Tensor, Tensor]:
    """Give a layer norm on A the scale it has on B, within a factor; constants are held.

    Returns:
        Scale at the query of A, its ratio to the one that replaces it, and the change of the
        prediction, each [b].
    """
    quotient = site_with(model, "norm output", divisor.layer).name
    before, found = model.run(a, reads=[divisor.name, quotient])
    scale, output = found[divisor.name], found[quotient]
    ratio = scale / collect(model, b, divisor.name)[divisor.name]
    ratio = ratio.clamp(1 / largest_ratio, largest_ratio)
    constant = output.mean((0, 1))
    swapped = constant + ratio * (output - constant)
    after, _ = model.run(a, writes={quotient: swapped})
    return scale[:, -1, 0].double(), ratio[:, -1, 0].double(), after - before


@dataclasses.dataclass(frozen=True)
class CandidateLines:
    """Lines on several candidates: slope and R² [c], and R² of resamples [resamples, c]."""

    slope: Tensor
    r2: Tensor
    r2s: Tensor

    @classmethod
    def fit(cls, x: Tensor, y: Tensor, draws: Tensor) -> CandidateLines:
        """Lines of y [n] on each of x [c, n]; `draws` [resamples, n] counts samples."""
        once = torch.ones_like(draws[:1])
        slopes, r2s = slopes_and_r2(x, y, torch.cat([once, draws]))
        return cls(slopes[0], r2s[0], r2s[1:])

    def columns(self, prefix: str = "") -> dict[str, Tensor]:
        """R² and margin with their intervals, and slope."""
        result = {}
        for name, once, resampled in (
            ("r2", self.r2, self.r2s),
            ("margin", _margins(self.r2), _margins(self.r2s)),
        ):
            low, high = percentiles(resampled)
            result |= {name: once, f"{name}_low": low, f"{name}_high": high}
        result["slope"] = self.slope
        return {prefix + name: values for name, values in result.items()}


def _margins(r2: Tensor) -> Tensor:
    """Each R² less the largest of the others, [..., c]."""
    top = r2.topk(2, dim=-1).values
    return r2 - torch.where(r2 < top[..., :1], top[..., :1], top[..., 1:])


def _determinant(x_cov: Tensor, covariates: tuple[int, ...]) -> Tensor:
    """Of the submatrix of some covariates, [b]; 1 for none."""
    index = [j - 1 for j in covariates]
    return torch.linalg.det(x_cov[:, index][:, :, index])


@dataclasses.dataclass(frozen=True)
class ResidualMoments:
    """Second moments of residuals, and the prediction so far.

    Attributes:
        x_cov: [b, p, p].
        xy_cov: [b, p].
        query: residual covariates of the query, [b, p].
        prediction: [b].
        done: covariates that are eliminated.
    """

    x_cov: Tensor
    xy_cov: Tensor
    query: Tensor
    prediction: Tensor
    done: frozenset[int] = frozenset()

    @classmethod
    def of(cls, prompts: Prompts) -> ResidualMoments:
        """Before any elimination."""
        return cls(prompts.x_cov, prompts.xy_cov, prompts.query - prompts.x_mean, prompts.y_mean)

    def eliminate(self, covariates: tuple[int, ...], multiplier: Tensor) -> ResidualMoments:
        """Remove `multiplier` [b] times what the covariates explain; skips those done."""
        T = [j - 1 for j in covariates if j not in self.done]
        if not T:
            return self
        across = self.x_cov[:, :, T]
        right = torch.cat([across.mT, self.xy_cov[:, T, None]], dim=2)
        solved = torch.linalg.solve(across[:, T], right)
        coefficients, beta = solved[..., :-1], solved[..., -1]
        # Of x - m B x_T the moments lose 2m - m² times what B x_T explains.
        lost = (2 * multiplier - multiplier**2)[:, None]
        at_query = self.query[:, T]
        return ResidualMoments(
            x_cov=self.x_cov - lost[..., None] * across @ coefficients,
            xy_cov=self.xy_cov - lost * (across @ beta[..., None])[..., 0],
            query=self.query - multiplier[:, None] * (at_query[:, None] @ coefficients)[:, 0],
            prediction=self.prediction + multiplier * (beta * at_query).sum(1),
            done=self.done | set(covariates),
        )
