"""The edges of a model's circuit diagram: which lane each head reads and writes, how strongly."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from probe.symmetry.heads import heads
from probe.symmetry.weights import input_map, require_plain_forward, weights_of


def circuit_edges(model: LinearAttentionTransformer, names: Sequence[str]) -> pd.DataFrame:
    """All lines of the picture.

    Args:
        model: a model in named coordinates: a construction, or the `model` of an `Alignment`.
        names: of its residual coordinates.

    Returns:
        DataFrame with columns stage ("embed", "head", "readout"), layer, head (-1 where there
        is none), tap ("query", "key", "value", "write", or the prompt column), coordinate,
        weight in [0, 1] (relative to the largest of the tap), contribution in [0, 1] (of the
        head, relative to the strongest of its layer; 1 elsewhere).

    Raises:
        ValueError: if the number of names is not d_model, or on a class of model with a
            forward pass of its own.
    """
    require_plain_forward(model, "the circuit diagram")
    config = model.cfg
    if len(names) != config.d_model:
        raise ValueError(f"{len(names)} names for {config.d_model} coordinates")
    weights = weights_of(model)
    rows: list[tuple] = []

    def add(stage: str, layer: int, head: int, tap: str, sizes: Tensor, share: float = 1.0) -> None:
        relative = sizes.abs() / sizes.abs().max().clamp(min=1e-300)
        for name, weight in zip(names, relative.tolist(), strict=True):
            rows.append((stage, layer, head, tap, name, weight, share))

    covariates = [f"x_{j + 1}" for j in range(config.n_covariates)]
    for column, row in zip(["1", *covariates, "y"], input_map(weights), strict=True):
        add("embed", -1, -1, column, row)
    circuits = heads(weights, config)
    for layer, strength in enumerate(circuits.strength):
        shares = (strength / strength.max().clamp(min=1e-300)).tolist()
        own = zip(circuits.qk[layer], circuits.ov[layer], shares, strict=True)
        for head, (a, b, share) in enumerate(own):
            taps = {"query": a.norm(dim=1), "key": a.norm(dim=0)}
            taps |= {"value": b.norm(dim=1), "write": b.norm(dim=0)}
            for tap, sizes in taps.items():
                add("head", layer, head, tap, sizes, share)
    add("readout", config.n_layers, -1, "ŷ", weights["unembed.W_U"][-1])
    columns = ["stage", "layer", "head", "tap", "coordinate", "weight", "contribution"]
    return pd.DataFrame(rows, columns=columns)
