"""The places in a model that can be read and edited, and reading them.

A site is a hook point with a transformer-lens name (`sites` lists them with
their meaning). Shapes: batch, position (N + 1), head, d_model.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import pandas as pd
import torch
from torch import Tensor

from models.transformer import LinearAttentionTransformer

# Site suffix -> (shape in axis words, meaning, short label for figures).
_MEANINGS = {
    "hook_embed": ("batch position d_model", "input map", "embedding"),
    "hook_resid_pre": ("batch position d_model", "residual stream before the block", "stream in"),
    "hook_resid_post": ("batch position d_model", "residual stream after the block", "stream out"),
    "attn.hook_q": ("batch position head d_model", "queries Q W_Q", "queries"),
    "attn.hook_k": ("batch position head d_model", "keys Q W_K", "keys"),
    "attn.hook_v": ("batch position head d_model", "values Q W_V", "values"),
    "attn.hook_state": ("batch head d_model d_model", "head state KᵀV", "head state"),
    "attn.hook_attn_scores": ("batch head position position", "scores QKᵀ, on request", "scores"),
    "attn.hook_result": ("batch position head d_model", "output per head", "head output"),
    "attn.hook_out": ("batch position d_model", "heads summed, before the norm", "heads summed"),
    "ln1_post.hook_mean": ("batch position 1", "mean over features in the norm", "norm mean"),
    "ln1_post.hook_scale": ("batch position 1", "divisor of the norm", "norm scale"),
    "ln1_post.hook_normalized": ("batch position d_model", "quotient of the norm", "norm output"),
    "hook_attn_out": ("batch position d_model", "what is added to the stream", "added"),
    "hook_prediction": ("batch", "prediction at the query", "prediction"),
}


def sites(model: LinearAttentionTransformer) -> pd.DataFrame:
    """All sites of a model in forward order.

    Returns:
        DataFrame with columns site, axes (axis words), shape (sizes of this model, "b"
        for the batch), meaning.
    """
    cfg = model.cfg
    rows = []
    for name in model.hook_dict:
        axes, meaning, _ = _MEANINGS[_suffix(name)]
        sizes = {"batch": "b", "position": cfg.n_context + 1, "head": cfg.n_heads}
        sizes |= {"d_model": cfg.d_model, "1": 1}
        shape = " ".join(str(sizes[axis]) for axis in axes.split())
        rows.append({"site": name, "axes": axes, "shape": shape, "meaning": meaning})
    return pd.DataFrame(rows)


def site_label(site: str) -> str:
    """Site name in words for figures: "layer 1: norm scale"."""
    label, layer = _MEANINGS[_suffix(site)][2], layer_of(site)
    return label if layer is None else f"layer {layer}: {label}"


def layer_of(site: str) -> int | None:
    """Layer of a site; None for embedding and prediction."""
    match = re.match(r"blocks\.(\d+)\.", site)
    return int(match[1]) if match else None


def axes_of(site: str) -> tuple[str, ...]:
    """Axis words of a site, such as ("batch", "position", "d_model")."""
    return tuple(_MEANINGS[_suffix(site)][0].split())


@torch.no_grad()
def collect(
    model: LinearAttentionTransformer,
    inputs: Tensor,
    sites: str | Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Activations at sites, as copies that no later run changes.

    Args:
        model: the model.
        inputs: [batch, N+1, 2+p].
        sites: a name or names; None for every site that is not on request only.

    Returns:
        Tensors by site name, in forward order; shapes as in `sites`.

    Raises:
        ValueError: on an unknown site (near matches are listed), or activations that are
            NaN or infinite (names the site and the first prompt).
    """
    _, cache = model.run_with_cache(inputs, names_filter=sites, return_cache_object=False)
    for name, value in cache.items():
        require_finite(name, value)
    return cache


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


def _suffix(site: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "", site)
