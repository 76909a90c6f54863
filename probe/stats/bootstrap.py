"""Percentile intervals from resampled units: prompts, blocks of prompts, models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.95
RESAMPLES = 1000


def percentiles(replicates: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the percentile interval at `CONFIDENCE` from replicates [resamples, ...]."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(replicates.numpy(), [tail, 1 - tail], axis=0)
    return torch.as_tensor(low), torch.as_tensor(high)


def resample_counts(n_units: int, generator: torch.Generator) -> Tensor:
    """Bootstrap: how often each unit (a prompt, a block of prompts, a model) is drawn.

    Returns:
        Counts, [resamples, n_units], each row summing to n_units.
    """
    drawn = torch.randint(n_units, (RESAMPLES, n_units), generator=generator)
    counts = torch.zeros(RESAMPLES, n_units, dtype=torch.float64)
    return counts.scatter_add_(1, drawn, torch.ones_like(counts))
