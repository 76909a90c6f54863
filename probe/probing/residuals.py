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

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Studied, site_with, sites_with
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.activations.collect import collect
from probe.quantities.residuals import residual_quantities
from probe.stats.moments import Moments
from probe.stats.regression import require_samples


def held_residuals(
    model: Studied,
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

    Raises:
        ValueError: on too few prompts, or a model without a stream ("not applicable").
    """
    require_samples(n_prompts)
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
    model: Studied,
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
    require_samples(n_prompts)
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


def _streams(model: Studied, prompts: Prompts) -> Iterator[tuple[int, Tensor]]:
    """The stream after the embedding (-1) and each block, [b·t, d]."""
    layers = {site_with(model, "embedding").name: -1}
    for site in sites_with(model, "stream out"):
        if site.layer is not None:
            layers[site.name] = site.layer
    for name, stream in collect(model, prompts, list(layers)).items():
        yield layers[name], stream.flatten(0, 1).double()


def _standardised(values: Tensor) -> Tensor:
    """Columns with mean 0 and variance 1; 0 where only rounding varies."""
    centred = values - values.mean(0)
    scale = centred.square().mean(0).sqrt()
    return torch.where(scale > 1e-9 * values.abs().amax(0), centred / scale, 0.0)
