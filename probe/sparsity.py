"""What an l1 penalty has left of a model: exact zeros and active heads."""

from __future__ import annotations

from models.transformer import LinearAttentionTransformer

# A head this much weaker than the strongest of its layer is switched off.
ACTIVE = 1e-3


def exact_zeros(model: LinearAttentionTransformer) -> int:
    """Number of parameters that are exactly zero."""
    return sum(int((value == 0).sum()) for value in model.parameters())


def active_heads(model: LinearAttentionTransformer) -> list[int]:
    """Heads that contribute, per layer.

    The contribution of head h is ‖A_h‖·‖B_h‖ (Frobenius; A_h = W_Q W_Kᵀ, B_h = W_V): neither
    factor means anything alone, since one can be scaled up and the other down. Under the
    branch norm, rows of B_h count without their mean, which layer norm removes. A head is
    active if it contributes at least 1e-3 of what the strongest head of its layer does.
    """
    counts = []
    for block in model.blocks:
        attn = block.attn
        qk = attn.W_Q @ attn.W_K.transpose(1, 2)
        ov = attn.W_V
        if model.cfg.normalization == "branch":
            ov = ov - ov.mean(dim=2, keepdim=True)
        strength = qk.norm(dim=(1, 2)) * ov.norm(dim=(1, 2))
        counts.append(int((strength > ACTIVE * strength.max()).sum()))
    return counts
