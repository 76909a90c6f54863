"""Named quantities of a prompt: what probes look for.

Names are those of the attributes of `models.Prompts`; labels are the symbols of
the source paper. With p > 1 covariates the vector-valued ones have a component
per covariate, ``x_mean_1`` .. ``x_mean_p``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.prompts import Prompts

# Statistic -> symbol. x_mean, x_var, xy_cov and slope exist per covariate.
LABELS = {
    "x_mean": "x̄",
    "y_mean": "ȳ",
    "x_var": "V",
    "xy_cov": "C",
    "slope": "C/V",
    "least_squares": "ŷ",
}
_PER_COVARIATE = {"x_mean", "x_var", "xy_cov", "slope"}


def statistic_names(n_covariates: int) -> tuple[str, ...]:
    """Names of all statistics of prompts with p covariates, in `LABELS` order."""
    names = []
    for name in LABELS:
        if name in _PER_COVARIATE and n_covariates > 1:
            names += [f"{name}_{j + 1}" for j in range(n_covariates)]
        else:
            names.append(name)
    return tuple(names)


def statistics(prompts: Prompts) -> Tensor:
    """All statistics of prompts, [batch, n_statistics] in `statistic_names` order."""
    columns = [getattr(prompts, name).reshape(len(prompts), -1) for name in LABELS]
    return torch.cat(columns, dim=1)


def statistic_label(name: str) -> str:
    """Symbol of a statistic, with its covariate as a subscript: "x̄₂"."""
    if name in LABELS:
        return LABELS[name]
    if name == "x_var_held":
        return "V′, variance of x in the stream"
    base, _, component = name.rpartition("_")
    subscript = component.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
    # C/V has no symbol per covariate; b is the vector of least-squares slopes.
    symbol = "b" if base == "slope" else LABELS[base]
    return f"{symbol}{subscript}"
