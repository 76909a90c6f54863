r"""Parametrisations of linear attention from the literature, as models of this package.

All three papers stack tokens e_j = (x_j, y_j) as columns of E [p+1, N+1], the query
being (u, 0), and use attention without softmax or norm. This package writes tokens
as rows and matrices to their right, so every matrix below is transposed on loading.
The constant column of a prompt is not read: these models have no intercept.

Ahn et al. (arXiv 2306.00297), eq. 3, with M = diag(I_N, 0) hiding the query:

    E <- E + (1/N) P E M (Eᵀ Q E),    prediction = -E[y, query].

von Oswald et al. (arXiv 2212.07677), eq. 1, keys and values from the context only:

    e_j <- e_j + Σ_h P_h V_h (Σ_i e_i e_iᵀ) K_hᵀ Q_h e_j,    prediction = -e_query[y].

Zhang, Frei and Bartlett (JMLR 25:49), eq. 3, the query among the keys:

    E <- E + W_PV E (Eᵀ W_KQ E) / N,    prediction = E[y, query].

The optima that the papers derive are functions beside the loaders. For covariates
with covariance Λ, and prompts of N noiseless samples with slopes ~ N(0, I), both
Ahn et al. (theorem 1) and Zhang et al. (theorem 4.1) predict with one preconditioned
gradient step from zero,

    ŷ = uᵀ Γ⁻¹ (1/N) Σ_i y_i x_i,    Γ = (1 + 1/N) Λ + (tr Λ / N) I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer


def from_ahn(P: Tensor, Q: Tensor, n_context: int) -> LinearAttentionTransformer:
    """Load the matrices of Ahn et al.

    Args:
        P: value-projection matrices, [n_layers, p+1, p+1].
        Q: key-query matrices, [n_layers, p+1, p+1].
        n_context: N, in the factor 1/N.

    Raises:
        ValueError: on other shapes.
    """
    P, Q = _stacks(P=P, Q=Q)
    eye = torch.eye(P.shape[-1], dtype=torch.float64)
    heads = {
        "W_Q": Q.mT[:, None],
        "W_K": eye.expand_as(Q)[:, None],
        "W_V": P.mT[:, None] / n_context,
    }
    return _load(heads, n_context, exclude_query=True, readout=-eye[-1])


def from_von_oswald(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    n_context: int,
    initial_weights: Tensor | None = None,
) -> LinearAttentionTransformer:
    """Load the matrices of von Oswald et al.

    Args:
        query: [n_layers, n_heads, p+1, p+1]; `key`, `value` and `projection` likewise.
        key: see `query`.
        value: see `query`.
        projection: see `query`; the paper's constructions hold η/N here.
        n_context: N.
        initial_weights: W_0, [p]. The paper starts the query token at (u, -W_0 u); here it
            starts at (u, 0) as in every prompt and the readout adds W_0 u, which is the
            same while no layer changes x. Zero by default.

    Raises:
        ValueError: on other shapes.
    """
    query, key, value, projection = _stacks(
        n_axes=4, query=query, key=key, value=value, projection=projection
    )
    width = query.shape[-1]
    readout = torch.zeros(width, dtype=torch.float64)
    readout[-1] = -1
    if initial_weights is not None:
        weights = torch.as_tensor(initial_weights, dtype=torch.float64)
        if weights.shape != (width - 1,):
            raise ValueError(
                f"initial_weights has shape {tuple(weights.shape)}, expected ({width - 1},): "
                f"one per covariate"
            )
        readout[:-1] = weights
    heads = {"W_Q": query.mT, "W_K": key.mT, "W_V": (projection @ value).mT}
    return _load(heads, n_context, exclude_query=True, readout=readout)


def from_zhang(KQ: Tensor, PV: Tensor, n_context: int) -> LinearAttentionTransformer:
    """Load the merged matrices of Zhang, Frei and Bartlett.

    Args:
        KQ: W_KQ, [p+1, p+1]: their model has one layer.
        PV: W_PV, [p+1, p+1].
        n_context: length of the prompts to predict on, in the factor 1/N.

    Raises:
        ValueError: on other shapes.
    """
    KQ, PV = _stacks(n_axes=2, KQ=KQ, PV=PV)
    eye = torch.eye(KQ.shape[-1], dtype=torch.float64)
    heads = {
        "W_Q": KQ.mT[None, None],
        "W_K": eye[None, None],
        "W_V": PV.mT[None, None] / n_context,
    }
    return _load(heads, n_context, exclude_query=False, readout=eye[-1])


def ahn_optimum(covariance: Tensor, n_context: int) -> tuple[Tensor, Tensor]:
    """P = diag(0, 1) and Q = -diag(Γ⁻¹, 0) of Ahn et al., theorem 1: [1, p+1, p+1] each.

    Args:
        covariance: Λ, [p, p].
        n_context: N the model is trained on.

    Raises:
        ValueError: if `covariance` is not symmetric positive definite.
    """
    inverse = torch.linalg.inv(_gamma(covariance, n_context))
    return _corner(1.0, len(inverse))[None], -_block(inverse)[None]


def von_oswald_step(
    step_size: float, n_context: int, initial_weights: Tensor
) -> dict[str, Tensor | int]:
    """One gradient step on (1/2N) Σ (y - W x)² from W_0, proposition 1 of von Oswald et al.

    Args:
        step_size: η.
        n_context: N.
        initial_weights: W_0, [p].

    Returns:
        The arguments of `from_von_oswald`, for one layer and one head.
    """
    weights = torch.as_tensor(initial_weights, dtype=torch.float64)
    width = len(weights) + 1
    reads_x = _block(torch.eye(width - 1, dtype=torch.float64))
    value = -_corner(1.0, width - 1)
    value[-1, :-1] = weights
    projection = step_size / n_context * torch.eye(width, dtype=torch.float64)
    return {
        "query": reads_x[None, None],
        "key": reads_x[None, None],
        "value": value[None, None],
        "projection": projection[None, None],
        "n_context": n_context,
        "initial_weights": weights,
    }


def zhang_optimum(covariance: Tensor, n_context: int) -> tuple[Tensor, Tensor]:
    """W_KQ and W_PV that gradient flow reaches, theorem 4.1 of Zhang et al.: [p+1, p+1] each.

    Args:
        covariance: Λ, [p, p].
        n_context: N the model is trained on; it may be used at another length.

    Raises:
        ValueError: if `covariance` is not symmetric positive definite.
    """
    inverse = torch.linalg.inv(_gamma(covariance, n_context))
    # The flow keeps both matrices at the same norm; only their product is a prediction.
    balance = float(inverse.square().sum() ** 0.25)
    return _block(inverse) / balance, _corner(balance, len(inverse))


def _gamma(covariance: Tensor, n_context: int) -> Tensor:
    covariance = torch.as_tensor(covariance, dtype=torch.float64)
    square = covariance.ndim == 2 and covariance.shape[0] == covariance.shape[1]
    if not square or not torch.equal(covariance, covariance.mT):
        raise ValueError(
            f"covariance of shape {tuple(covariance.shape)} must be a symmetric [p, p] matrix"
        )
    smallest = float(torch.linalg.eigvalsh(covariance)[0])
    if not smallest > 0:
        raise ValueError(
            f"covariance has the eigenvalue {smallest:.3g}; it must be positive definite"
        )
    eye = torch.eye(len(covariance), dtype=torch.float64)
    return (1 + 1 / n_context) * covariance + covariance.trace() / n_context * eye


def _block(matrix: Tensor) -> Tensor:
    """diag(matrix, 0), [p+1, p+1]."""
    return torch.nn.functional.pad(matrix, (0, 1, 0, 1))


def _corner(value: float, n_covariates: int) -> Tensor:
    """diag(0, value), [p+1, p+1]."""
    result = torch.zeros(n_covariates + 1, n_covariates + 1, dtype=torch.float64)
    result[-1, -1] = value
    return result


def _stacks(n_axes: int = 3, **matrices: Tensor) -> list[Tensor]:
    """Float64 copies of square matrices of one shape."""
    stacks = [torch.as_tensor(value, dtype=torch.float64) for value in matrices.values()]
    shape = tuple(stacks[0].shape)
    square = len(shape) == n_axes and shape[-1] == shape[-2] >= 2
    if not square or any(tuple(stack.shape) != shape for stack in stacks):
        axes = ", ".join((*("n_layers", "n_heads")[: n_axes - 2], "p+1", "p+1"))
        found = ", ".join(
            f"{name} {tuple(stack.shape)}" for name, stack in zip(matrices, stacks, strict=True)
        )
        raise ValueError(f"shapes do not fit: {found}; expected the same [{axes}] for each")
    return stacks


def _load(
    heads: dict[str, Tensor], n_context: int, exclude_query: bool, readout: Tensor
) -> LinearAttentionTransformer:
    """A float64 model with tokens (x, y): weights [n_layers, n_heads, d, d], readout [d]."""
    n_layers, n_heads, d_model, _ = heads["W_Q"].shape
    model = LinearAttentionTransformer(
        ModelConfig(
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_context=n_context,
            n_covariates=d_model - 1,
            normalization="none",
            readout="query",
            exclude_query=exclude_query,
        )
    )
    model = model.double().requires_grad_(False)
    model.embed.W_E.copy_(torch.eye(d_model + 1, dtype=torch.float64)[:, 1:])
    for layer, block in enumerate(model.blocks):
        for name, weights in heads.items():
            getattr(block.attn, name).copy_(weights[layer])
    model.unembed.W_U.copy_(readout[None])
    return model
