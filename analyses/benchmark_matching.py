"""Does the matching find what is there, and nothing that is not?

Recovery: closed-form constructions for 1 to 3 covariates are changed by random symmetries, with
and without noise of 1 % on every weight, and aligned back. "signed_permutation" counts a trial if
order and signs are those planted, "gauge" if the rotation of the residual stream is; symmetries
that are nearly singular are left out, since noise drowns what they shrink. False alarms:
untrained models and models with another algorithm, fresh draws, are aligned to a construction and
to the nearest one; at most 1 % of them may be significant at 1 %. With --nulls they are spread over
several null distributions. Cost: CPU seconds of a pair, without its null.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        checkpoint: whose shape the models without a circuit have.
        trials: planted copies per size, level and noise.
        draws: models without a circuit, half of each kind.
        nulls: null distributions they are spread over.
        noise: share of each tensor's root mean square.
    """

    checkpoint: str = "constructed"
    trials: int = Field(30, ge=1)
    draws: int = Field(40, ge=4)
    nulls: int = Field(1, ge=1)
    noise: float = Field(0.01, gt=0)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import time
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import binomtest
from tqdm import tqdm

from models import LinearAttentionTransformer, ModelConfig, closed_form
from probe import align, load_subject
from probe.figures.style import PALETTE, TWO_COLUMNS
from probe.matching.construction_family import ConstructionFamily
from probe.matching.gauge import GaugeMatch, gauge_match, invariants
from probe.matching.null import null_models
from probe.matching.planted import noisy, relabelled, scrambled
from probe.matching.signed_permutation import best_match, parts_of
from probe.report.script import Output, main
from probe.symmetry.weights import Weights, centring, weights_of

LEVELS = ("signed_permutation", "gauge", "functional")
# Wrong optima lie further off than this: two random rotations differ by about sqrt(2).
SAME_ROTATION = 0.25
ALPHAS = (0.01, 0.05)


def run(config: Config) -> Output:
    """Recovery of planted symmetries, then the rate of false alarms."""
    subject = load_subject(config.checkpoint)
    recovered = pd.DataFrame(
        row for p in (1, 2, 3) for row in recovery(p, config.trials, config.noise, config.seed)
    )
    p_values = false_alarms(subject.model, config)
    alarms = alarm_table(p_values)
    figures = {"false_alarms": alarm_figure(p_values)}
    scores = pd.concat(
        [recovered.assign(part="recovery"), alarms.assign(part="false alarms")], ignore_index=True
    )
    notes = ["models without a circuit that are significant, 95 % interval:"]
    notes += [
        f"  at {row.alpha:.0%}, {row.level}, {row.reference}: {row.count} of {row.trials} "
        f"[{row.ci_low:.1%}, {row.ci_high:.1%}]"
        for row in alarms.itertuples()
    ]
    shown = recovered.drop(columns=["covariates", "ci_low", "ci_high"])
    return Output(scores, shown, figures, subject.sha256, tuple(notes), source=subject.source)


def recovery(p: int, trials: int, noise: float, seed: int) -> Iterator[dict]:
    """Planted signed permutations and planted symmetries of all kinds, found again."""
    model = closed_form(20, p, scale=10)
    config, weights = model.cfg, weights_of(model)
    d = config.d_model
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    target = parts_of(weights, config, d, last_only=True)
    outcomes = {False: [], True: []}
    for _ in tqdm(range(trials), desc=f"p={p}, signed permutations", disable=None, leave=False):
        order, signs = rng.permutation(d), rng.choice([1.0, -1.0], d)
        planted = relabelled(weights, config, order, signs, generator)
        for is_noisy, found in outcomes.items():
            copy = noisy(planted, generator, noise) if is_noisy else planted
            start = time.process_time()
            match = best_match(parts_of(copy, config, d, last_only=True), target)
            seconds = time.process_time() - start
            right = (match.order == order).all() and (match.signs == signs).all()
            found.append((right, 1 - match.score, seconds))
    for is_noisy, found in outcomes.items():
        yield recovery_row(p, "signed_permutation", noise * is_noisy, *zip(*found, strict=True))

    reduced = invariants(weights, config, last_only=True)
    clean, changed, seconds = [], [], []
    for _ in tqdm(range(trials), desc=f"p={p}, all symmetries", disable=None, leave=False):
        copy = scrambled(weights, config, generator)
        pair = []
        for one in (copy, noisy(copy, generator, noise)):
            start = time.process_time()
            pair.append(gauge_match([invariants(one, config, True)], [reduced], free_last=True))
            seconds.append(time.process_time() - start)
        clean.append(pair[0])
        changed.append(pair[1])
    distances = [float(match.distance) for match in clean]
    exact = [distance < 1e-8 for distance in distances]
    yield recovery_row(p, "gauge", 0.0, exact, distances, seconds[::2])
    # The copy's map is known where its distance is zero: the symmetry that was planted.
    errors = [rotation_error(*both) for both in zip(changed, clean, strict=True)]
    right = [e < SAME_ROTATION and known for e, known in zip(errors, exact, strict=True)]
    distances = [float(match.distance) for match in changed]
    yield recovery_row(p, "gauge", noise, right, distances, seconds[1::2]) | {
        "largest_error": max(errors)
    }


def rotation_error(found: GaugeMatch, planted: GaugeMatch) -> float:
    """Relative difference of the maps on the complement of 1, where they are rotations."""
    d = found.matrix.shape[-1]
    difference = centring(d) @ (found.matrix[0] - planted.matrix[0])
    return float(difference.norm() / (d - 1) ** 0.5)


def recovery_row(
    p: int, level: str, noise: float, right: list[bool], distances: list[float], seconds: list
) -> dict:
    """One line of the table of recovery."""
    count, trials = int(np.sum(right)), len(right)
    interval = binomtest(count, trials).proportion_ci()
    return {
        "covariates": p,
        "d_model": p + 3,
        "level": level,
        "noise": noise,
        "recovered": count,
        "trials": trials,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "largest_distance": float(np.max(distances)),
        "pair_seconds": float(np.median(seconds)),
    }


def false_alarms(model: LinearAttentionTransformer, config: Config) -> pd.DataFrame:
    """p-values of models that hold no closed form: kind, level, reference, p_value."""
    shape: ModelConfig = model.cfg
    references = {
        "one construction": closed_form(shape.n_context, shape.n_covariates, scale=10),
        "nearest construction": ConstructionFamily.for_model(shape),
    }
    per_kind = -(-config.draws // 2)
    # Beside the seeds of the null distributions.
    generator = torch.Generator().manual_seed(config.seed + config.nulls)
    kinds = null_models(model, per_kind, generator)
    cases: list[tuple[str, int, Weights]] = [
        (kind, index % config.nulls, weights)
        for kind, models in kinds.items()
        for index, weights in enumerate(models)
    ]
    rows = []
    for kind, null, weights in tqdm(
        cases, desc="models without a circuit", disable=None, leave=False
    ):
        learned = model.like(weights)
        for name, reference in references.items():
            for level in LEVELS:
                source = torch.Generator().manual_seed(config.seed + null)
                found = align(learned, reference, level, generator=source)
                rows.append((kind, name, level, found.p_value))
    return pd.DataFrame(rows, columns=["kind", "reference", "level", "p_value"])


def alarm_table(p_values: pd.DataFrame) -> pd.DataFrame:
    """Share of significant models per level and reference, with 95 % intervals."""
    rows = []
    for (reference, level), own in p_values.groupby(["reference", "level"], sort=False):
        for alpha in ALPHAS:
            count = int((own.p_value <= alpha).sum())
            interval = binomtest(count, len(own)).proportion_ci()
            rows.append(
                {
                    "reference": reference,
                    "level": level,
                    "alpha": alpha,
                    "count": count,
                    "trials": len(own),
                    "ci_low": interval.low,
                    "ci_high": interval.high,
                }
            )
    return pd.DataFrame(rows)


def alarm_figure(p_values: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Share of models at or below each p-value; on or under the diagonal is honest."""
    references = list(p_values.reference.unique())
    figure, axes = plt.subplots(
        1, len(references), figsize=(TWO_COLUMNS, 2.6), sharey=True, squeeze=False
    )
    for ax, reference in zip(axes[0], references, strict=True):
        for color, level in zip(PALETTE, LEVELS, strict=False):
            own = p_values[(p_values.reference == reference) & (p_values.level == level)]
            values = np.sort(own.p_value)
            shares = np.arange(1, len(values) + 1) / len(values)
            ax.step(values, shares, where="post", color=color, label=level)
        ax.plot([0, 1], [0, 1], color="0.6", lw=0.8, ls=":")
        ax.set(title=reference, xlabel="p-value")
    axes[0][0].set_ylabel("share of models without a circuit")
    axes[0][-1].legend(frameon=False, loc="upper left")
    return figure, p_values


if __name__ == "__main__":
    main("benchmark_matching", Config, run, __doc__)
