r"""Do two models compute the same thing on the same prompts?

Both run on the same prompts. One linear map M takes the learned stream to the reference's,
the same at every site; constants are free at each site. It contains the residual symmetry
group of `probe.symmetries` and the scales that a construction leaves open. What the last layer
adds has a map of its own under a query readout, where its output may be rotated freely.
Compared, on held-out prompts:

- what each block adds to the stream (the layer-norm output), Y_ref ≈ Y M;
- the stream after each block;
- each head's contribution before the norm, up to the part along 1. Heads mix as
  A'_h = Σ_k M_hk A_k, B'_h = Σ_k (M⁻ᵀ)_hk B_k, so a reference head is a combination of
  the learned cross terms Q A_j S B_k: H² coefficients, over the same stream map.

R² is over all coordinates of a site together, so that a coordinate counts by how much it
varies. The score is the mean R² over all sites, negative ones as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from models.config import PromptConfig
from models.prompts import sample_prompts
from models.transformer import LinearAttentionTransformer
from probe.activations import collect
from probe.weights import centring

PROMPTS = 64


@dataclass(frozen=True)
class Run:
    """Activations of a model, tokens of all prompts in a row, [t, ...].

    Attributes:
        embed: [t, D].
        added: what each block adds, [L, t, D].
        stream: after each block, [L, t, D].
        heads: Q A_j S B_k, without the part along 1 if a norm follows, [L, j, k, t, D].
    """

    embed: Tensor
    added: Tensor
    stream: Tensor
    heads: Tensor


@torch.no_grad()
def run(model: LinearAttentionTransformer, inputs: Tensor) -> Run:
    """Run a model and keep what the comparison needs, in float64."""
    config = model.cfg
    n_layers = config.n_layers
    names = ["hook_embed"]
    for layer in range(n_layers):
        names += [f"blocks.{layer}.hook_{part}" for part in ("resid_pre", "resid_post")]
    acts = {name: value.double() for name, value in collect(model, inputs, names).items()}
    heads, added, stream = [], [], []
    project = torch.eye(config.d_model, dtype=torch.float64)
    if config.normalization != "none":
        project = centring(config.d_model)
    for layer in range(n_layers):
        before = acts[f"blocks.{layer}.hook_resid_pre"]
        after = acts[f"blocks.{layer}.hook_resid_post"]
        keys = before[:, :-1] if config.exclude_query else before
        attn = model.blocks[layer].attn
        qk = (attn.W_Q @ attn.W_K.mT).double()
        values = attn.W_V.double() @ project
        cross = torch.einsum("jde,bef,kfg->jkbdg", qk, keys.mT @ keys, values)
        heads.append((before @ cross).flatten(2, 3))
        added.append((after - before).flatten(0, 1))
        stream.append(after.flatten(0, 1))
    return Run(
        acts["hook_embed"].flatten(0, 1),
        torch.stack(added),
        torch.stack(stream),
        torch.stack(heads),
    )


def shared_prompts(config: PromptConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs to fit on and to score on."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(sample_prompts(config, PROMPTS, generator).inputs for _ in range(2))


def functional_match(
    learned: tuple[Run, Run], reference: tuple[Run, Run], free_last: bool
) -> tuple[pd.DataFrame, Tensor]:
    """R² of the reference's activations from the learned model's.

    Args:
        learned: runs on the prompts to fit on and to score on.
        reference: the same of the reference.
        free_last: whether the last layer is read along one direction only (query readout).

    Returns:
        DataFrame with columns kind ("added", "stream", "coordinate" of the stream, "head"),
        layer, index (of the reference's coordinate or head, else -1), r2; and M [D, D].
    """
    (fit, test), (goal, truth) = learned, reference
    n_layers = len(goal.added)
    shared = n_layers - free_last
    pairs = [(fit.embed, goal.embed)]
    pairs += [(fit.added[layer], goal.added[layer]) for layer in range(shared)]
    matrix = _fit_map(pairs, goal.embed.norm())
    maps = [matrix] * n_layers
    if free_last:
        maps[-1] = _fit_map([(fit.added[-1], goal.added[-1])], goal.embed.norm())
    rows = []
    stream = test.embed @ matrix
    for layer, own in enumerate(maps):
        added = test.added[layer] @ own
        stream = stream + added
        for kind, a, b in (
            ("added", added, truth.added[layer]),
            ("stream", stream, truth.stream[layer]),
        ):
            rows.append({"kind": kind, "layer": layer, "index": -1, "r2": _r2(a, b)})
        for c in range(stream.shape[1]):
            r2 = _r2(stream[:, c], truth.stream[layer][:, c])
            rows.append({"kind": "coordinate", "layer": layer, "index": c, "r2": r2})
        for head in range(goal.heads.shape[1]):
            r2 = _head_r2(
                *(one.heads[layer].flatten(0, 1) @ own for one in (fit, test)),
                *(one.heads[layer, head, head] for one in (goal, truth)),
            )
            rows.append({"kind": "head", "layer": layer, "index": head, "r2": r2})
    return pd.DataFrame(rows), matrix


def functional_score(table: pd.DataFrame) -> float:
    """Mean R² over sites and heads, negative ones as 0."""
    sites = table[table["kind"] != "coordinate"]
    return float(sites["r2"].clip(lower=0).mean())


def _fit_map(pairs: list[tuple[Tensor, Tensor]], size: Tensor) -> Tensor:
    """One map for several sites of tokens [t, D], each counting alike; constants are free."""
    xs, ys = [], []
    for x, y in pairs:
        x, y = x - x.mean(0), y - y.mean(0)
        norm = y.norm()
        if norm > 1e-9 * size:  # a site that is constant says nothing
            xs.append(x / norm)
            ys.append(y / norm)
    if not xs:
        return torch.zeros(pairs[0][0].shape[1], pairs[0][1].shape[1], dtype=torch.float64)
    return _least_squares(torch.cat(xs), torch.cat(ys))


def _head_r2(fit: Tensor, test: Tensor, goal: Tensor, truth: Tensor) -> float:
    """R² of one reference head [t, D] from cross terms [c, t, D]; constants are free."""
    if not goal.any():
        return float("nan")
    x = (fit - fit.mean(1, keepdim=True)).flatten(1).T
    y = (goal - goal.mean(0)).flatten()[:, None]
    weights = _least_squares(x, y)[:, 0]
    return _r2(torch.einsum("c,ctd->td", weights, test), truth)


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Least-norm solution of x w = y, columns of x brought to unit norm first."""
    norms = x.norm(dim=0)
    inverse = torch.where(norms > 0, 1 / norms, 0.0)
    scaled = x * inverse
    gram = scaled.T @ scaled
    solution = torch.linalg.pinv(gram, hermitian=True, rtol=1e-12) @ (scaled.T @ y)
    return inverse[:, None] * solution


def _r2(predicted: Tensor, truth: Tensor) -> float:
    """1 - Σ |residual|² / Σ |centred truth|², each side free of its mean."""
    residual = (predicted - predicted.mean(0)) - (truth - truth.mean(0))
    return float(1 - residual.square().sum() / (truth - truth.mean(0)).square().sum())
