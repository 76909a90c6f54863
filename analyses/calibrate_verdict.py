"""Set the thresholds of the verdict on models whose algorithm is known, and report how it does.

Every oracle of `probe.oracles` is measured once. Thresholds are fitted on the even ones and
written to probe/thresholds.py; the confusion matrix is given for both halves. Trained models take
no part. With --fit False the thresholds in force are reported and stay.
"""

import dataclasses
import pprint
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from matplotlib import pyplot as plt
from pydantic import Field

import probe.thresholds
from probe.figures import TWO_COLUMNS
from probe.findings import FLOOR, Findings, gather
from probe.oracles import Oracle, oracles
from probe.reporting import Output, ScriptConfig, main
from probe.thresholds import THRESHOLDS
from probe.verdict import (
    ALGORITHMS,
    DESCENT,
    KINDS,
    LEAST_SQUARES,
    NEWTON,
    NORMALIZATION,
    OTHER,
    OTHER_MECHANISM,
    RIDGE,
    TRIVIAL,
    UNDECIDED,
    decide,
)
from probe.verdict_figures import confusion_heatmap

TABLE = Path(probe.thresholds.__file__)
HALVES = ("calibration", "held out")
GUARD = 0.1
# Name in `Findings.best` of what deserves each verdict.
ALGORITHM = {NORMALIZATION: LEAST_SQUARES, OTHER_MECHANISM: LEAST_SQUARES}
ALGORITHM |= {kind: kind for kind in (DESCENT, NEWTON, RIDGE)}

Case = tuple[Oracle, Findings]


class Config(ScriptConfig):
    """Settings of the calibration.

    Attributes:
        n_prompts: prompts per condition.
        every: measure every so many-th oracle only.
        jobs: processes.
        fit: whether to fit thresholds.
        table: file of thresholds to write; the one the verdict reads by default.
    """

    n_prompts: int = Field(256, ge=64)
    every: int = Field(1, ge=1)
    jobs: int = 2
    fit: bool = True
    table: Path | None = None


def run(config: Config) -> Output:
    """Measure all oracles, fit thresholds on one half, judge both."""
    chosen = oracles(config.seed)[:: config.every]
    findings = Parallel(n_jobs=config.jobs)(
        delayed(measure)(config.seed, index * config.every, config.n_prompts)
        for index in range(len(chosen))
    )
    cases = list(zip(chosen, findings, strict=True))
    thresholds = THRESHOLDS
    if config.fit:
        thresholds = fit(cases[::2])
        rewrite(config.table or TABLE, thresholds)
    scores = pd.DataFrame([judge(case, thresholds) for case in cases])
    scores.insert(0, "half", [HALVES[i % 2] for i in range(len(cases))])
    figure, axes = plt.subplots(2, 1, figsize=(TWO_COLUMNS, 6.5))
    for ax, half in zip(axes, HALVES, strict=True):
        confusion_heatmap(confusion(scores[scores.half == half]), ax)
        ax.set_title(half)
    counts = confusion(scores)
    shown = counts.rename_axis("known answer").reset_index()
    data = counts.stack().rename("count").rename_axis(["known answer", "verdict"]).reset_index()
    facts = {"thresholds": thresholds, "summary": summary(scores)}
    notes = tuple(f"{half}: {text}" for half, text in facts["summary"].items())
    return Output(scores, shown, {"confusion": (figure, data)}, {}, notes, facts)


def measure(seed: int, index: int, n_prompts: int) -> Findings:
    """Findings on one oracle, which is made here: recipes do not travel between processes."""
    torch.set_num_threads(1)
    oracle = oracles(seed)[index]
    generator = torch.Generator().manual_seed(index)
    findings = gather(oracle.build(), oracle.prompts, n_prompts, generator, thorough=False)
    # The long table of hundreds of models would fill the memory, and no decision reads it.
    return dataclasses.replace(findings, evidence=findings.evidence.iloc[:0])


def judge(case: Case, thresholds: dict) -> dict:
    """The verdict on one oracle, beside what it deserves."""
    oracle, findings = case
    decision = decide(findings, thresholds)
    best = findings.best.set_index("algorithm")
    named = decision.named
    return {
        "oracle": oracle.name,
        "group": oracle.group,
        "known": oracle.kind,
        "verdict": decision.kind,
        "right": decision.kind == oracle.kind,
        "known_k": oracle.k,
        "k": named.k if oracle.k and decision.kind == oracle.kind else None,
        "distance": named.distance,
        **{f"score: {name}": score for name, score in best.score.items()},
        "division_r2": findings.division_r2,
        "division_slope": findings.division_slope,
    }


def confusion(scores: pd.DataFrame) -> pd.DataFrame:
    """Counts by known answer (rows) and verdict (columns)."""
    table = pd.crosstab(scores.known, scores.verdict)
    rows = [kind for kind in KINDS if kind in table.index]
    return table.reindex(index=rows, columns=list(KINDS), fill_value=0)


def summary(scores: pd.DataFrame) -> dict[str, str]:
    """How each half fared, in words."""
    result = {}
    for half, own in scores.groupby("half"):
        false = ((own.verdict == NORMALIZATION) & (own.known != NORMALIZATION)).sum()
        undecided = (own.verdict == UNDECIDED).sum()
        steps = own[own.k.notna()]
        result[half] = (
            f"{own.right.sum()} of {len(own)} right ({own.right.mean():.1%}), {undecided} "
            f"undecided, {len(own) - own.right.sum() - undecided} wrong, {false} wrongly "
            f"'{NORMALIZATION}'; k right in {(steps.k == steps.known_k).sum()} of {len(steps)}"
        )
    return result


def fit(cases: list[Case]) -> dict:
    """Thresholds that separate the known answers with room on both sides.

    Raises:
        ValueError: if a kind of oracle is missing.
    """
    missing = set(KINDS) - {UNDECIDED} - {oracle.kind for oracle, _ in cases}
    if missing:
        raise ValueError(f"no oracle for {', '.join(sorted(missing))}; use a smaller --every")
    tables = [(oracle.kind, findings.best.set_index("algorithm")) for oracle, findings in cases]
    own = pd.DataFrame([best.loc[ALGORITHM[kind]] for kind, best in tables if kind != OTHER])
    # Constant and mean predictions have rivals of their own, which flexible ones can imitate.
    nearest = pd.DataFrame(
        [
            best.loc[list(ALGORITHMS)].sort_values("score").iloc[0]
            for kind, best in tables
            if kind == OTHER
            and best.score[list(TRIVIAL)].min() > best.score[list(ALGORITHMS)].min() + GUARD
        ]
    )
    distance = between(np.log10(own.distance.clip(FLOOR)), np.log10(nearest.distance))
    # Scores need to exclude only what distances leave; a score of 0 explains nothing.
    left = nearest[np.log10(nearest.distance) < distance[1]]
    short, leads, margins = [], [], []
    for kind, best in tables:
        if kind == OTHER:
            continue
        scores = best.score[list(ALGORITHMS)]
        score = scores[ALGORITHM[kind]]
        if ALGORITHM[kind] == LEAST_SQUARES:
            short.append(score - scores.min())
            margins.append(scores[DESCENT] - score)
        else:
            leads.append(scores[LEAST_SQUARES] - score)
            margins.append(scores.drop(ALGORITHM[kind]).min() - score)
    division = pd.DataFrame(
        [(oracle.kind, f.division_r2, f.division_slope) for oracle, f in cases],
        columns=["kind", "r2", "slope"],
    ).dropna()
    in_force = division[division.kind == NORMALIZATION]
    # Ridge written into weights divides by layer norm as well.
    absent = division[~division.kind.isin([NORMALIZATION, RIDGE])]
    return {
        "distance": tuple(float(f"{10**value:.3g}") for value in distance),
        "score": between(own.score, [*left.score, 0.0]),
        "lead": round(float(max(short) + min(leads)) / 2, 3),
        # Half the smallest margin seen: room for models less exact than the oracles.
        "margin": round(float(max(min(margins), 0)) / 2, 3),
        "division_r2": between(absent.r2, in_force.r2),
        "division_slope": round(float(in_force.slope.min()) / 2, 3),
        "coincide": THRESHOLDS["coincide"],
    }


def between(low: Iterable[float], high: Iterable[float]) -> tuple[float, float]:
    """Thirds of the gap between the largest of `low` and the smallest of `high`.

    Where they overlap, nothing is certain from GUARD below the overlap to GUARD above it.
    """
    bottom, top = float(np.max(list(low))), float(np.min(list(high)))
    if bottom >= top:
        return round(top - GUARD, 3), round(bottom + GUARD, 3)
    third = (top - bottom) / 3
    return round(bottom + third, 3), round(top - third, 3)


def rewrite(path: Path, thresholds: dict) -> None:
    """Replace the literal in a thresholds file; its docstring stays."""
    literal = "THRESHOLDS = " + pprint.pformat(thresholds, sort_dicts=False, width=60)
    literal = literal.replace("{'", "{\n    '", 1).replace("\n '", "\n    '")
    literal = literal.replace("'", '"').replace("}", ",\n}")
    text = TABLE.read_text()
    path.write_text(re.sub(r"THRESHOLDS = \{.*\n\}\n", literal + "\n", text, flags=re.DOTALL))


if __name__ == "__main__":
    main("calibrate_verdict", Config, run, __doc__)
