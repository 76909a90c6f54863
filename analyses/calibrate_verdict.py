"""Set the thresholds of the verdict on models whose algorithm is known, and report how it does.

Every oracle of `probe.verdict.oracles` is measured once. Thresholds are fitted on the even ones;
the confusion matrix is given for both halves. Trained models take no part. The verdict goes by
probe/verdict/thresholds.py, which --write-thresholds replaces by the thresholds fitted. With
--no-fit the thresholds in force are judged instead, on oracles that had no part in them: give a
--seed other than 0.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the calibration.

    Attributes:
        checkpoint: judged with the thresholds in force at the end; takes no part in them.
        n_prompts: prompts per condition.
        every: measure every so many-th oracle only.
        jobs: processes.
        fit: whether to fit thresholds.
        write_thresholds: whether to write the thresholds fitted to `table`.
        table: file of thresholds to write; the one the verdict reads by default.
    """

    n_prompts: int = Field(256, ge=64)
    every: int = Field(1, ge=1)
    jobs: int = 2
    fit: bool = True
    write_thresholds: bool = False
    table: Path | None = None

    @model_validator(mode="after")
    def _require_something_to_write(self) -> Self:
        if self.write_thresholds and not self.fit:
            raise ValueError(
                "write_thresholds=True with fit=False: there are no fitted thresholds to write; "
                "leave out one of --write-thresholds and --no-fit"
            )
        if self.table is not None and not self.write_thresholds:
            raise ValueError(
                f"table={self.table} is written on request only; add --write-thresholds"
            )
        if self.table is not None and not self.table.parent.is_dir():
            raise ValueError(f"table={self.table}: there is no folder {self.table.parent}; make it")
        return self


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import dataclasses
import pprint
import re
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from joblib import delayed
from matplotlib import pyplot as plt

import probe.verdict.thresholds
from probe import load_subject
from probe.figures.style import TWO_COLUMNS
from probe.figures.verdict import confusion_heatmap
from probe.report.script import Output, in_parallel, main
from probe.rivals.registry import compared
from probe.verdict.decision import decide
from probe.verdict.findings import Findings, gather
from probe.verdict.kinds import (
    KINDS,
    LEAST_SQUARES,
    NORMALIZATION,
    OTHER,
    OTHER_MECHANISM,
    RIDGE,
    UNDECIDED,
)
from probe.verdict.oracles import AFTER_GRADIENT_STEPS, Oracle, oracles
from probe.verdict.thresholds import THRESHOLDS

TABLE = Path(probe.verdict.thresholds.__file__)
# Which oracles took part in fitting; with --no-fit none of them did.
HALVES, FRESH = ("calibration", "held out"), "fresh"
GUARD = 0.1
# Names in `Findings.best` of what may be named, and of what deserves each verdict.
ALGORITHMS = [name for name, algorithm in compared().items() if not algorithm.trivial]
TRIVIAL = [name for name, algorithm in compared().items() if algorithm.trivial]
ALGORITHM = {name: name for name in ALGORITHMS}
ALGORITHM |= {NORMALIZATION: LEAST_SQUARES, OTHER_MECHANISM: LEAST_SQUARES}

Case = tuple[Oracle, Findings]


def run(config: Config) -> Output:
    """Measure all oracles, fit thresholds on one half, judge both."""
    chosen = oracles(config.seed)[:: config.every]
    calls = [
        delayed(measure)(config.seed, index * config.every, config.n_prompts)
        for index in range(len(chosen))
    ]
    findings = in_parallel(calls, config.jobs, "oracles")
    cases = list(zip(chosen, findings, strict=True))
    scores = pd.DataFrame([measured(case) for case in cases])
    scores.insert(0, "half", [HALVES[i % 2] if config.fit else FRESH for i in range(len(cases))])
    thresholds = THRESHOLDS
    if config.fit:
        thresholds = fit(scores[scores.half == HALVES[0]])
    verdicts = pd.DataFrame([judge(case, thresholds) for case in cases])
    scores = pd.concat([scores, verdicts], axis=1)
    halves = scores.half.unique()
    figure, axes = plt.subplots(
        len(halves), 1, figsize=(TWO_COLUMNS, 3.25 * len(halves)), squeeze=False
    )
    for ax, half in zip(axes[:, 0], halves, strict=True):
        confusion_heatmap(confusion(scores[scores.half == half]), ax)
        ax.set_title(half)
    counts = confusion(scores)
    shown = counts.rename_axis("known answer").reset_index()
    data = counts.stack().rename("count").rename_axis(["known answer", "verdict"]).reset_index()
    facts = {"thresholds": thresholds, "summary": summary(scores)}
    notes = [f"{half}: {text}" for half, text in facts["summary"].items()]
    subject = load_subject(config.checkpoint)
    generator = torch.Generator().manual_seed(config.seed)
    found = gather(subject.model, subject.prompts, config.n_prompts, generator, thorough=False)
    notes.append(f"{subject.name}: {decide(found, thresholds).kind}")
    if config.write_thresholds:
        table = config.table or TABLE
        rewrite(table, thresholds)
        notes.append(f"wrote {table}")
    figures = {"confusion": (figure, data)}
    return Output(
        scores, shown, figures, subject.sha256, tuple(notes), facts, source=subject.source
    )


def measure(seed: int, index: int, n_prompts: int) -> Findings:
    """Findings on one oracle, which is made here: recipes do not travel between processes."""
    torch.set_num_threads(1)
    oracle = oracles(seed)[index]
    generator = torch.Generator().manual_seed(index)
    findings = gather(oracle.build(), oracle.prompts, n_prompts, generator, thorough=False)
    # The long table of hundreds of models would fill the memory, and no decision reads it.
    return dataclasses.replace(findings, evidence=findings.evidence.iloc[:0])


def measured(case: Case) -> dict:
    """What thresholds are fitted on, as one row."""
    oracle, findings = case
    best = findings.best.set_index("algorithm")
    return {
        "oracle": oracle.name,
        "group": oracle.group,
        "known": oracle.kind,
        "known_k": oracle.k,
        "sites": findings.sites,
        **{f"score: {name}": score for name, score in best.score.items()},
        **findings.numbers,
    }


def judge(case: Case, thresholds: dict) -> dict:
    """The verdict on one oracle, beside what it deserves."""
    oracle, findings = case
    decision = decide(findings, thresholds)
    right = decision.kind == oracle.kind
    k = decision.named.k if oracle.k and right else None
    return {"verdict": decision.kind, "right": right, "k": k, "distance": decision.named.distance}


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


def fit(scores: pd.DataFrame) -> dict:
    """Thresholds that separate the known answers with room on both sides.

    Args:
        scores: rows of `measured`.

    Raises:
        ValueError: if a kind of oracle is missing.
    """
    missing = set(KINDS) - {UNDECIDED} - set(scores.known)
    if missing:
        raise ValueError(f"no oracle for {', '.join(sorted(missing))}; use a smaller --every")
    rivals = scores[[f"score: {name}" for name in ALGORITHMS]].set_axis(ALGORITHMS, axis=1)
    nearest = rivals.min(axis=1)
    # Constant and mean predictions have rivals of their own, which flexible ones can imitate.
    trivial = scores[[f"score: {name}" for name in TRIVIAL]].min(axis=1)
    unknown = nearest[(scores.known == OTHER) & (trivial > nearest + GUARD)]

    # Functions stand for what a network might compute, and bound its score as well.
    outside = nearest[unknown.index][~scores.sites[unknown.index]]

    named = rivals[scores.known != OTHER]
    names = scores.known.map(ALGORITHM)[named.index]
    is_own = names.to_numpy()[:, None] == np.array(ALGORITHMS)
    own, others = named.where(is_own).max(axis=1), named.mask(is_own)
    closed = names == LEAST_SQUARES
    to_closed = [name for name in ALGORITHMS if _goes_to(name, LEAST_SQUARES)]
    short = (own - others[to_closed].min(axis=1))[closed]
    ahead = (named[LEAST_SQUARES] - own)[names.isin(to_closed)]
    # Newton and ridge do not count against least squares, their limit.
    settled = [name for name in to_closed if not compared()[name].rivals_limit]
    margins = others.drop(columns=settled).min(axis=1).where(closed, others.min(axis=1)) - own

    divides = scores[scores.known == NORMALIZATION]
    # After a gradient step layer norm divides by what is left, and not by V.
    at_once = divides[divides.group != AFTER_GRADIENT_STEPS]
    residual = divides.dropna(subset="residual_r2")
    # Ridge written into weights divides by layer norm as well.
    absent = scores[~scores.known.isin([NORMALIZATION, RIDGE])].dropna(subset="division_r2")
    return {
        "score": between(own, unknown),
        "alone": round(sum(gap(own[~scores.sites[own.index]], outside)) / 2, 3),
        "lead": round(float(short.max() + ahead.min()) / 2, 3),
        # Half the smallest margin seen: room for models less exact than the oracles.
        "margin": round(float(max(margins.min(), 0)) / 2, 3),
        "division_r2": between(absent.division_r2, at_once.division_r2),
        "division_slope": round(float(at_once.division_slope.min()) / 2, 3),
        "residual_r2": between(absent.residual_r2.dropna(), residual.residual_r2),
        "residual_slope": round(float(residual.residual_slope.min()) / 2, 3),
        "share": THRESHOLDS["share"],
        "coincide": THRESHOLDS["coincide"],
    }


def _goes_to(name: str, limit: str) -> bool:
    """Whether an algorithm has this limit."""
    own = compared()[name].limit
    return own is not None and own.name == limit


def between(low: Iterable[float], high: Iterable[float]) -> tuple[float, float]:
    """Thirds of the gap in which `low` and `high` are best kept apart."""
    bottom, top = gap(low, high)
    third = (top - bottom) / 3
    return round(float(bottom + third), 3), round(float(top - third), 3)


def gap(low: Iterable[float], high: Iterable[float]) -> tuple[float, float]:
    """The gap with the fewest values of either on the wrong side, and the widest of those."""
    low, high = np.sort(list(low)), np.sort(list(high))
    edges = np.unique(np.concatenate([low, high]))
    gaps = [((low > a).sum() + (high < b).sum(), a - b, a, b) for a, b in pairwise(edges)]
    _, _, bottom, top = min(gaps)
    return float(bottom), float(top)


def rewrite(path: Path, thresholds: dict) -> None:
    """Replace the literal in a thresholds file; its docstring stays."""
    literal = "THRESHOLDS = " + pprint.pformat(thresholds, sort_dicts=False, width=60)
    literal = literal.replace("{'", "{\n    '", 1).replace("\n '", "\n    '")
    literal = literal.replace("'", '"').replace("}", ",\n}")
    text = TABLE.read_text()
    path.write_text(re.sub(r"THRESHOLDS = \{.*\n\}\n", literal + "\n", text, flags=re.DOTALL))


if __name__ == "__main__":
    main("calibrate_verdict", Config, run, __doc__)
