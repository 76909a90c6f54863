r"""What a model does, measured against every rival.

`conditions` draws prompts in distribution and shifted, `compare` measures on them

- *distance*: mean (m - r)² / var(m) of predictions m of the model and r of a rival: the
  share of the model's variance that the rival leaves unexplained;
- *line distance*: the same for the straight lines that m and r induce, fitted to predictions
  at fresh queries with the context kept (Akyürek et al., arXiv 2211.15661);
- *defect* of equivariance: mean (f(T P) - T f(P))² / mean f² for (x, u) -> 2(x, u), where
  the prediction should not change, y -> y + x, where it should grow by u, x -> x + 1 and
  y -> 3 y. Least squares has none;
- *sensitivity cosine*: cosine between derivatives of m and r along random directions of
  the samples (von Oswald et al., arXiv 2212.07677, use the query's).

Intervals are 95 % bootstrap intervals over prompts.

Shapes: b batch, R rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
import torch
from torch import Tensor

from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, prompts_from_arrays
from probe.rivals.fitting import Ladder
from probe.rivals.predictor import Predictor
from probe.stats.bootstrap import percentiles, resample_counts

IN_DISTRIBUTION = "in distribution"
# Shifts of length change what the step sizes of a rival mean, so they inform but do not count.
LENGTHS = {"N halved": 0.5, "N doubled": 2.0}
_DIRECTIONS = 12
_QUERIES = 6
# Predictions beyond this many times their in-distribution size say nothing but "diverged".
_DIVERGED = 1e6


def conditions(
    config: PromptConfig, batch: int, generator: torch.Generator, any_length: bool
) -> dict[str, Prompts]:
    """Prompts in distribution and under each shift, [batch] each, by name.

    Args:
        config: the distribution.
        batch: prompts per condition.
        generator: source of randomness.
        any_length: whether the model takes prompts of other lengths.
    """
    base = config.sample(batch, generator)
    result = {IN_DISTRIBUTION: base, **config.shifts(base, generator)}
    if any_length:
        for name, factor in LENGTHS.items():
            n = max(config.n_covariates + 2, 3, round(config.n_context * factor))
            result[name] = config.model_copy(update={"n_context": n}).sample(batch, generator)
    return result


def where_finite(predictor: Predictor, prompts: dict[str, Prompts]) -> dict[str, Prompts]:
    """Leave out conditions under which the model diverges on a prompt."""
    limit = _DIVERGED * float(predictor(prompts[IN_DISTRIBUTION]).abs().max())
    return {
        name: batch for name, batch in prompts.items() if (predictor(batch).abs() < limit).all()
    }


def distances(
    predictor: Predictor, ladder: Ladder, prompts: dict[str, Prompts], generator: torch.Generator
) -> pd.DataFrame:
    """Distance of the model to every rival under every condition.

    Returns:
        DataFrame with columns measure, condition, family, k, query_row, value, ci_low,
        ci_high, n_prompts.
    """
    tables = []
    for name, batch in prompts.items():
        predictions = predictor(batch)
        error = (ladder.predict(batch) - predictions).square()
        values = _over_variance(error, predictions, generator)
        tables.append(
            ladder.index[["family", "k", "query_row"]].assign(
                measure="distance", condition=name, **values
            )
        )
    return pd.concat(tables, ignore_index=True)


def further_measures(
    predictor: Predictor,
    ladder: Ladder,
    prompts: dict[str, Prompts],
    generator: torch.Generator,
) -> pd.DataFrame:
    """Line distances under every condition; sensitivity and defects in distribution.

    Args:
        predictor: the model.
        ladder: the rivals to measure, none of which is always zero.
        prompts: prompts by condition.
        generator: source of queries, directions and resamples.

    Returns:
        As `distances`; defects of the model itself have the family "model".
    """

    def everyone(batch: Prompts) -> Tensor:
        return torch.cat([predictor(batch)[None], ladder.predict(batch)])

    index = ladder.index[["family", "k", "query_row"]]
    model = pd.DataFrame([{"family": "model", "k": 0, "query_row": False}])
    with_model = pd.concat([model, index], ignore_index=True)
    tables = []
    for name, batch in prompts.items():
        lines = _induced_lines(everyone, batch, generator)
        error = (lines[1:] - lines[0]).square().mean(2)
        values = _over_variance(error, lines[0], generator)
        tables.append(index.assign(measure="line distance", condition=name, **values))

    here = prompts[IN_DISTRIBUTION]
    gradients = _derivatives(everyone, here, generator)
    cosine = torch.nn.functional.cosine_similarity(gradients[1:], gradients[:1], dim=2)
    values = _mean(torch.nan_to_num(cosine), generator)
    tables.append(index.assign(measure="sensitivity cosine", condition=IN_DISTRIBUTION, **values))

    before = everyone(here)
    for name, moved, expected in _moved(here):
        change = everyone(moved) - expected(before)
        values = _ratio(change.square(), before.square(), generator)
        named = {"measure": f"defect: {name}", "condition": IN_DISTRIBUTION}
        tables.append(with_model.assign(**named, **values))
    return pd.concat(tables, ignore_index=True)


def separations(
    predictor: Predictor, ladder: Ladder, prompts: dict[str, Prompts]
) -> dict[str, Tensor]:
    """Distance between every two rivals under each condition, [R, R]; as for the model's own,
    relative to the variance of its predictions.
    """
    result = {}
    for name, batch in prompts.items():
        rivals = ladder.predict(batch)
        difference = (rivals[:, None] - rivals[None]).square().mean(2)
        result[name] = difference / predictor(batch).var()
    return result


def _moved(prompts: Prompts) -> Iterator[tuple[str, Prompts, Callable[[Tensor], Tensor]]]:
    """Transformed prompts, and what they should do to predictions."""
    x, y, u = prompts.x, prompts.y, prompts.query
    yield "(x, u) doubled", prompts_from_arrays(2 * x, y, 2 * u), lambda f: f
    sheared = prompts_from_arrays(x, y + x[..., 0], u)
    yield "y + x", sheared, lambda f: f + u[:, 0]
    yield "x + 1", prompts_from_arrays(x + 1, y, u + 1), lambda f: f
    yield "y tripled", prompts_from_arrays(x, 3 * y, u), lambda f: 3 * f


def _induced_lines(
    predict: Callable[[Prompts], Tensor], prompts: Prompts, generator: torch.Generator
) -> Tensor:
    """Values at fresh queries of the line fitted to predictions there, [R, b, queries]."""
    n_queries = _QUERIES + prompts.n_covariates
    # Queries of other prompts: the same distribution, independent of the context.
    others = torch.randint(len(prompts), (n_queries, len(prompts)), generator=generator)
    queries = prompts.query[others]
    answers = torch.stack(
        [predict(prompts_from_arrays(prompts.x, prompts.y, u)) for u in queries], dim=-1
    )
    rows = torch.cat([torch.ones_like(queries[..., :1]), queries], dim=-1).transpose(0, 1)
    # Orthogonal projection of the answers on the lines: the same for every rival.
    basis, _ = torch.linalg.qr(rows)
    return torch.einsum("bqf,bsf,rbs->rbq", basis, basis, answers)


def _derivatives(
    predict: Callable[[Prompts], Tensor], prompts: Prompts, generator: torch.Generator
) -> Tensor:
    """Central differences along random directions of all samples, [R, b, directions]."""
    width = 1e-3
    columns = []
    for _ in range(_DIRECTIONS):
        moves = [
            width * value.std() * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for value in (prompts.x, prompts.y, prompts.query)
        ]
        there, back = (
            predict(
                prompts_from_arrays(
                    prompts.x + sign * moves[0],
                    prompts.y + sign * moves[1],
                    prompts.query + sign * moves[2],
                )
            )
            for sign in (1, -1)
        )
        columns.append((there - back) / (2 * width))
    return torch.stack(columns, dim=-1)


def _over_variance(error: Tensor, values: Tensor, generator: torch.Generator) -> dict:
    """Mean error [R, b] over the variance of `values` [b] or [b, ...], with intervals."""
    flat = values.reshape(len(values), -1)
    moments = torch.stack([flat.mean(1), flat.square().mean(1)], dim=1)

    def ratio(counts: Tensor) -> Tensor:
        n = counts.sum(1, keepdim=True)
        first, second = (counts @ moments / n).unbind(1)
        return counts @ error.T / n / (second - first.square())[:, None]

    return _with_interval(ratio, len(values), generator)


def _ratio(numerator: Tensor, denominator: Tensor, generator: torch.Generator) -> dict:
    """Mean of [R, b] over mean of [R, b], with intervals."""
    return _with_interval(
        lambda counts: (counts @ numerator.T) / (counts @ denominator.T),
        numerator.shape[1],
        generator,
    )


def _mean(values: Tensor, generator: torch.Generator) -> dict:
    """Mean over the last axis of [R, b], with intervals."""
    return _with_interval(
        lambda counts: counts @ values.T / counts.sum(1, keepdim=True),
        values.shape[1],
        generator,
    )


def _with_interval(
    statistic: Callable[[Tensor], Tensor], n_prompts: int, generator: torch.Generator
) -> dict:
    """Columns value, ci_low, ci_high, n_prompts of a statistic of resample counts [S, b]."""
    value = statistic(torch.ones(1, n_prompts, dtype=torch.float64))[0]
    low, high = percentiles(statistic(resample_counts(n_prompts, generator)))
    return {
        "value": value.numpy(),
        "ci_low": low.numpy(),
        "ci_high": high.numpy(),
        "n_prompts": n_prompts,
    }
