r"""Which residuals the stream holds, layer by layer, whatever the order of elimination.

Elimination replaces covariates by residuals, token by token: x_2 becomes
x_2|1 = x_2 - x̄_2 - (V_12 / V_11) (x_1 - x̄_1), and y becomes y|1. `held_residuals` asks of every
residual, for every set of covariates, how well it can be read linearly from the stream after each
block; `coordinate_correlations` which coordinate follows it. Neither presumes an order, unlike
`probe.read_out`, which names the one that fits best.

Shapes: b prompts, t = N + 1 tokens, p covariates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pandas as pd
import torch
from torch import Tensor

from models.config import PromptConfig
from models.prompts import Prompts, sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import collect
from probe.dictionary import Quantities
from probe.moments import Moments


def residual_quantities(prompts: Prompts) -> Quantities:
    """x_j and y at every token, less their mean and what every set of other covariates explains.

    Named ``x_1``, ``x_1|2``, .. ``y``, ``y|1``, ``y|12``. At the query y counts as 0, as in the
    prompt.

    Returns:
        Values [b, t, p 2^(p-1) + 2^p].
    """
    p = prompts.n_covariates
    means = torch.cat([prompts.x_mean.reshape(-1, p), prompts.y_mean[:, None]], dim=1)
    tokens = prompts.inputs[..., 1:] - means[:, None]
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


def held_residuals(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 1000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """How well each residual is read linearly from the stream, over tokens and prompts.

    Args:
        model: the model.
        prompt_config: distribution of the prompts, two covariates or more.
        n_prompts: number of prompts.
        generator: source of the prompts; seeded with 0 by default.

    Returns:
        DataFrame with columns layer (-1: after the embedding), quantity, r2.
    """
    generator = generator or torch.Generator().manual_seed(0)
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    quantities = residual_quantities(prompts)
    targets = quantities.values.flatten(0, 1)
    rows = []
    for layer, stream in _streams(model, prompts):
        r2 = Moments().update(stream[None], targets).ridge().r2[0]
        for name, value in zip(quantities.names, r2.tolist(), strict=True):
            rows.append({"layer": layer, "quantity": name, "r2": value})
    return pd.DataFrame(rows)


def coordinate_correlations(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    rotation: Tensor,
    *,
    n_prompts: int = 1000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Correlation of every coordinate with every residual, over tokens and prompts.

    Args:
        model: the model.
        prompt_config: distribution of the prompts, two covariates or more.
        rotation: basis to read in, [d, d]: coordinates of Q O.
        n_prompts: number of prompts.
        generator: source of the prompts; seeded with 0 by default.

    Returns:
        DataFrame with columns layer (-1: after the embedding), coordinate, quantity,
        correlation (0 for a coordinate that is constant).
    """
    generator = generator or torch.Generator().manual_seed(0)
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    quantities = residual_quantities(prompts)
    targets = _standardised(quantities.values.flatten(0, 1))
    rows = []
    for layer, stream in _streams(model, prompts):
        correlation = _standardised(stream @ rotation).T @ targets / len(targets)
        for coordinate, row in enumerate(correlation.tolist()):
            for name, value in zip(quantities.names, row, strict=True):
                names = {"layer": layer, "coordinate": coordinate, "quantity": name}
                rows.append(names | {"correlation": value})
    return pd.DataFrame(rows)


def _streams(model: LinearAttentionTransformer, prompts: Prompts) -> Iterator[tuple[int, Tensor]]:
    """The stream after the embedding (-1) and each block, [b·t, d]."""
    blocks = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    found = collect(model, prompts.inputs, ["hook_embed", *blocks])
    for layer, stream in enumerate(found.values(), start=-1):
        yield layer, stream.flatten(0, 1).double()


def _standardised(values: Tensor) -> Tensor:
    """Columns with mean 0 and variance 1; 0 where only rounding varies."""
    centred = values - values.mean(0)
    scale = centred.square().mean(0).sqrt()
    return torch.where(scale > 1e-9 * values.abs().amax(0), centred / scale, 0.0)
