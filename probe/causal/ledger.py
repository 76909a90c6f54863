r"""The ledger of divisions: for each divisor, does it answer to V, and the prediction to it?

"The model divides by V" is two statements: a divisor s answers to V, and the prediction answers
to s. Each has its own measures, every one an intervention:

- *Elasticity* e = d log s / d log a² at the query, the prompt edited by x_n → x̄ + a (x_n − x̄),
  u → x̄ + a (u − x̄). A division by V has 1, by √V ½, a constant 0. Earlier layers may have left
  x' of x, with variance V' (`probe.causal.held`): after a step γ of gradient descent
  V' = V (1 − γ V)², so that a division by V' has e = 1 − 2 γ V / (1 − γ V), and e divided by
  d log V' / d log a² is 1 again.
- *Carried* D = −∂ŷ/∂ log s, through a factor common to all positions, all other divisors held:
  its line on the fit (C/V)(u − x̄) says what share of the fit the division carries. A norm
  directly before a linear read-out carries the whole prediction by its position; there e decides.
- *Budget*. Least squares stays as it was under the edit, so that what the numerators do to the
  prediction the divisors must undo. With all divisors written as functions of their own,

      dŷ/d log a² = ∂ŷ/∂ log a² |_(divisors held) − Σ_s e_s D_s    (summed over positions too),

  which holds for every model. A divisor's share is the slope of e_s D_s on the numerators' part,
  through the origin; shares add up to 1 where the prediction stays as it was.
- *Dose*: with f·s in place of s a prediction linear in what the norm returns is a + b / f.
- *Replaced*: the error with s = κ V', κ V or a constant in its place, at all positions.
- *Same V*: what the scale of an unrelated prompt of nearly the same V (or V') changes, in units of
  what that of a random prompt changes. Near 0 where s carries nothing but V.
- *Exchange*: with the scale of prompt B, the prediction for A should move by
  (C_A/V_B − C_A/V_A)(u_A − x̄_A), without a free slope: R² about the line y = x. The expected move
  goes as V_A/V_B − 1 (or V'_A/V'_B − 1), which has no variance where V' reaches 0 inside the data
  (γ V = 1). So pairs are those in which it lies in [−¾, 3], for V as for V' (a ratio up to
  `RATIO`), and both exceed their 5 % quantile (`FLOOR`), below which the division is by what little
  the reading of x' takes from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, Write, sites_with
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.activations.collect import require_finite
from probe.causal.divisors import (
    before_readout,
    log_at_query,
    on_stream,
    pooled_mean,
    pooled_median,
    stream_before,
)
from probe.causal.held import Held, Reading, read_by_readout
from probe.causal.spread import with_spread
from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.moments import ROUNDING_STEPS
from probe.stats.regression import slopes_and_r2

# Name of the row of all divisors together.
JOINTLY = "all"
DOSES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Pairs of an exchange: largest ratio of their V, and the quantile that both must exceed.
RATIO, FLOOR = 4.0, 0.05
# Measures of a row, in the order of the columns. Each has an interval and untrained controls.
MEASURES = (
    "elasticity",
    "elasticity_held",
    "held_response",
    "carried_slope",
    "carried_r2",
    "budget_share",
    "dose_left",
    "error",
    "replaced_held",
    "replaced_v",
    "replaced_constant",
    "same_v",
    "same_held",
    "exchange_r2",
    "exchange_slope",
    "exchange_line_r2",
    "exchange_held_r2",
    "exchange_held_slope",
    "exchange_held_line_r2",
)
_LEAST_PROMPTS = 50
# Untrained models are spread so far apart that more would not be seen.
_CONTROL_PROMPTS = 500

Estimate = tuple[float, float, float]
_NOTHING: Estimate = (torch.nan, torch.nan, torch.nan)


def division_ledger(
    model: Studied,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 2000,
    n_untrained: int = 3,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Measure every divisor, and all of them together, on one set of prompts.

    Args:
        model: a model with divisors.
        prompt_config: distribution of the prompts, one covariate; usually the model's training
            distribution, since what divides depends on how much V varies.
        n_prompts: prompts, and pairs of prompts.
        n_untrained: untrained models of the same class and shape, as controls.
        generator: source of prompts, resamples and untrained models; seeded with 0 by default.

    Returns:
        DataFrame with a row per divisor in forward order, and the row "all" in which all are edited
        together. Columns: site, layer, label, before_readout, n_prompts;
        for each m of `MEASURES` m, m_low, m_high (95 % bootstrap interval over prompts) and
        m_untrained, m_untrained_low, m_untrained_high (median, smallest and largest of the
        untrained models); exchange_pairs (share of the pairs that are compared);
        budget_left (root mean square of dŷ/d log a² in units of the numerators' part) and
        budget_defect (largest violation of the budget, in the same units; rounding).

        elasticity, elasticity_held, held_response (d log V' / d log a²), dose_left (share of the
        variance over doses that a + b / f leaves) are medians over prompts. error, replaced_*: mean
        squared error to the target in units of its variance. same_*: ratios of mean squares.
        exchange_*: see the module; *_slope and *_line_r2 are of the line with a free slope.

        In the row "all" elasticities are missing; same_held and exchange_* take V' before the last
        divisor; and in replaced_held and replaced_v each divisor becomes κ V' (κ V) or its
        constant, whichever is nearer to it in log scale. Measures that need V' are missing where
        the stream holds no x, exchange_held_* where the divisor rescales the stream that y' is
        read from.

    Raises:
        ValueError: for several covariates, a model without divisors ("not applicable"), fewer
            than 50 prompts or no untrained model, or predictions that are not finite.
    """
    places = _require_ledger(model, prompt_config, n_prompts, n_untrained)
    generator = generator or torch.Generator().manual_seed(0)
    samples = [sample_prompts(prompt_config, n_prompts, generator) for _ in range(3)]
    resampled = Resamples(resample_counts(n_prompts, generator))
    table = _measured(model, samples, resampled)
    few = min(n_prompts, _CONTROL_PROMPTS)
    samples = [sample_prompts(prompt_config, few, generator) for _ in range(3)]
    controls = [
        _measured(model.untrained(generator), samples, Resamples.none(few))
        for _ in range(n_untrained)
    ]
    columns = {
        "site": [*(place.name for place in places), JOINTLY],
        "layer": pd.array([*(place.layer for place in places), None], dtype="Int64"),
        "label": [*(place.title for place in places), "all divisors"],
        "before_readout": [*(before_readout(model, place) for place in places), False],
        "n_prompts": n_prompts,
    }
    for name in MEASURES:
        value, low, high = (list(ends) for ends in zip(*(row[name] for row in table), strict=True))
        columns |= {name: value, f"{name}_low": low, f"{name}_high": high}
        untrained = pd.DataFrame([[row[name][0] for row in control] for control in controls])
        columns |= {
            f"{name}_untrained": untrained.median().to_list(),
            f"{name}_untrained_low": untrained.min().to_list(),
            f"{name}_untrained_high": untrained.max().to_list(),
        }
    for name in ("exchange_pairs", "budget_left", "budget_defect"):
        columns[name] = [row[name][0] for row in table]
    return pd.DataFrame(columns)


@dataclass(frozen=True)
class Resamples:
    """Bootstrap of one set of prompts, the same resamples for every estimate.

    Attributes:
        draws: how often each prompt counts, [resamples, b].
    """

    draws: Tensor

    @classmethod
    def none(cls, n_prompts: int) -> Resamples:
        """Every prompt once: estimates without intervals."""
        return cls(torch.ones(1, n_prompts, dtype=torch.float64))

    def median(self, values: Tensor) -> Estimate:
        """Median of the values that are finite, [b]."""
        finite = values.isfinite()
        if not finite.any():
            return _NOTHING
        ordered, order = values[finite].sort()
        counts = self.draws[:, finite][:, order].cumsum(1)
        # The first value at or above half of a resample.
        at = (counts < counts[:, -1:] / 2).sum(1)
        return self._with_ends(ordered.median(), ordered[at])

    def ratio(self, above: Tensor, below: Tensor) -> Estimate:
        """Σ above / Σ below, [b] each; missing where nothing is below."""
        if not below.sum() > 0:
            return _NOTHING
        return self._with_ends(
            above.sum() / below.sum(), (self.draws @ above) / (self.draws @ below)
        )

    def line(self, x: Tensor, y: Tensor) -> tuple[Estimate, Estimate]:
        """Slope and R² of y on x, [b] each; missing where x does not vary."""
        rounding = ROUNDING_STEPS * torch.finfo(torch.float64).eps * x.abs().max()
        if not (x - x.mean()).abs().max() > rounding:
            return _NOTHING, _NOTHING
        once = slopes_and_r2(x[None], y, torch.ones(1, len(y), dtype=torch.float64))
        pairs = zip(once, slopes_and_r2(x[None], y, self.draws), strict=True)
        slope, r2 = (self._with_ends(value, many[:, 0]) for value, many in pairs)
        return slope, r2

    def kept(self, which: Tensor) -> Resamples:
        """The same resamples of some of the prompts, [b] bool."""
        return Resamples(self.draws[:, which])

    def _with_ends(self, value: Tensor, replicates: Tensor) -> Estimate:
        low, high = percentiles(replicates)
        return float(value), float(low), float(high)


@dataclass(frozen=True)
class _Seen:
    """A model on a set of prompts, untouched.

    Attributes:
        prompts: what it sees.
        prediction: what it says, [b].
        scales: activation of each divisor.
        held: what the stream holds before each.
    """

    prompts: Prompts
    prediction: Tensor
    scales: Mapping[str, Tensor]
    held: Mapping[str, Held]


@dataclass(frozen=True)
class _Derivatives:
    """Derivatives of a model by the spread of its prompts, in float64.

    Attributes:
        elasticity: d log s / d log a² at the query, by divisor, [b] each.
        response: d log V' / d log a² before each divisor, [b] each.
        carried: D, by divisor, [b] each.
        spent: Σ e D over positions, by divisor, [b] each.
        numerators: ∂ŷ/∂ log a² with all divisors held, [b].
        total: dŷ/d log a², [b].
    """

    elasticity: Mapping[str, Tensor]
    response: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]
    spent: Mapping[str, Tensor]
    numerators: Tensor
    total: Tensor


class _Readable:
    """A model with its divisors and the readings of its stream, fitted on prompts of their own."""

    def __init__(self, model: Studied, fitted: Prompts):
        self.model = model
        self.divisors = sites_with(model, "divisor")
        self.streams = {site.name: stream_before(model, site).name for site in self.divisors}
        _, streams = model.run(fitted, reads=set(self.streams.values()))
        by_readout = read_by_readout(model, fitted)
        self.readings = {
            name: Reading.fit(streams[stream], fitted, by_readout)
            for name, stream in self.streams.items()
        }
        self.fitted = self.see(fitted)

    def see(self, prompts: Prompts) -> _Seen:
        """Run it untouched."""
        reads = {*self.streams, *self.streams.values()}
        prediction, found = self.model.run(prompts, reads=reads)
        require_finite("the prediction", prediction)
        held = {name: self.readings[name](found[at]) for name, at in self.streams.items()}
        return _Seen(prompts, prediction.double(), {name: found[name] for name in held}, held)

    def edited(self, prompts: Prompts, scales: Mapping[str, Write]) -> Tensor:
        """Predictions with some divisors written, [b]."""
        prediction, _ = self.model.run(prompts, writes=scales)
        return prediction.double()

    def derivatives(self, seen: _Seen) -> _Derivatives:
        """Central differences in log a², D by autograd."""
        # Shorter than for a smooth function: norms of small activations turn within thousandths.
        step = torch.finfo(self.model.dtype).eps ** 0.4
        ends = [with_spread(seen.prompts, math.exp(t / 2)) for t in (-step, step)]
        low, high = map(self.see, ends)
        before, after = (self.edited(end, seen.scales) for end in ends)
        gradients = self._gradients(seen)

        def slope(first: Tensor, last: Tensor) -> Tensor:
            return (last.double() - first.double()) / (2 * step)

        elasticity, response, carried, spent = {}, {}, {}, {}
        for site in self.divisors:
            name = site.name
            scales = (low.scales[name], high.scales[name])
            elasticity[name] = slope(*(log_at_query(scale, site) for scale in scales))
            response[name] = slope(*(end.held[name].variance.log() for end in (low, high)))
            carried[name] = -_per_prompt(gradients[name] * seen.scales[name])
            spent[name] = -_per_prompt(gradients[name].double() * slope(*scales))
        numerators, total = slope(before, after), slope(low.prediction, high.prediction)
        return _Derivatives(elasticity, response, carried, spent, numerators, total)

    def _gradients(self, seen: _Seen) -> dict[str, Tensor]:
        """∂ŷ/∂s of every divisor, all others held."""
        leaves = {name: scale.clone().requires_grad_() for name, scale in seen.scales.items()}
        with torch.enable_grad():
            prediction, _ = self.model.run(seen.prompts, writes=leaves)
            found = torch.autograd.grad(
                prediction.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        return dict(zip(leaves, found, strict=True))


@torch.no_grad()
def _measured(
    model: Studied, samples: list[Prompts], resampled: Resamples
) -> list[dict[str, Estimate]]:
    """Estimates of every divisor in forward order, then of all together."""
    fitted, own, other = samples
    studied = _Readable(model, fitted)
    a, b = studied.see(own), studied.see(other)
    rates = studied.derivatives(a)
    groups = [(site,) for site in studied.divisors]
    return [_row(studied, group, a, b, rates, resampled) for group in (*groups, studied.divisors)]


def _row(
    studied: _Readable,
    group: tuple[Site, ...],
    a: _Seen,
    b: _Seen,
    rates: _Derivatives,
    resampled: Resamples,
) -> dict[str, Estimate]:
    row: dict[str, Estimate] = dict.fromkeys(MEASURES, _NOTHING)
    names = [site.name for site in group]
    prompts = a.prompts
    if len(group) == 1:
        elasticity, response = rates.elasticity[names[0]], rates.response[names[0]]
        row["elasticity"] = resampled.median(elasticity)
        row["elasticity_held"] = resampled.median(elasticity / response)
        row["held_response"] = resampled.median(response)

    fit = (prompts.target - prompts.y_mean).double()
    carried = torch.stack([rates.carried[name] for name in names]).sum(0)
    row["carried_slope"], row["carried_r2"] = resampled.line(fit, carried)

    spent = torch.stack([rates.spent[name] for name in names]).sum(0)
    row["budget_share"] = resampled.ratio(spent * rates.numerators, rates.numerators.square())
    row |= _balance(rates)

    doses = [
        studied.edited(prompts, {name: f * a.scales[name] for name in names})
        for f in DOSES
        if f != 1
    ]
    doses.insert(DOSES.index(1), a.prediction)
    row["dose_left"] = resampled.median(_dose_left(torch.stack(doses), studied.model.dtype))

    target = prompts.target.double()
    unit = target.var(correction=0).expand_as(target)
    for law in ("held", "v", "constant"):
        after = studied.edited(prompts, _replacements(studied, group, a, law))
        row[f"replaced_{law}"] = resampled.ratio((after - target).square(), unit)
    row["error"] = resampled.ratio((a.prediction - target).square(), unit)

    last = group[-1]
    random = _exchanged(studied, names, a, b) - a.prediction
    own, other = a.held[last.name], b.held[last.name]
    plain = (prompts.x_var.double(), b.prompts.x_var.double())
    held = (own.variance, other.variance)
    for measure, variances in (("v", plain), ("held", held)):
        if all(variance.min() > 0 for variance in variances):
            order = _nearest(*(variance.log() for variance in variances))
            near = _exchanged(studied, names, a, b, order) - a.prediction
            row[f"same_{measure}"] = resampled.ratio(near.square(), random.square())
    pairs = _comparable(*plain) & _comparable(*held)
    row["exchange_pairs"] = _plain(pairs.double().mean())
    if pairs.sum() >= _LEAST_PROMPTS / 2:
        expected = {"exchange": fit * (plain[0] / plain[1] - 1)}
        if not on_stream(studied.model, last):
            expected["exchange_held"] = own.fit * (held[0] / held[1] - 1)
        compared = resampled.kept(pairs)
        for name, move in expected.items():
            row |= _agreement(name, move[pairs], random[pairs], compared)
    return row


def _exchanged(
    studied: _Readable, names: list[str], a: _Seen, b: _Seen, order: Tensor | None = None
) -> Tensor:
    """Predictions for A under divisors of B, in an order of its prompts, [b]."""
    scales = {name: b.scales[name] for name in names}
    if order is not None:
        scales = {name: scale[order] for name, scale in scales.items()}
    return studied.edited(a.prompts, scales)


def _balance(rates: _Derivatives) -> dict[str, Estimate]:
    """What the prediction does under the edit, and by how much the budget is violated."""
    unit = rates.numerators.square().mean().sqrt()
    if not unit > 0:
        return {"budget_left": _NOTHING, "budget_defect": _NOTHING}
    everything = torch.stack(list(rates.spent.values())).sum(0)
    left = rates.total.square().mean().sqrt() / unit
    defect = (rates.total - rates.numerators + everything).abs().max() / unit
    return {"budget_left": _plain(left), "budget_defect": _plain(defect)}


def _dose_left(predictions: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of each prompt's variance over doses [f, b] that a + b / f leaves; NaN without any."""
    inverse = 1 / torch.tensor(DOSES, dtype=torch.float64)[:, None]
    inverse = inverse - inverse.mean()
    moved = predictions - predictions.mean(0)
    whole = moved.square().sum(0)
    explained = (inverse * moved).sum(0).square() / inverse.square().sum()
    rounding = ROUNDING_STEPS * torch.finfo(dtype).eps * predictions.abs().amax()
    return ((whole - explained) / whole).clamp(min=0).where(whole > rounding**2, torch.nan)


def _replacements(
    studied: _Readable, group: tuple[Site, ...], seen: _Seen, law: str
) -> dict[str, Write]:
    """What stands in the place of divisors: κ V' ("held"), κ V ("v") or a constant.

    κ and constants come from the prompts that readings are fitted on. Of several divisors each
    becomes what is nearer to it in log scale, κ V or its constant.
    """
    writes: dict[str, Write] = {}
    for site in group:
        scale = seen.scales[site.name]
        value = pooled_median(studied.fitted.scales[site.name], site)
        if law != "constant":
            kappa, nearer = _proportional(studied.fitted, site, law)
            if nearer or len(group) == 1:
                value = kappa * _along(_variance(seen, site, law), scale)
        writes[site.name] = value.expand_as(scale).to(scale.dtype)
    return writes


def _proportional(seen: _Seen, site: Site, law: str) -> tuple[Tensor, bool]:
    """κ by least squares in log scale, and whether κ V is nearer to the divisor than a constant."""
    log = seen.scales[site.name].double().log()
    ratio = log - _along(_variance(seen, site, law).log(), log)
    middle = pooled_mean(ratio, site)
    around = (log - pooled_mean(log, site)).square().mean()
    return middle.exp(), bool((ratio - middle).square().mean() < around)


def _variance(seen: _Seen, site: Site, law: str) -> Tensor:
    """V' before a divisor, or V, [b]."""
    return seen.held[site.name].variance if law == "held" else seen.prompts.x_var.double()


def _along(values: Tensor, like: Tensor) -> Tensor:
    """A number per prompt [b] with as many axes as `like`."""
    return values.reshape(-1, *(1 for _ in like.shape[1:]))


def _nearest(values: Tensor, pool: Tensor) -> Tensor:
    """Index into `pool` of the nearest neighbour of each value, [b]."""
    ordered, order = pool.sort()
    above = torch.searchsorted(ordered, values).clamp(1, len(pool) - 1)
    below = above - 1
    nearer = (values - ordered[below]).abs() < (ordered[above] - values).abs()
    return order[torch.where(nearer, below, above)]


def _comparable(own: Tensor, other: Tensor) -> Tensor:
    """Pairs whose variances are near enough and large enough for an exchange, [b] bool."""
    floor = torch.cat([own, other]).quantile(FLOOR)
    ratio = own / other
    return (ratio < RATIO) & (ratio > 1 / RATIO) & (torch.minimum(own, other) > floor)


def _agreement(
    name: str, expected: Tensor, change: Tensor, resampled: Resamples
) -> dict[str, Estimate]:
    """How near the change comes to the expected one: about y = x, and about a line of its own."""
    missed, low, high = resampled.ratio((change - expected).square(), expected.square())
    slope, line_r2 = resampled.line(expected, change)
    measures = {"r2": (1 - missed, 1 - high, 1 - low), "slope": slope, "line_r2": line_r2}
    return {f"{name}_{measure}": estimate for measure, estimate in measures.items()}


def _plain(value: Tensor) -> Estimate:
    """A number without an interval."""
    return float(value), float(value), float(value)


def _per_prompt(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).sum(1)


def _require_ledger(
    model: Studied, prompt_config: PromptConfig, n_prompts: int, n_untrained: int
) -> tuple[Site, ...]:
    """The divisors of a model, or why there is no ledger of it."""
    if prompt_config.n_covariates != 1:
        raise ValueError(
            f"division ledger not applicable to {prompt_config.n_covariates} covariates: its "
            f"elasticities, replacements and exchanges are for one V; use n_covariates=1"
        )
    places = sites_with(model, "divisor")
    if not places:
        raise ValueError("not applicable: the model has no divisor, so nothing in it divides")
    if n_prompts < _LEAST_PROMPTS:
        raise ValueError(
            f"n_prompts={n_prompts} is too few for intervals; use {_LEAST_PROMPTS} or more"
        )
    if n_untrained < 1:
        raise ValueError(f"n_untrained={n_untrained} must be at least 1")
    return places
