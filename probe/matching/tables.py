"""Weights and alignments as named tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from probe.matching import signed_permutation as permuted
from probe.matching.pair import Pair
from probe.symmetry.heads import heads
from probe.symmetry.weights import input_map, require_plain_forward, weights_of


def weight_tables(
    model: LinearAttentionTransformer, names: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """W, every A_h and B_h, and the query's W_U as named tables, largest entry 1.

    Args:
        model: a model in named coordinates.
        names: of its residual coordinates.

    Returns:
        Title -> table: "W_in", "layer 0 A0", "layer 0 B0", .., "W_out".

    Raises:
        ValueError: on a class of model with a forward pass of its own.
    """
    require_plain_forward(model, "a table of circuits")
    weights, config = weights_of(model), model.cfg
    inputs = ["1", *(f"x_{j + 1}" for j in range(config.n_covariates)), "y"]
    circuits = heads(weights, config)
    tables: dict[str, tuple[Tensor, Sequence[str]]] = {"W_in": (input_map(weights), inputs)}
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            tables[f"layer {layer} A{head}"] = (circuits.qk[layer, head], names)
            tables[f"layer {layer} B{head}"] = (circuits.ov[layer, head], names)
    tables["W_out"] = (weights["unembed.W_U"][-1:], ["query"])
    return {
        title: pd.DataFrame(
            (value / value.abs().max().clamp(min=1e-300)).numpy(),
            index=list(rows),
            columns=list(names),
        )
        for title, (value, rows) in tables.items()
    }


def layer_map_tables(model: LinearAttentionTransformer, names: Sequence[str]) -> list[pd.DataFrame]:
    """Per layer, what coordinate i of a token times S_jk adds to coordinate l, largest entry 1.

    Rows "i→l", columns "S[j,k]". Unlike A_h and B_h this is the same for all ways to
    split the layer into heads, and for exchanged keys and values (S is symmetric).

    Raises:
        ValueError: on a class of model with a forward pass of its own.
    """
    require_plain_forward(model, "a table of layer maps")
    first, second = torch.triu_indices(model.cfg.d_model, model.cfg.d_model)
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    columns = [f"S[{names[j]},{names[k]}]" for j, k in pairs]
    rows = [f"{one}→{other}" for one in names for other in names]
    circuits = heads(weights_of(model), model.cfg)
    tables = []
    for qk, ov in zip(circuits.qk, circuits.ov, strict=True):
        tensor = torch.einsum("hij,hkl->iljk", qk, ov)
        tensor = (tensor + tensor.mT)[..., first, second] / (1 + (first == second))
        tensor = tensor / tensor.abs().max().clamp(min=1e-300)
        tables.append(pd.DataFrame(tensor.flatten(0, 1).numpy(), index=rows, columns=columns))
    return tables


def part_table(pair: Pair, width: int, best: permuted.Match) -> pd.DataFrame:
    """Cosine and relative error of every part; surplus heads and coordinates with their norm."""
    learned = permuted.parts_of(pair.learned, pair.model.cfg, width, pair.last_only)
    target = permuted.parts_of(pair.target, pair.reference.cfg, width, pair.last_only)
    matrix = permuted.permutation_matrix(best.order, best.signs)
    p = pair.reference.cfg.n_covariates
    row_names = ["constant", *(f"x_{j + 1}" for j in range(p)), "y", "readout"]
    rows = []

    def add(part: str, a: object, b: object, cosine: float, error: float, norm: float) -> None:
        values = (part, str(a), str(b), cosine, error, norm)
        columns = ("part", "learned", "reference", "cosine", "relative_error", "norm")
        rows.append(dict(zip(columns, values, strict=True)))

    norms = zip(learned.row_norms, target.row_norms, strict=True)
    for name, a, b, (size, goal) in zip(row_names, learned.rows, target.rows, norms, strict=True):
        cosine = float(np.sum((a @ matrix) * b))
        error = float(np.linalg.norm(size * a @ matrix - goal * b) / goal) if goal else np.nan
        add("W_out" if name == "readout" else f"W_in {name}", "", "", cosine, error, float(size))
    for layer, assigned in enumerate(best.heads):
        for k, h in enumerate(assigned):
            if h < 0:
                norm = float(target.circuit_norms[layer, k].prod())
                add(f"layer {layer} head", "unmatched", k, np.nan, np.nan, norm)
                continue
            cosines = np.array(
                [
                    np.sum((matrix.T @ a @ matrix) * b)
                    for a, b in zip(
                        learned.circuits[layer, h], target.circuits[layer, k], strict=True
                    )
                ]
            )
            cosines *= np.sign(cosines.sum()) or 1.0
            for name, cosine, norm in zip(
                "AB", cosines, learned.circuit_norms[layer, h], strict=True
            ):
                # Scales are free: the error is what the best one leaves.
                error = float(np.sqrt(max(0.0, 1 - max(cosine, 0.0) ** 2)))
                add(f"layer {layer} {name}", h, k, float(cosine), error, float(norm))
        for h in set(range(learned.circuits.shape[1])) - set(assigned.tolist()):
            norm = float(learned.circuit_norms[layer, h].prod())
            add(f"layer {layer} head", h, "unmatched", np.nan, np.nan, norm)
    for j, i in enumerate(best.order):
        if i >= pair.model.cfg.d_model:
            norm = float(input_map(pair.target)[:, j].norm())
            add("coordinate", "unmatched", pair.names[j], np.nan, np.nan, norm)
        elif j >= pair.reference.cfg.d_model:
            norm = float(input_map(pair.learned)[:, i].norm())
            add("coordinate", i, "unmatched", np.nan, np.nan, norm)
    return pd.DataFrame(rows)
