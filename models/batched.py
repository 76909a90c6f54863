"""Forward pass of an ensemble in PyTorch: any device, differentiable by autograd.

The same arguments and results as `models.kernel`, as tensors; the kernel is faster on
a CPU, this one runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import ModelConfig


def batched_loss(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    group: Tensor | None = None,
) -> Tensor:
    """Mean squared error of every model over its prompts, [M].

    The gradient of the sum over models is the gradient of each model's own loss.

    Args:
        config: shape of every model.
        params: names of `ModelConfig.parameter_shapes`, shapes led by the model axis [M].
        x: covariates, [groups, p, N+1, batch]; position N is the query.
        y: [groups, N, batch].
        targets: what to predict at the query, [groups, batch].
        group: integers [M], the prompts of each model; by default model m uses group m.
    """
    predictions = batched_predictions(config, params, x, y, group)
    if group is not None:
        targets = targets[group]
    return (predictions - targets).square().mean(dim=1)


def batched_predictions(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    group: Tensor | None = None,
) -> Tensor:
    """Predictions at the query, [M, batch]; arguments as in `batched_loss`.

    With A_h = W_Q W_Kᵀ and S = QᵀQ the sum over heads of eq. (9) is Q G, where
    G = Σ_h A_h S W_V,h is [d_model, d_model] per prompt: no tensor has both a head and a
    position axis.
    """
    y = torch.nn.functional.pad(y, (0, 0, 0, 1))  # the query row of y is 0
    rows = torch.cat([torch.ones_like(x[:, :1]), x, y[:, None]], dim=1).permute(0, 3, 2, 1)
    if group is not None:
        rows = rows[group]
    resid = rows @ params["embed.W_E"][:, None] + params["embed.b_E"][:, None, None]  # m b p d
    for layer in range(config.n_layers):
        resid = _block(config, params, f"blocks.{layer}", resid)
    w_u = params["unembed.W_U"]
    read = resid[:, :, -w_u.shape[1] :]
    return torch.einsum("mbpd,mpd->mb", read, w_u) + params["unembed.b_U"][:, None]


def _block(config: ModelConfig, params: Mapping[str, Tensor], name: str, resid: Tensor) -> Tensor:
    w_q, w_k, w_v = (params[f"{name}.attn.{matrix}"] for matrix in ("W_Q", "W_K", "W_V"))
    context = resid[:, :, :-1] if config.exclude_query else resid
    gram = context.mT @ context
    left = torch.einsum("mhij,mbjk->mbihk", w_q @ w_k.mT, gram)
    attention = resid @ torch.einsum("mbihk,mhkl->mbil", left, w_v)
    if config.normalization == "none":
        return resid + attention
    if config.normalization == "post":
        return _layer_norm(config, params, name, resid + attention)
    return resid + _layer_norm(config, params, name, attention)


def _layer_norm(config: ModelConfig, params: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    normalized = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=config.norm_eps)
    if not config.norm_affine:
        return normalized
    gain, bias = (params[f"{name}.ln1_post.{part}"][:, None, None] for part in "wb")
    return normalized * gain + bias
