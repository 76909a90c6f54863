r"""Do two models compute the same thing on the same prompts?

Both run on the same prompts. One linear map M takes the learned stream to the reference's,
the same at every site; constants are free at each site. It contains the residual symmetry
group of `probe.symmetry.catalogue` and the scales that a construction leaves open. What the last
layer adds has a map of its own under a query readout, where its output may be rotated freely.
Compared, on held-out prompts:

- what each block adds to the stream (the layer-norm output), Y_ref ≈ Y M;
- the stream after each block;
- each head's contribution before the norm, up to the part along 1 that it subtracts. Heads mix
  as A'_h = Σ_k M_hk A_k, B'_h = Σ_k (M⁻ᵀ)_hk B_k, so a reference head is a combination of
  the learned cross terms Q A_j S B_k: H² coefficients, over the same stream map. Weights give
  these terms only where they say what is computed; another class of model gives what its heads
  write, and a reference head is a combination of those.

R² is over all coordinates of a site together, so that a coordinate counts by how much it
varies. The score is the mean R² over all sites, negative ones as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import layers_of, site_with
from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from probe.activations.collect import collect
from probe.symmetry.heads import heads
from probe.symmetry.weights import has_plain_forward, weights_of

PROMPTS = 64


@dataclass(frozen=True)
class Run:
    """Activations of a model, tokens of all prompts in a row, [t, ...].

    Attributes:
        embed: [t, D].
        added: how far each block takes the stream from where the one before left it, [L, t, D].
        stream: after each block, [L, t, D].
        heads: what each head writes, without the part along 1 if a norm follows, [L, H, t, D].
        terms: what heads of a mixed model can be made of, [L, c, t, D]: all Q A_j S B_k, or
            `heads` where weights do not say what is computed.
    """

    embed: Tensor
    added: Tensor
    stream: Tensor
    heads: Tensor
    terms: Tensor


@torch.no_grad()
def run(model: LinearAttentionTransformer, inputs: Tensor) -> Run:
    """Run a model and keep what the comparison needs, in float64."""
    layers = layers_of(model)
    embedding = site_with(model, "embedding").name
    after = [site_with(model, "stream out", layer).name for layer in layers]
    plain = has_plain_forward(model)
    role = "stream in" if plain else "head output"
    of_heads = [site_with(model, role, layer).name for layer in layers]
    acts = collect(model, inputs, [embedding, *after, *of_heads])
    acts = {name: value.double() for name, value in acts.items()}
    if plain:
        crossed = _cross_terms(model, [acts[name] for name in of_heads])
        terms = crossed.flatten(1, 2)
        own = crossed.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    else:
        terms = own = _written(model, [acts[name] for name in of_heads])
    streams = torch.stack([acts[name].flatten(0, 1) for name in (embedding, *after)])
    return Run(streams[0], streams.diff(dim=0), streams[1:], own, terms)


def _cross_terms(model: LinearAttentionTransformer, streams: list[Tensor]) -> Tensor:
    """Q A_j S B_k of every layer from its stream [b, p, D], [L, j, k, t, D]."""
    circuits = heads(weights_of(model), model.cfg)
    found = []
    for stream, qk, ov in zip(streams, circuits.qk, circuits.ov, strict=True):
        keys = stream[:, :-1] if model.cfg.exclude_query else stream
        cross = torch.einsum("jde,bef,kfg->jkbdg", qk, keys.mT @ keys, ov)
        found.append((stream @ cross).flatten(2, 3))
    return torch.stack(found)


def _written(model: LinearAttentionTransformer, outputs: list[Tensor]) -> Tensor:
    """What each head writes, from outputs [b, p, H, D], [L, H, t, D]."""
    found = torch.stack(outputs).movedim(3, 1).flatten(2, 3)
    return found - found.mean(-1, keepdim=True) if model.cfg.has_norm else found


def shared_prompts(config: PromptConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs to fit on and to score on."""
    fit, test = (config.sample(PROMPTS, generator).inputs for _ in range(2))
    return fit, test


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
                *(one.terms[layer] @ own for one in (fit, test)),
                *(one.heads[layer, head] for one in (goal, truth)),
            )
            rows.append({"kind": "head", "layer": layer, "index": head, "r2": r2})
    return pd.DataFrame(rows), matrix


def functional_score(table: pd.DataFrame) -> float:
    """Mean R² over sites and heads, negative ones as 0."""
    of_sites = table.loc[table["kind"] != "coordinate", "r2"]
    return float(of_sites.clip(lower=0).mean())


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
