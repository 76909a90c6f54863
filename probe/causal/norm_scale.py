"""What layer norm receives, divides by and returns, beside the closed-form construction.

The size of a layer's norm input is free (it cancels), so that inputs, means and scales are
given in units of the layer's median scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, site_with, sites_with
from models.constructed.basis import coordinate_names
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import sample_prompts
from models.tasks.task import Task
from probe.activations.collect import collect
from probe.stats.regression import fit_line

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def norm_statistics(
    model: Studied,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 2000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Distributions over prompts and tokens of layer norm's input, mean, scale and output.

    The same rows follow for `closed_form` of the same N and p on the same prompts: what the
    construction predicts. Its coordinates have names; which of the model's they correspond to
    is for matching to say, not for an index.

    Args:
        model: a model with layer norm.
        prompt_config: distribution of the prompts.
        n_prompts: number of prompts.
        generator: source of the prompts; seeded with 0 by default.

    Returns:
        DataFrame with columns source ("model" or "construction"), layer, quantity ("input",
        "mean", "scale", "output"), coordinate (empty for mean and scale), average, sd, and
        q05 .. q95. Input, mean and scale are in units of the layer's median scale.

    Raises:
        ValueError: for a model without layer norm.
    """
    require_norm(model)
    generator = generator or torch.Generator().manual_seed(0)
    inputs = sample_prompts(prompt_config, n_prompts, generator).inputs
    # A model that leaves the query out of its keys is compared with a construction that does.
    exclude_query = getattr(getattr(model, "config", None), "exclude_query", False)
    construction = closed_form(
        prompt_config.n_context, prompt_config.n_covariates, exclude_query=exclude_query
    )
    names = coordinate_names(prompt_config.n_covariates)
    sources = [
        ("model", model, [str(i) for i in range(model.axis_sizes["d_model"])]),
        ("construction", construction, names),
    ]
    rows = []
    for source, which, coordinates in sources:
        for divisor in layer_divisors(which):
            for quantity, values in _norm(which, inputs, divisor).items():
                labels = coordinates if values.shape[-1] > 1 else [""]
                for label, column in zip(labels, values.flatten(0, 1).T, strict=True):
                    rows.append((source, divisor.layer, quantity, label, *_summary(column)))
    columns = ["source", "layer", "quantity", "coordinate", "average", "sd"]
    return pd.DataFrame(rows, columns=columns + [f"q{round(100 * q):02d}" for q in QUANTILES])


def scale_points(
    model: Studied,
    prompt_config: PromptConfig,
    *,
    n_prompts: int = 4000,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Layer-norm scale at the query token beside V, prompt by prompt.

    Returns:
        DataFrame with columns layer, prompt, statistic ("x_var", or one per covariate),
        variance, scale (in units of the layer's median).

    Raises:
        ValueError: for a model without layer norm.
    """
    require_norm(model)
    generator = generator or torch.Generator().manual_seed(0)
    prompts = sample_prompts(prompt_config, n_prompts, generator)
    p = prompt_config.n_covariates
    names = [f"x_var_{j + 1}" for j in range(p)] if p > 1 else ["x_var"]
    variances = prompts.x_var.reshape(n_prompts, p).T
    frames = []
    for divisor in layer_divisors(model):
        scale = _norm(model, prompts.inputs, divisor)["scale"][:, -1, 0]
        for name, variance in zip(names, variances, strict=True):
            columns = {"layer": divisor.layer, "prompt": range(n_prompts), "statistic": name}
            frames.append(pd.DataFrame(columns | {"variance": variance, "scale": scale}))
    return pd.concat(frames, ignore_index=True)


def scale_law(points: pd.DataFrame, generator: torch.Generator | None = None) -> pd.DataFrame:
    """Fit ``log scale = slope · log V + constant`` to `scale_points`, layer by layer.

    In the construction the slope is 0 in the layer that centres and 1 in the one that divides.

    Returns:
        DataFrame with columns layer, statistic, slope, slope_low, slope_high, r2, ci_low,
        ci_high; 95 % bootstrap intervals over prompts.

    Raises:
        ValueError: if V does not vary, or a layer has too few prompts.
    """
    generator = generator or torch.Generator().manual_seed(0)
    rows = []
    for key, group in points.groupby(["layer", "statistic"], sort=False):
        layer, statistic = cast(tuple, key)
        log_variance, log_scale = (
            torch.from_numpy(np.log(group[name].to_numpy())) for name in ("variance", "scale")
        )
        line = fit_line(log_variance, log_scale, generator, f"log {statistic}")
        rows.append({"layer": layer, "statistic": statistic, **dataclasses.asdict(line)})
    return pd.DataFrame(rows)


def layer_divisors(model: Studied) -> tuple[Site, ...]:
    """What the layers divide by, in forward order."""
    return tuple(site for site in sites_with(model, "divisor") if site.layer is not None)


def require_norm(model: Studied) -> None:
    """Refuse a model without layer norm with a ValueError."""
    if not layer_divisors(model):
        raise ValueError("not applicable: the model has no layer norm, so nothing in it divides")


def require_variances(task: Task) -> None:
    """Refuse a task whose prompts have no variance of x to divide by with a ValueError."""
    families = {statistic.family for statistic in task.statistics}
    missing = [family for family in ("x_var", "xy_cov") if family not in families]
    if missing:
        raise ValueError(
            f"not applicable to the task {task.kind!r}: its prompts have no {' and '.join(missing)}"
            f", so that there is no quotient to look for"
        )


@torch.no_grad()
def _norm(model: Studied, inputs: Tensor, divisor: Site) -> dict[str, Tensor]:
    """Input, mean, scale and output of a layer's norm, each [b, p, d or 1]."""
    mean_site = site_with(model, "norm mean", divisor.layer)
    output_site = site_with(model, "norm output", divisor.layer)
    names = [site.name for site in (mean_site, divisor, output_site)]
    found = collect(model, inputs, names)
    mean, scale, output = (found[name].double() for name in names)
    unit = scale.median()
    # The norm's input from what it computes, for either placement of the norm.
    return {
        "input": (mean + scale * output) / unit,
        "mean": mean / unit,
        "scale": scale / unit,
        "output": output,
    }


def _summary(values: Tensor) -> Sequence[float]:
    quantiles = np.quantile(values.numpy(), QUANTILES)
    return [float(values.mean()), float(values.std()), *map(float, quantiles)]
