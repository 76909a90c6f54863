r"""Transformers whose algorithm is known because their weights are written by hand.

The source paper's text at hand (arXiv 2607.15819) stops before its construction;
everything below is derived here.

Closed form by normalization, p covariates (`closed_form`)
----------------------------------------------------------
D = p + 3 residual coordinates, by name: x_1 .. x_p, y, const, spare. L = p + 1
layers, H = 2 heads, branch layer norm without affine map, query-token readout.

*Embedding.* A row [1, x, y] becomes (x / R, y / R, 1, -1). With R large the
signals are small beside the constants.

*Division.* Layer norm over D features maps (s_1 .. s_m, K, -K), whose mean is
zero, to sqrt(D/2) · (s / K, 1, -1) up to O(R^-2), because K dominates the
variance (2 K² + Σ s²) / D. What is written on (const, spare) with opposite signs
is divided into every other coordinate.

*No mean.* Every value map has rows that sum to zero: each signal is written once
on its own coordinate and, halved and negated, on const and on spare. Layer norm
then subtracts no mean from the signals. The price: const and spare each carry
first-order traces of the signals, while their half difference

    h = (const - spare) / 2

stays clean up to O(R^-2). Reading `const` alone would turn the error into
O(1/R), so heads read h. Before layer k it is r_k = 1 + k sqrt(D/2).

*Layer 0 centres.* The head's query reads h (= 1), its key reads h, so that every
row receives the sum over rows of [x/R, y/R, 1, -1]. With n key rows, the value map
sends x_j / R to -(g / n) sqrt(2/D) on x_j, h to +-g / n on (const, spare): layer norm adds
-x̄_j / R to x_j and -ȳ / R to y. Since y = 0 at the query, its row then holds -ȳ / R.

*Layer k = 1 .. p eliminates x_k* from the later covariates and from y (Gaussian
elimination; by Frisch-Waugh this is least squares, whatever the order of the
covariates). With S = QᵀQ the second moments over key rows, one head reads x_k on
both sides and writes -a x_k S_kj on coordinate j, the other reads h at the query
and x_k at the key and writes +-b r_k S_kk on (const, spare). With
a = r_k sqrt(2/D) b, layer norm adds -x_k S_kj / S_kk to coordinate j: the division
by the pivot S_kk, which is n V / R² for p = 1.

*Gradient steps* may stand between centring and elimination. A step γ of GD++ (`descent.py`)
takes every row to x - γ Σ_xx x and y - γ Σ_xy·x, with Σ the covariances over key rows: a
head reads the covariates on both sides and writes on all signals, another reads h on
both sides and writes a constant to divide by. What the step predicts is in y from then
on, and least squares of the rest is least squares of the whole, so that predictions stay
the same for any γ that leaves the covariates independent.

*Readout.* Coordinate y at the query is now -ŷ / R; the readout multiplies by -R.

*Ridge (p = 1).* Head 2 reads x_1 + c h with c = sqrt(λ) / (R r_1) as key and as value.
S between x and h is zero once x is centred, so this adds n λ / R² to n V / R²: the
slope is C / (V + λ), the intercept unpenalised.

Two errors remain: the query row sits inside S unless `exclude_query`, O(1/N) in the
prediction, and the signals sit inside the layer-norm variance, O(R^-2). g and b
are so large that `norm_eps` never matters. In float32 rounding grows with R: the
best R is near 300, with a mean squared error of 1e-9 of the target's variance
(`analyses/construction_error.py` measures it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import (
    HEADROOM,
    Basis,
    blank,
    centre,
    coordinate_names,
    covariate_names,
    n_keys,
    set_head,
)


def closed_form(
    n_context: int,
    n_covariates: int = 1,
    scale: float = 100.0,
    ridge: float = 0.0,
    exclude_query: bool = False,
    dtype: torch.dtype = torch.float64,
    order: Sequence[int] | None = None,
    gradient_steps: Sequence[float] = (),
) -> LinearAttentionTransformer:
    """The transformer that computes least squares in closed form.

    Args:
        n_context: N, the number of context samples.
        n_covariates: p; the model has d_model = p + 3 and p + 1 layers.
        scale: R, how small signals are beside constants; the error falls as R^-2.
        ridge: λ >= 0 added to V (p = 1 only): slope C / (V + λ).
        exclude_query: keep the query row out of keys and values; exact up to R.
        dtype: dtype of the weights.
        order: in which the covariates are eliminated, (2, 1) for x_2 first; as numbered by
            default.
        gradient_steps: γ of each step of GD++ that is taken before the elimination, in units of
            1 / V; one more layer each.

    Raises:
        ValueError: if fewer than p + 2 samples, `scale` not positive and finite, `ridge`
            negative or used with p > 1 or gradient steps, `order` not a permutation of 1 .. p.
    """
    if n_covariates < 1 or n_context < n_covariates + 2:
        raise ValueError(
            f"n_context={n_context}, n_covariates={n_covariates}: least squares with an intercept "
            f"needs n_covariates >= 1 and n_context >= n_covariates + 2"
        )
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale={scale} must be positive and finite; try 100")
    if not (ridge >= 0 and math.isfinite(ridge)):
        raise ValueError(f"ridge={ridge} must be at least 0 and finite")
    if ridge and n_covariates > 1:
        raise ValueError(
            f"ridge={ridge} is for n_covariates=1 only, got {n_covariates}; set it to 0"
        )
    if ridge and len(gradient_steps):
        raise ValueError(f"ridge={ridge} and gradient_steps do not combine; use one of them")
    numbers = range(1, n_covariates + 1)
    order = tuple(numbers) if order is None else tuple(order)
    if sorted(order) != list(numbers):
        raise ValueError(f"order={order} must name each covariate 1 .. {n_covariates} once")

    basis = Basis(coordinate_names(n_covariates))
    model = blank(
        ModelConfig(
            d_model=basis.d_model,
            n_layers=1 + len(gradient_steps) + n_covariates,
            n_heads=2,
            n_context=n_context,
            n_covariates=n_covariates,
            normalization="branch",
            readout="query",
            exclude_query=exclude_query,
        )
    )
    centre(model, basis, scale)
    for layer, step in enumerate(gradient_steps, start=1):
        _gradient_step(model, layer, basis, scale, step)
    eliminated = tuple(f"x_{j}" for j in order)
    for k, pivot in enumerate(eliminated, start=1):
        layer = len(gradient_steps) + k
        attn = model.blocks[layer].attn
        clean = 1 + layer * basis.gain  # the half difference before this layer
        size = HEADROOM * scale**2 / n_keys(model)
        eliminate = torch.zeros(basis.d_model, basis.d_model, dtype=torch.float64)
        for name in (*eliminated[k:], "y"):
            eliminate -= torch.outer(basis[name], basis.write(name)) * clean / basis.gain
        squared = basis[pivot] + math.sqrt(ridge) / (scale * clean) * basis.half_difference
        divide = size * torch.outer(squared, basis.divisor)
        set_head(attn, 0, query=basis[pivot], key=basis[pivot], value=size * eliminate)
        set_head(attn, 1, query=basis.half_difference, key=squared, value=divide)

    model.unembed.W_U[-1] = -scale * basis["y"]
    return model.to(dtype)


def _gradient_step(
    model: LinearAttentionTransformer, layer: int, basis: Basis, scale: float, step: float
) -> None:
    """Write a step of GD++ on all signals; `step` is γ."""
    covariates = covariate_names(model.cfg.n_covariates)
    clean = 1 + layer * basis.gain
    size = HEADROOM / n_keys(model)
    move = torch.stack(
        [torch.outer(basis[name], basis.write(name)) for name in (*covariates, "y")]
    ).sum(0)
    weight = -step * size * clean**3 * scale**2 / basis.gain
    read = torch.stack([basis[name] for name in covariates])
    constant = basis.half_difference
    attn = model.blocks[layer].attn
    set_head(attn, 0, query=read, key=read, value=weight * move)
    set_head(
        attn, 1, query=constant, key=constant, value=size * torch.outer(constant, basis.divisor)
    )
