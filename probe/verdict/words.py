"""A decision in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from probe.rivals.registry import compared
from probe.verdict.evidence import ALIGNMENT, ALIGNMENT_P, PROBE
from probe.verdict.findings import Findings

# How an algorithm whose verdict names steps or a penalty goes to its limit.
_TOWARDS = {"steps": "as k → ∞", "penalty": "as λ → 0", None: "in the limit"}


def support(evidence: pd.DataFrame) -> tuple[str, ...]:
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


def limits(
    named: pd.Series, best: pd.DataFrame, findings: Findings, thresholds: Mapping[str, Any]
) -> tuple[str, ...]:
    """What a clear decision leaves open."""
    found = []
    for name, algorithm in compared().items():
        pair = frozenset((named.algorithm, name))
        if (
            algorithm.trivial
            or name == named.algorithm
            or findings.apart_here[pair] > thresholds["coincide"]
        ):
            continue
        converged = findings.apart[pair] <= thresholds["coincide"]
        to_named = algorithm.limit is not None and algorithm.limit.name == named.algorithm
        if converged and to_named and algorithm.names == "penalty":
            continue  # without a penalty it is its limit
        text = (
            f"{rival_name(best.loc[name])} cannot be told apart from it in distribution (they "
            f"differ by {findings.apart_here[pair]:.1e})"
        )
        if not converged:
            text += f", only under the shifts (by up to {findings.apart[pair]:.1e})"
        elif to_named:
            text += f" or under any shift: it has converged to {named.algorithm}, its limit"
        found.append(sentence(text))
    return tuple(found)


def nearest(top: pd.Series, named: pd.Series, lead: float) -> tuple[str, ...]:
    """Which rival comes nearest, how well it or its limit describes the model, and why that."""
    if top.algorithm == named.algorithm:
        return (describes(named, "comes nearest and "),)
    towards = _TOWARDS[compared()[top.algorithm].names]
    why = (
        f"{rival_name(top)} comes nearest in score ({top.score:.2f}); {named.algorithm} is named "
        f"all the same, which {top.algorithm} approaches {towards}: to be named itself it would "
        f"have to be ahead by {lead:g} decades, and is by {named.score - top.score:.2f}"
    )
    return sentence(why), describes(named)


def describes(named: pd.Series, claim: str = "") -> str:
    """How well a rival describes the model, after a further claim."""
    return sentence(
        f"{rival_name(named)} {claim}leaves {named.distance:.1e} of the variance of predictions "
        f"unexplained in distribution (score {named.score:.2f})"
    )


def rival_name(rival: pd.Series) -> str:
    """A rival in words."""
    name, says = rival.family, compared()[rival.algorithm].names
    if says == "steps":
        name += f" with {rival.k} step{'s' if rival.k > 1 else ''}"
    if says == "penalty":
        name += f" with λ = {rival.parameters['lambda']:.2g}"
    return f"{name} (query row counted as a sample)" if rival.query_row else name


def sentence(text: str) -> str:
    """Text with a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}."
