"""What an l1 penalty has left of a model: exact zeros and active heads."""

from __future__ import annotations

from models.architecture.transformer import LinearAttentionTransformer
from probe.symmetry.heads import heads
from probe.symmetry.weights import weights_of

# A head this much weaker than the strongest of its layer is switched off.
ACTIVE = 1e-3


def exact_zeros(model: LinearAttentionTransformer) -> int:
    """Number of parameters that are exactly zero."""
    return sum(int((value == 0).sum()) for value in model.parameters())


def active_heads(model: LinearAttentionTransformer) -> list[int]:
    """Heads that contribute, per layer.

    A head is active if its strength (`probe.symmetry.heads.Heads`) is at least 1e-3 of that of
    the strongest head of its layer.
    """
    strength = heads(weights_of(model), model.cfg).strength
    strongest = strength.max(dim=1, keepdim=True).values
    return (strength > ACTIVE * strongest).sum(dim=1).tolist()
