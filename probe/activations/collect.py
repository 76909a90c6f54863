"""Reading activations: copies at named sites, finite or refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from models.architecture.sites import Studied


@torch.no_grad()
def collect(
    model: Studied,
    inputs: Any,
    sites: str | Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Activations at sites, as copies that no later run changes.

    Args:
        model: the model.
        inputs: prompts, or what the model sees of them, [batch, position, column].
        sites: a name or names; None for every site that is not on request only.

    Returns:
        Tensors by site name, in forward order; shapes as in `sites`.

    Raises:
        ValueError: on an unknown site (near matches are listed), or activations that are
            NaN or infinite (names the site and the first prompt).
    """
    _, found = model.run(inputs, reads=model.select_sites(sites))
    for name, value in found.items():
        require_finite(name, value)
    return found


def require_finite(site: str, value: Tensor) -> None:
    """Refuse activations [batch, ...] that are NaN or infinite.

    Raises:
        ValueError: names the site and the first prompt.
    """
    # A finite sum holds no NaN or infinity, and costs a quarter of looking at each value.
    if value.sum().isfinite():
        return
    finite = value.isfinite()
    if not finite.all():
        prompt = int((~finite.reshape(finite.shape[0], -1).all(1)).nonzero()[0, 0])
        raise ValueError(
            f"activations at {site!r} are NaN or infinite, first in prompt {prompt}; "
            f"look at that prompt and at the weights that feed the site"
        )
