"""What a task is: a frozen config that draws prompts, names their statistics and scores answers.

Instruments ask these things of a task and nothing else, so that another task is another file in
this room.
"""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from models.tasks.statistics import Statistic


@runtime_checkable
class TaskPrompts(Protocol):
    """A batch of prompts.

    Attributes:
        inputs: what a model sees, [batch, position, column], the query last.
        tokens: the same without what is alike in all prompts.
        target: what it should predict, [batch].
    """

    @property
    def inputs(self) -> Tensor:
        """What a model sees, [batch, position, column]."""
        ...

    @property
    def tokens(self) -> Tensor:
        """`inputs` without columns that are alike in all prompts, [batch, position, column]."""
        ...

    @property
    def target(self) -> Tensor:
        """What a model should predict, [batch]."""
        ...

    def __len__(self) -> int:
        """Number of prompts."""
        ...


@runtime_checkable
class Task(Protocol):
    """A distribution of prompts with an answer each.

    Each task has prompts of its own class, a `TaskPrompts` with the statistics of that task.

    Attributes:
        kind: name of the task, recorded with every run and checkpoint.
        n_context: N, samples before the query.
        n_covariates: p.
    """

    @property
    def kind(self) -> str:
        """Name of the task."""
        ...

    @property
    def n_context(self) -> int:
        """N, samples before the query."""
        ...

    @property
    def n_covariates(self) -> int:
        """p, covariates of a sample."""
        ...

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What probes look for in its prompts, in the order of tables."""
        ...

    def sample(
        self, batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Any:
        """Draw prompts; the same state of the generator gives the same prompts."""
        ...

    def draw_rows(
        self, batch: int, generator: torch.Generator, dtype: torch.dtype, noisy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts as training reads them: x [p, N+1, b], y [N, b] and targets [b]."""
        ...

    def shifts(self, base: Any, generator: torch.Generator) -> dict[str, Any]:
        """The prompts of `base` under each shift of the distribution, by name in words."""
        ...

    def loss(self, predictions: Tensor, prompts: Any) -> Tensor:
        """Loss of each prompt, [batch]."""
        ...

    def model_copy(self, *, update: dict) -> Self:
        """The same task with some fields changed."""
        ...
