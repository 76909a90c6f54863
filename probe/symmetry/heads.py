"""The circuits of every head, from weights and config: what all that looks at heads starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from probe.symmetry.weights import attention


@dataclass(frozen=True, eq=False)
class Heads:
    """Circuits of all heads: head h adds Q A_h S B_h, S = QᵀQ.

    Attributes:
        qk: A_h = W_Q W_Kᵀ, [layer, head, D, D].
        ov: B_h = W_V, [layer, head, D, D]. Where a layer norm follows the write (on the branch
            or on the stream) rows count without their part along 1, which the norm subtracts:
            a null write changes nothing here.
    """

    qk: Tensor
    ov: Tensor

    @property
    def strength(self) -> Tensor:
        """‖A_h‖·‖B_h‖ (Frobenius), [layer, head].

        Neither factor means anything alone, since A → cA, B → B/c changes no prediction.
        """
        return self.qk.norm(dim=(-2, -1)) * self.ov.norm(dim=(-2, -1))


def heads(weights: Mapping[str, Tensor], config: ModelConfig) -> Heads:
    """The circuits of a model, differentiable, in the dtype of its weights."""
    query, key, value = (
        torch.stack([weights[attention(layer, name)] for layer in range(config.n_layers)])
        for name in ("W_Q", "W_K", "W_V")
    )
    if config.has_norm:
        value = value - value.mean(dim=-1, keepdim=True)
    return Heads(query @ key.mT, value)
