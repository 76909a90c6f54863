"""The error of a trained model on prompts that no training run sees."""

from __future__ import annotations

import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig

EVALUATION_SEED = 20_260_715
EVALUATION_PROMPTS = 4096


def normalised_error(losses: Tensor, target: Tensor) -> Tensor:
    """Losses in units of the (biased) variance of the target: predicting its mean has error 1.

    Args:
        losses: squared errors, one per prompt or their mean.
        target: what should be predicted, [batch].

    Returns:
        As `losses`; the mean over prompts is the normalised MSE.
    """
    return losses / target.var(correction=0)


def normalised_mse(model: LinearAttentionTransformer, prompts: PromptConfig) -> float:
    """Mean squared error over the variance of the target.

    On 4096 fresh prompts that no training run sees, always the same ones.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    sample = prompts.sample(EVALUATION_PROMPTS, generator)
    with torch.no_grad():
        predictions = torch.cat([model(part).double() for part in sample.inputs.split(256)])
    return float(normalised_error(prompts.loss(predictions, sample).mean(), sample.target))
