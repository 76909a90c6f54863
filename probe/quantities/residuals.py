"""Residuals of every covariate and of y, given every set of the other covariates."""

from __future__ import annotations

from itertools import combinations

import torch

from models.tasks.linear_regression import Prompts
from probe.quantities.dictionary import Quantities


def residual_quantities(prompts: Prompts) -> Quantities:
    """x_j and y at every token, less their mean and what every set of other covariates explains.

    Named ``x_1``, ``x_1|2``, .. ``y``, ``y|1``, ``y|12``. At the query y counts as 0, as in the
    prompt.

    Returns:
        Values [b, t, p 2^(p-1) + 2^p].
    """
    p = prompts.n_covariates
    means = torch.cat([prompts.x_mean.reshape(-1, p), prompts.y_mean[:, None]], dim=1)
    tokens = prompts.tokens - means[:, None]
    context = tokens[:, :-1]
    cov = context.mT @ context / prompts.n_context
    names, values = [], []
    for j in range(p + 1):
        others = [k for k in range(p) if k != j]
        for size in range(len(others) + 1):
            for given in combinations(others, size):
                s = list(given)
                slopes = torch.linalg.solve(cov[:, s][:, :, s], cov[:, s, j : j + 1])
                values.append(tokens[..., j] - (tokens[..., s] @ slopes)[..., 0])
                name = "y" if j == p else f"x_{j + 1}"
                names.append(name + f"|{''.join(str(k + 1) for k in s)}" * bool(s))
    return Quantities(tuple(names), torch.stack(values, -1))
