r"""Gradient descent written into weights.

von Oswald et al. (arXiv 2212.07677): coordinates are the features f (const and/or
x) and the residual e = y - w·f. A head that reads f on both sides and writes
-(η/N) e on e performs e_j <- e_j - (η/N) Σ_i e_i f_i·f_j, one step on the loss
(1/2N) Σ e_i². At the query y = 0, so e is minus the prediction there. GD++ also
moves the features, f <- (I - γ FᵀF/N) f. A step size that is a matrix in feature
space preconditions (Ahn et al., arXiv 2306.00297).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import blank, covariate_names


def gradient_descent(
    n_steps: int,
    step_size: float | Sequence[float] | Tensor,
    n_context: int = 20,
    n_covariates: int = 1,
    intercept: bool = True,
    initial_weights: Sequence[float] | Tensor | None = None,
    gamma: float | Sequence[float] = 0.0,
    exclude_query: bool = True,
    dtype: torch.dtype = torch.float64,
) -> LinearAttentionTransformer:
    """A transformer whose layers are gradient-descent steps on (1/2N) Σ (y - w·f)².

    Features f are [1, x] with an intercept and x without; d_model = number of features + 1,
    one head, no normalization, query readout.

    Args:
        n_steps: number of layers, one step each.
        step_size: η of the mean loss, a number, one per step ([n_steps]), or a
            preconditioner per step ([n_steps, f, f]) in feature space.
        n_context: N.
        n_covariates: p.
        intercept: include the constant feature.
        initial_weights: w_0, [f]; zeros by default.
        gamma: γ of GD++, one number or one per step: f <- (I - γ FᵀF/N) f beside each step.
        exclude_query: False reproduces models that keep the query row among the keys.
        dtype: dtype of the weights.

    Raises:
        ValueError: on n_steps < 1 or shapes that do not fit.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps={n_steps} must be at least 1")
    names = (*("const",) * intercept, *covariate_names(n_covariates))
    n_features = len(names)
    steps = _per_step_matrices(step_size, n_steps, n_features)
    gammas = torch.as_tensor(gamma, dtype=torch.float64)
    if gammas.ndim > 1 or (gammas.ndim == 1 and len(gammas) != n_steps):
        raise ValueError(f"gamma has shape {tuple(gammas.shape)}; give a number or [{n_steps}]")
    gammas = gammas.expand(n_steps)

    model = blank(
        ModelConfig(
            d_model=n_features + 1,
            n_layers=n_steps,
            n_heads=1,
            n_context=n_context,
            n_covariates=n_covariates,
            normalization="none",
            readout="query",
            exclude_query=exclude_query,
        )
    )
    columns = range(0 if intercept else 1, n_covariates + 1)
    for feature, column in enumerate(columns):
        model.embed.W_E[column, feature] = 1
    model.embed.W_E[-1, -1] = 1
    if initial_weights is not None:
        weights = torch.as_tensor(initial_weights, dtype=torch.float64)
        if weights.shape != (n_features,):
            raise ValueError(
                f"initial_weights has shape {tuple(weights.shape)}, expected ({n_features},): "
                f"one per feature {names}"
            )
        for feature, column in enumerate(columns):
            model.embed.W_E[column, -1] = -weights[feature]

    features = torch.eye(n_features, dtype=torch.float64)
    for block, step, step_gamma in zip(model.blocks, steps, gammas, strict=True):
        if step_gamma and not torch.equal(step, step[0, 0] * features):
            raise ValueError("gamma and a matrix step size do not combine; use one of them")
        scalar = step[0, 0] if step_gamma else 1.0
        # e is scaled by the value map, so that GD++ can share the head.
        block.attn.W_Q[0, :-1, :-1] = features if step_gamma else step
        block.attn.W_K[0, :-1, :-1] = features
        block.attn.W_V[0, :-1, :-1] = -step_gamma / n_context * features
        block.attn.W_V[0, -1, -1] = -scalar / n_context
    model.unembed.W_U[-1, -1] = -1
    return model.to(dtype)


def _per_step_matrices(
    step_size: float | Sequence[float] | Tensor, n_steps: int, n_features: int
) -> Tensor:
    """Step sizes as [n_steps, f, f]."""
    steps = torch.as_tensor(step_size, dtype=torch.float64)
    eye = torch.eye(n_features, dtype=torch.float64)
    if steps.ndim == 0 or steps.shape == (n_steps,):
        return steps.expand(n_steps)[:, None, None] * eye
    if steps.shape == (n_steps, n_features, n_features):
        return steps
    raise ValueError(
        f"step_size has shape {tuple(steps.shape)}; give a number, [{n_steps}] or "
        f"[{n_steps}, {n_features}, {n_features}]"
    )
