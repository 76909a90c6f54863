"""Which algorithm is it?

`identify` gathers findings (`probe.verdict.findings`) and decides (`decide`):

1. The *score* of an algorithm is log10 of its distance to the model, one half in distribution
   and one half averaged over the shifts. Least squares is the limit of Newton and gradient
   descent (k → ∞) and of ridge (λ → 0), which can therefore always come close to it. An algorithm
   that has a limit is named only where it beats that by `lead` decades.
2. The named algorithm must describe the model, by a score low enough; lower where only behaviour
   is seen, since any function may stand behind it. Where no algorithm describes the model,
   the answer is "other", or "undecided" if layer norm divides all the same (step 4).
3. It must beat the others by `margin` decades, or they cannot be told apart: "undecided".
   Algorithms which become their limit fast, as Newton and ridge do, do not count against that
   limit: step 1 has settled them (`Algorithm.rivals_limit`).
4. Least squares is "by normalization" if the division test is in force at some layer, for the
   samples or for the residuals that a step of gradient descent leaves in the stream (several
   covariates: or if the pivot test spells out a procedure), and of "other mechanism" if neither is
   or none applies.

Thresholds: `probe.verdict.thresholds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from probe.rivals.registry import compared
from probe.verdict.findings import Findings
from probe.verdict.kinds import LEAST_SQUARES, NORMALIZATION, OTHER, OTHER_MECHANISM, UNDECIDED
from probe.verdict.words import describes, limits, nearest, rival_name, sentence


@dataclass(frozen=True)
class Decision:
    """Which kind of verdict, and why.

    Attributes:
        kind: one of `KINDS`.
        named: the row of `Findings.best` that the decision is about: the nearest one, or its limit.
        reasons: what speaks for the kind, in sentences.
        objections: what speaks against it or limits it.
    """

    kind: str
    named: pd.Series
    reasons: tuple[str, ...]
    objections: tuple[str, ...]


def decide(findings: Findings, thresholds: Mapping[str, Any]) -> Decision:
    """Apply the rules above to findings."""
    known = compared()
    best = findings.best.set_index("algorithm", drop=False)
    scores = best.score[[name for name, algorithm in known.items() if not algorithm.trivial]]
    trivial = best.loc[best.score[[n for n, a in known.items() if a.trivial]].idxmin()]
    top = named = best.loc[scores.idxmin()]
    limit = known[top.algorithm].limit
    if limit is not None and scores[limit.name] - top.score < thresholds["lead"]:
        named = best.loc[limit.name]
    described, excluded = thresholds["score"]
    if named.score >= excluded:
        reasons = (*nearest(top, named, thresholds["lead"]), "None describes it.")
        kind, mechanism = _mechanism(findings, thresholds)
        if kind == NORMALIZATION:
            return Decision(UNDECIDED, named, (*reasons, f"And yet: {mechanism}"), ())
        return Decision(OTHER, named, reasons, ())
    if trivial.score <= named.score + thresholds["margin"]:
        return Decision(OTHER, trivial, (f"It predicts the {trivial.algorithm}.",), ())
    worst = f"At worst, {named.worst_condition}, it leaves {named.worst:.1e}."
    reasons = (describes(named), worst)
    if named.score > (described if findings.sites else thresholds["alone"]):
        why = "That is neither close enough to name it nor far enough to rule it out."
        if not findings.sites:
            why += " Only behaviour was seen, and other estimators come as close."
        return Decision(UNDECIDED, named, (*reasons, why), ())

    settled = [
        name
        for name, algorithm in known.items()
        if algorithm.limit == known[named.algorithm] and not algorithm.rivals_limit
    ]
    runner_up = best.loc[scores.drop([named.algorithm, *settled]).idxmin()]
    gap = runner_up.score - named.score
    pair = frozenset((named.algorithm, runner_up.algorithm))
    if gap < thresholds["margin"]:
        why = sentence(
            f"{rival_name(runner_up)} comes as close (within {gap:.2f} decades; the two rivals "
            f"differ by {findings.apart[pair]:.1e}): they cannot be told apart on these prompts"
        )
        return Decision(UNDECIDED, named, (*reasons, why), ())
    ahead = f"The next, {rival_name(runner_up)}, is {gap:.1f} decades further away."
    objections = limits(named, best, findings, thresholds)
    if named.algorithm != LEAST_SQUARES:
        return Decision(named.algorithm, named, (*reasons, ahead), objections)
    kind, mechanism = _mechanism(findings, thresholds)
    return Decision(kind, named, (*reasons, ahead, mechanism), objections)


def _mechanism(findings: Findings, thresholds: Mapping[str, Any]) -> tuple[str, str]:
    """Kind of a closed form, and why."""
    if findings.procedure:
        found = f"The divisors of its layer norms, and what is divided, are {findings.procedure}"
        return NORMALIZATION, f"{found} (pivot test)."
    division, residual = findings.division, findings.residual
    if division is None:
        return OTHER_MECHANISM, f"The division test is {findings.not_applicable['division']}."
    absent, in_force = thresholds["division_r2"]
    found = (
        f"Exchanging the layer-norm scale at {division.where} moves predictions as a "
        f"division by the variance would with R² {division.value:.2f}, slope {division.slope:.2f}"
    )
    if division.value >= in_force and division.slope >= thresholds["division_slope"]:
        return NORMALIZATION, f"{found}: layer norm does the division."
    if residual is not None:
        found += (
            f"; at {residual.where}, as a division by the variance of the x that the stream holds "
            f"there, with R² {residual.value:.2f}, slope {residual.slope:.2f}"
        )
        if (
            residual.value >= thresholds["residual_r2"][1]
            and residual.slope >= thresholds["residual_slope"]
            and residual.share >= thresholds["share"]
        ):
            return NORMALIZATION, (
                f"{found}: layers before have fitted a part, as a step of gradient descent does, "
                f"and layer norm does the division for what is left, {residual.share:.0%} of the "
                f"fit."
            )
    if division.value <= absent and (
        residual is None or residual.value <= thresholds["residual_r2"][0]
    ):
        return OTHER_MECHANISM, f"{found}: layer norm does not divide by it."
    return UNDECIDED, f"{found}: too little to say that layer norm divides, too much to deny it."
