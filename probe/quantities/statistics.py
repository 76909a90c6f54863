"""Named quantities of a prompt: what probes look for.

The statistics belong to the task (`models.tasks.statistics`); here they are stacked, as probes
and tables take them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from models.tasks.statistics import Statistic, regression_statistics
from models.tasks.task import Task, TaskPrompts


def statistic_values(task: Task, prompts: TaskPrompts) -> Tensor:
    """All statistics of prompts, [batch, n_statistics] in the order of `task.statistics`."""
    return torch.stack([statistic.value(prompts) for statistic in task.statistics], dim=1)


def chosen_statistics(task: Task, names: str | Collection[str] | None) -> dict[int, Statistic]:
    """Column in `statistic_values` -> statistic, for those asked for (None: all).

    Raises:
        ValueError: on an unknown name; lists those of the task.
    """
    known = {statistic.name: column for column, statistic in enumerate(task.statistics)}
    asked = known if names is None else (names,) if isinstance(names, str) else names
    for name in asked:
        if name not in known:
            raise ValueError(f"unknown statistic {name!r}; give some of {', '.join(known)}")
    return {known[name]: task.statistics[known[name]] for name in asked}


def statistic_label(name: str) -> str:
    """Symbol of a statistic of linear regression, with its covariate as a subscript: "x̄₂".

    Names of other tasks stand for themselves.
    """
    number = name.rpartition("_")[2]
    p = int(number) if number.isdigit() else 1
    # Components have subscripts only where there are several.
    known = (*regression_statistics(1), *regression_statistics(max(p, 2)))
    return next((each.symbol for each in known if each.name == name), name)
