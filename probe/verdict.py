"""Which algorithm is it?

`identify` gathers findings (`probe.findings`) and decides (`decide`):

1. The *score* of an algorithm is log10 of its distance to the model, one half in distribution
   and one half averaged over the shifts. Least squares is the limit of Newton and gradient
   descent (k → ∞) and of ridge (λ → 0), which can therefore always come close to it: one of them
   is named only where it beats least squares by `lead` decades.
2. The named algorithm must describe the model, by a score low enough; lower where only behaviour
   is seen, since any function may stand behind it. Where no algorithm describes the model,
   the answer is "other", or "undecided" if layer norm divides all the same (step 4).
3. It must beat the others by `margin` decades, or they cannot be told apart: "undecided".
   Newton and ridge do not count against least squares: step 1 has settled them.
4. Least squares is "by normalization" if the division test is in force at some layer, for the
   samples or for the residuals that a step of gradient descent leaves in the stream (several
   covariates: or if the pivot test spells out a procedure), and of "other mechanism" if neither is
   or none applies.

Thresholds: `probe.thresholds`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from models.config import PromptConfig
from probe.findings import Findings, gather
from probe.mechanism import ALIGNMENT, ALIGNMENT_P, PROBE
from probe.thresholds import THRESHOLDS

NORMALIZATION = "closed form by normalization"
OTHER_MECHANISM = "closed form, other mechanism"
DESCENT, NEWTON, RIDGE = "gradient descent", "Newton", "ridge"
OTHER, UNDECIDED = "other", "undecided"
KINDS = (NORMALIZATION, OTHER_MECHANISM, DESCENT, NEWTON, RIDGE, OTHER, UNDECIDED)

LEAST_SQUARES = "least squares"
ALGORITHMS = (LEAST_SQUARES, NEWTON, RIDGE, DESCENT)
TRIVIAL = ("context mean", "zero")
_FEWEST_PROMPTS = 64


@dataclass(frozen=True)
class Decision:
    """Which kind of verdict, and why.

    Attributes:
        kind: one of `KINDS`.
        named: the row of `Findings.best` that comes nearest.
        reasons: what speaks for the kind, in sentences.
        objections: what speaks against it or limits it.
    """

    kind: str
    named: pd.Series
    reasons: tuple[str, ...]
    objections: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The answer, and what speaks for and against it.

    Attributes:
        decision: the kind, with reasons and objections.
        findings: the numbers the decision rests on.
    """

    decision: Decision
    findings: Findings

    @property
    def kind(self) -> str:
        """The answer without k or λ, one of `KINDS`."""
        return self.decision.kind

    @property
    def k(self) -> int | None:
        """Number of steps of gradient descent or Newton."""
        return int(self.decision.named.k) if self.kind in (DESCENT, NEWTON) else None

    @property
    def penalty(self) -> float | None:
        """λ of ridge, added to the mean of squares."""
        return self.decision.named.parameters["lambda"] if self.kind == RIDGE else None

    @property
    def label(self) -> str:
        """The answer, such as "gradient descent (3)".

        For several covariates a closed form by normalization is named by its procedure, such as
        "elimination (x1, x2)" or "closed form by determinant", where the pivots spell one out.
        """
        if self.kind == NORMALIZATION and self.findings.procedure:
            return self.findings.procedure
        if self.k is not None:
            return f"{self.kind} ({self.k})"
        return f"{self.kind} ({self.penalty:.3g})" if self.penalty is not None else self.kind

    @property
    def evidence(self) -> pd.DataFrame:
        """All measurements: measure, condition, family, k, query_row, value, ci_low, ci_high,
        n_prompts.
        """
        return self.findings.evidence

    @property
    def words(self) -> str:
        """The verdict as a paragraph."""
        support = _support(self.evidence) if self.kind == NORMALIZATION else ()
        text = " ".join([f"Verdict: {self.label}.", *self.decision.reasons, *support])
        against = " ".join(self.decision.objections)
        return f"{text} Against it: {against}" if against else text

    def to_dict(self) -> dict[str, Any]:
        """JSON values: everything but the long table."""
        return {
            "label": self.label,
            "kind": self.kind,
            "procedure": self.findings.procedure,
            "k": self.k,
            "lambda": self.penalty,
            "reasons": list(self.decision.reasons),
            "objections": list(self.decision.objections),
            "algorithms": self.findings.best.to_dict(orient="records"),
            "division_r2": self.findings.division_r2,
            "division_slope": self.findings.division_slope,
            "residual_r2": self.findings.residual_r2,
            "residual_slope": self.findings.residual_slope,
            "residual_share": self.findings.residual_share,
            "thresholds": dict(THRESHOLDS),
        }


def identify(
    model: Callable[[Tensor], Tensor],
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 512,
    only_conditions: Collection[str] | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Name the algorithm a model runs on a distribution of prompts.

    Args:
        model: a `LinearAttentionTransformer`, another `torch.nn.Module`, or a callable from
            inputs [batch, N+1, 2+p] to predictions [batch]. Without sites that the toolkit
            knows the verdict rests on behaviour alone.
        prompt_config: distribution to judge it on, usually the model's training distribution.
        n_prompts: prompts per condition; half as many fit the rivals.
        only_conditions: names of conditions (`probe.behaviour.conditions`) to compare on besides
            "in distribution"; all by default, none if empty.
        generator: source of all randomness; seeded with 0 by default.

    Raises:
        TypeError: if the model cannot be called.
        ValueError: on another device, predictions that are NaN, constant, of the wrong shape or
            different on a second call, an unknown condition, or too few prompts.
    """
    if n_prompts < _FEWEST_PROMPTS:
        raise ValueError(
            f"n_prompts={n_prompts} is too few to fit the rivals; use at least {_FEWEST_PROMPTS}"
        )
    generator = generator or torch.Generator().manual_seed(0)
    findings = gather(model, prompt_config, n_prompts, generator, only_conditions)
    return Verdict(decide(findings, THRESHOLDS), findings)


def decide(findings: Findings, thresholds: Mapping[str, Any]) -> Decision:
    """Apply the rules above to findings."""
    best = findings.best.set_index("algorithm", drop=False)
    scores = best.score[list(ALGORITHMS)]
    top = scores.idxmin()
    lead = scores[LEAST_SQUARES] - scores[top]
    named = best.loc[top if lead >= thresholds["lead"] else LEAST_SQUARES]
    trivial = best.loc[best.score[list(TRIVIAL)].idxmin()]
    described, excluded = thresholds["score"]
    if named.score >= excluded:
        reasons = (_describes(named, nearest=True), "None describes it.")
        kind, mechanism = _mechanism(findings, thresholds)
        if kind == NORMALIZATION:
            return Decision(UNDECIDED, named, (*reasons, f"And yet: {mechanism}"), ())
        return Decision(OTHER, named, reasons, ())
    if trivial.score <= named.score + thresholds["margin"]:
        return Decision(OTHER, trivial, (f"It predicts the {trivial.algorithm}.",), ())
    worst = f"At worst, {named.worst_condition}, it leaves {named.worst:.1e}."
    reasons = (_describes(named), worst)
    if named.score > (described if findings.sites else thresholds["alone"]):
        why = "That is neither close enough to name it nor far enough to rule it out."
        if not findings.sites:
            why += " Only behaviour was seen, and other estimators come as close."
        return Decision(UNDECIDED, named, (*reasons, why), ())

    rivals = [a for a in ALGORITHMS if a != named.algorithm]
    counted = [DESCENT] if named.algorithm == LEAST_SQUARES else rivals
    runner_up = best.loc[scores[counted].idxmin()]
    gap = runner_up.score - named.score
    pair = frozenset((named.algorithm, runner_up.algorithm))
    if gap < thresholds["margin"]:
        why = _sentence(
            f"{_name(runner_up)} comes as close (within {gap:.2f} decades; the two rivals differ "
            f"by {findings.apart[pair]:.1e}): they cannot be told apart on these prompts"
        )
        return Decision(UNDECIDED, named, (*reasons, why), ())
    ahead = f"The next, {_name(runner_up)}, is {gap:.1f} decades further away."
    objections = _limits(named, best, findings, thresholds)
    if named.algorithm != LEAST_SQUARES:
        return Decision(named.algorithm, named, (*reasons, ahead), objections)
    kind, mechanism = _mechanism(findings, thresholds)
    return Decision(kind, named, (*reasons, ahead, mechanism), objections)


def _mechanism(findings: Findings, thresholds: Mapping[str, Any]) -> tuple[str, str]:
    """Kind of a closed form, and why."""
    if findings.procedure:
        found = f"The divisors of its layer norms, and what is divided, are {findings.procedure}"
        return NORMALIZATION, f"{found} (pivot test)."
    r2, slope = findings.division_r2, findings.division_slope
    if r2 is None:
        return OTHER_MECHANISM, f"The division test is {findings.not_applicable}."
    absent, in_force = thresholds["division_r2"]
    found = (
        f"Exchanging the layer-norm scale at {findings.division_layer} moves predictions as a "
        f"division by the variance would with R² {r2:.2f}, slope {slope:.2f}"
    )
    if r2 >= in_force and slope >= thresholds["division_slope"]:
        return NORMALIZATION, f"{found}: layer norm does the division."
    residual = findings.residual_r2
    if residual is not None:
        found += (
            f"; at {findings.residual_layer}, as a division by the variance of the x that the "
            f"stream holds there, with R² {residual:.2f}, slope {findings.residual_slope:.2f}"
        )
        left = findings.residual_share
        if (
            residual >= thresholds["residual_r2"][1]
            and findings.residual_slope >= thresholds["residual_slope"]
            and left >= thresholds["share"]
        ):
            return NORMALIZATION, (
                f"{found}: layers before have fitted a part, as a step of gradient descent does, "
                f"and layer norm does the division for what is left, {left:.0%} of the fit."
            )
    if r2 <= absent and (residual is None or residual <= thresholds["residual_r2"][0]):
        return OTHER_MECHANISM, f"{found}: layer norm does not divide by it."
    return UNDECIDED, f"{found}: too little to say that layer norm divides, too much to deny it."


def _support(evidence: pd.DataFrame) -> tuple[str, ...]:
    """What probes and alignment add to a closed form by normalization."""
    probes = evidence[evidence.measure.str.startswith(PROBE)]
    if probes.empty:
        return ()
    best = probes.loc[probes.value.idxmax()]
    sentences = [f"A linear probe reads V from {best.condition} with R² {best.value:.2f}."]
    aligned = evidence[evidence.measure.isin([ALIGNMENT, ALIGNMENT_P])].value.tolist()
    if aligned:
        score, p_value = aligned
        sentences.append(
            f"Functional alignment to the construction scores {score:.2f} (p = {p_value:.2g})."
        )
    return tuple(sentences)


def _limits(
    named: pd.Series, best: pd.DataFrame, findings: Findings, thresholds: Mapping[str, Any]
) -> tuple[str, ...]:
    """What a clear decision leaves open."""
    found = []
    for algorithm in ALGORITHMS:
        pair = frozenset((named.algorithm, algorithm))
        if algorithm == named.algorithm or findings.apart_here[pair] > thresholds["coincide"]:
            continue
        converged = findings.apart[pair] <= thresholds["coincide"]
        if converged and algorithm == RIDGE and named.algorithm == LEAST_SQUARES:
            continue  # without a penalty it is least squares
        text = (
            f"{_name(best.loc[algorithm])} cannot be told apart from it in distribution (they "
            f"differ by {findings.apart_here[pair]:.1e})"
        )
        if not converged:
            text += f", only under the shifts (by up to {findings.apart[pair]:.1e})"
        elif named.algorithm == LEAST_SQUARES:
            text += " or under any shift: it has converged to least squares, its limit"
        found.append(_sentence(text))
    return tuple(found)


def _describes(named: pd.Series, nearest: bool = False) -> str:
    return _sentence(
        f"{_name(named)} {'comes nearest and ' * nearest}leaves {named.distance:.1e} of the "
        f"variance of predictions unexplained in distribution (score {named.score:.2f})"
    )


def _name(rival: pd.Series) -> str:
    """A rival in words."""
    name = rival.family
    if rival.algorithm in (DESCENT, NEWTON):
        name += f" with {rival.k} step{'s' if rival.k > 1 else ''}"
    if rival.algorithm == RIDGE:
        name += f" with λ = {rival.parameters['lambda']:.2g}"
    return f"{name} (query row counted as a sample)" if rival.query_row else name


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
