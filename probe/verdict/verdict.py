"""Which algorithm is it? `identify` gathers findings (`probe.verdict.findings`) and decides
(`probe.verdict.decision`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from models.tasks.config import PromptConfig
from probe.rivals.registry import compared
from probe.verdict.decision import Decision, decide
from probe.verdict.findings import Findings, gather
from probe.verdict.kinds import NORMALIZATION
from probe.verdict.thresholds import THRESHOLDS
from probe.verdict.words import support

_FEWEST_PROMPTS = 64


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
        """Number of steps of an iterative algorithm."""
        return int(self.decision.named.k) if self._names == "steps" else None

    @property
    def penalty(self) -> float | None:
        """λ of ridge, added to the mean of squares."""
        return self.decision.named.parameters["lambda"] if self._names == "penalty" else None

    @property
    def _names(self) -> str | None:
        """What stands beside the kind."""
        algorithm = compared().get(self.kind)
        return algorithm and algorithm.names

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
        supporting = support(self.evidence) if self.kind == NORMALIZATION else ()
        text = " ".join([f"Verdict: {self.label}.", *self.decision.reasons, *supporting])
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
            **self.findings.numbers,
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
        model: a model with sites (`LinearAttentionTransformer`), another `torch.nn.Module`, or
            a callable from inputs [batch, N+1, 2+p] to predictions [batch]; without sites the
            verdict rests on behaviour alone. It may edit its inputs. A module gets them in the
            dtype of its parameters; where these differ, in that of its attribute `dtype` if it
            has one, and in float64 otherwise, as all other callables do.
        prompt_config: distribution to judge it on, usually the model's training distribution.
        n_prompts: prompts per condition; half as many fit the rivals.
        only_conditions: names of conditions (`probe.rivals.behaviour.conditions`) to compare on
            besides "in distribution"; all by default, none if empty.
        generator: source of all randomness; seeded with 0 by default.

    Raises:
        TypeError: if the model cannot be called.
        ValueError: on another device, predictions that are NaN, constant, of the wrong shape or
            different on a second call, dtypes that do not fit, an unknown condition, or too few
            prompts.
    """
    if n_prompts < _FEWEST_PROMPTS:
        raise ValueError(
            f"n_prompts={n_prompts} is too few to fit the rivals; use at least {_FEWEST_PROMPTS}"
        )
    generator = generator or torch.Generator().manual_seed(0)
    findings = gather(model, prompt_config, n_prompts, generator, only_conditions)
    return Verdict(decide(findings, THRESHOLDS), findings)
