"""What an edit does to the prediction, in units of the variance of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from models.architecture.sites import Studied, Write
from models.tasks.task import TaskPrompts
from probe.stats.bootstrap import percentiles, resample_counts
from probe.stats.moments import ROUNDING_STEPS


class Effect:
    """Loss of the untouched model on prompts, and effects of edits against it."""

    COLUMNS = (
        *("loss", "loss_ablated", "effect", "ci_low", "ci_high"),
        *("change", "change_low", "change_high"),
    )

    def __init__(self, model: Studied, prompts: TaskPrompts, generator: torch.Generator):
        self.unit = prompts.target.var(correction=0)
        rounding = ROUNDING_STEPS * torch.finfo(prompts.target.dtype).eps
        if not self.unit.sqrt() > rounding * prompts.target.abs().max():
            raise ValueError(
                f"what the model should predict does not vary over {len(prompts)} prompt(s), so "
                f"that losses have no unit; use other prompts"
            )
        self.truth = prompts.target
        self.before = model(prompts.inputs)
        self.loss = (self.before - self.truth).square() / self.unit
        self.draws = resample_counts(len(prompts), generator) / len(prompts)

    def effect(self, after: Tensor) -> float:
        """Increase of the loss."""
        return float(((after - self.truth).square() / self.unit - self.loss).mean())

    def __call__(self, after: Tensor) -> dict[str, float]:
        """Loss, effect and change with intervals over prompts."""
        increase = (after - self.truth).square() / self.unit - self.loss
        change = (after - self.before).square() / self.unit
        ci_low, ci_high = percentiles(self.draws @ increase)
        change_low, change_high = percentiles(self.draws @ change)
        loss = self.loss.mean()
        effect = (loss, loss + increase.mean(), increase.mean(), ci_low, ci_high)
        values = (*effect, change.mean(), change_low, change_high)
        return dict(zip(self.COLUMNS, map(float, values), strict=True))


def edited(model: Studied, prompts: TaskPrompts, site: str, edit: Write) -> Tensor:
    """Predictions with `edit` applied to the activation at a site, in float64.

    Raises:
        ValueError: if they are NaN or infinite; names the site and the first prompt.
    """
    prediction, _ = model.run(prompts, writes={site: edit})
    finite = prediction.isfinite()
    if not finite.all():
        prompt = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"the edit at {site!r} makes the prediction NaN or infinite, first in prompt {prompt}"
        )
    return prediction.double()
