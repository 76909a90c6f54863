"""Where the forward pass divides: norm scales and softmax denominators, in forward order."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Role, Site, Studied, sites_with

# What may follow a norm on its way to a linear read-out.
_BETWEEN_NORM_AND_READOUT: tuple[Role, ...] = ("norm output", "stream out", "prediction")
# Places where the whole stream stands.
_STREAM: tuple[Role, ...] = ("embedding", "stream in", "stream out")
# Axes over which the divisors of one prompt, or of all, are pooled.
_POOLED = ("batch", "position")


def divisors(model: Studied) -> pd.DataFrame:
    """Every site that the forward pass divides by.

    Args:
        model: any model with sites.

    Returns:
        DataFrame in forward order, empty for a model that divides nowhere: site; layer (missing
        outside the blocks); label in words; axes ("batch position 1"); before_readout, whether
        it scales the whole stream and only a linear read-out follows, so that the prediction
        answers to it by its position, whatever it does.
    """
    rows = [
        {
            "site": site.name,
            "layer": site.layer,
            "label": site.title,
            "axes": " ".join(site.axes),
            "before_readout": before_readout(model, site),
        }
        for site in sites_with(model, "divisor")
    ]
    table = pd.DataFrame(rows, columns=["site", "layer", "label", "axes", "before_readout"])
    return table.astype({"layer": "Int64", "before_readout": bool})


def before_readout(model: Studied, divisor: Site) -> bool:
    """Whether a norm of the whole stream stands directly before the read-out."""
    return all(site.role in _BETWEEN_NORM_AND_READOUT for site in _after(model, divisor))


def on_stream(model: Studied, divisor: Site) -> bool:
    """Whether a divisor rescales the stream itself, and not what a block is about to add."""
    added = {site.name for site in sites_with(model, "added", divisor.layer)}
    return not added & {site.name for site in _after(model, divisor)}


def stream_before(model: Studied, divisor: Site) -> Site:
    """The last place before a divisor where the whole stream can be read.

    Raises:
        ValueError: if the model shows its stream nowhere before it.
    """
    after = {site.name for site in _after(model, divisor)}
    before = [s for s in model.sites.values() if s.role in _STREAM and s.name not in after]
    if not before:
        raise ValueError(
            f"not applicable: no site of the roles {', '.join(_STREAM)} comes before "
            f"{divisor.name}, so that what the stream holds there cannot be read"
        )
    return before[-1]


def log_at_query(scale: Tensor, divisor: Site) -> Tensor:
    """Log of a divisor at the query position, averaged over its further axes, [b]."""
    log = scale.double().log()
    if "position" in divisor.axes:
        log = log.select(divisor.axes.index("position"), -1)
    return log.reshape(log.shape[0], -1).mean(1)


def pooled_mean(values: Tensor, divisor: Site) -> Tensor:
    """Mean over prompts and positions, these axes kept with size 1."""
    return values.mean([i for i, axis in enumerate(divisor.axes) if axis in _POOLED], keepdim=True)


def pooled_median(values: Tensor, divisor: Site) -> Tensor:
    """Median over prompts and positions, these axes kept with size 1."""
    axes = [i for i, axis in enumerate(divisor.axes) if axis in _POOLED]
    kept = [1 if i in axes else size for i, size in enumerate(values.shape)]
    first = torch.movedim(values, axes, list(range(len(axes)))).flatten(0, len(axes) - 1)
    return first.median(0).values.reshape(kept)


def _after(model: Studied, divisor: Site) -> list[Site]:
    names = list(model.sites)
    return [model.sites[name] for name in names[names.index(divisor.name) + 1 :]]
