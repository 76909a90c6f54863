"""Training prompts as a pure function of seed, distribution and step."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from models.tasks.config import PromptConfig

_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that 2^32 successive steps have distinct seeds


class PromptStream:
    """Training prompts of one seed and distribution, as a pure function of the step.

    The generator is seeded anew at every step by a hash of (seed, distribution) plus
    a multiple of the step, so nothing has to be remembered to resume, and models that
    share seed and distribution share their prompts.

    Args:
        prompts: the distribution.
        seed: of the run.
        batch: b.
        n_prompts: size of a fixed set that is drawn once and reshuffled every epoch
            (the last, incomplete batch of an epoch is left out); None for fresh prompts.
        noisy_y: target is the noisy y at the query instead of least squares.
        dtype: of the prompts.
        device: where they are drawn.
    """

    def __init__(
        self,
        prompts: PromptConfig,
        seed: int,
        batch: int,
        n_prompts: int | None,
        noisy_y: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        # Fields at their default are left out: a field added later keeps old streams.
        text = json.dumps([seed, prompts.model_dump(mode="json", exclude_defaults=True)])
        self._base = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        self._prompts, self._batch, self._noisy_y, self._dtype = prompts, batch, noisy_y, dtype
        self._generator = torch.Generator(device)
        self._fixed = None if n_prompts is None else self._draw(-1, n_prompts)
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [p, N+1, b], y [N, b] and targets [b] of a step."""
        if self._fixed is None:
            return self._draw(step, self._batch)
        n_prompts = self._fixed[2].shape[0]
        epoch, place = divmod(step, n_prompts // self._batch)
        if self._order[0] != epoch:
            generator = self._seeded(epoch)
            order = torch.randperm(n_prompts, generator=generator, device=generator.device)
            self._order = (epoch, order)
        chosen = self._order[1][place * self._batch : (place + 1) * self._batch]
        x, y, targets = self._fixed
        return x[..., chosen], y[..., chosen], targets[chosen]

    def _draw(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._prompts.draw_rows(count, self._seeded(step), self._dtype, self._noisy_y)

    def _seeded(self, counter: int) -> torch.Generator:
        return self._generator.manual_seed((self._base + counter * _GOLDEN) % 2**64)
