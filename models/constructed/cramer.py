r"""Least squares of two covariates by Cramer's rule: one division, by the determinant.

The rival of Gaussian elimination (`models.closed_form`) at the same depth, derived here.
With V the covariance of the covariates, C their covariance with y and x centred,

    ŷ = ȳ + Σ_j x_j (adj(V) C)_j / det V = ȳ + Σ_j (1/det V) x_j mean(z_j y),

    z_1 = V_22 x_1 - V_12 x_2,    z_2 = V_11 x_2 - V_12 x_1,    mean(z_1 x_1) = det V.

The z_j are polynomials, so a layer can write them without dividing by anything that
varies, and one division is left for the end. L = 3 layers, H = 2 heads, D = 7 coordinates:
x_1, x_2, y, z_1, z_2, const, spare; embedding, centring, the half difference h and the
balanced value maps are those of `models.constructed`.

*Layer 1 multiplies.* Where only constants are written on (const, spare), layer norm divides
by a constant. One head suffices for z_1 and z_2, because adj(V) = J V Jᵀ for the rotation J
by 90°: its QK circuit is the antisymmetric x_1 x_2ᵀ - x_2 x_1ᵀ, which reads
x_1 S_2c - x_2 S_1c out of the state S = QᵀQ, and its value map sends c = x_2 to z_1 and
c = x_1 to -z_2. The other head reads h everywhere and writes h³ on (const, spare).

*Layer 2 divides.* One head with the QK circuit x_1 z_1ᵀ + x_2 z_2ᵀ writes -Σ_j x_j S(z_j, y)
on y, the other reads h at the query, z_1 at the key and writes S(z_1, x_1) ∝ det V on
(const, spare).

What limits it: p = 2, because adj(V) has degree p - 1 in V and this is one layer of
products; Faddeev-LeVerrier, M <- V M - (tr V M / k) I, would take one layer more for each
further covariate, as elimination does, but some p² heads in each (the products of a trace
and a covariate do not factor). And D = 7: the last layer reads x_j along with z_j, y and a
constant. No construction with D = p + 3 = 5 that divides by det V alone is known here, and
no proof that there is none.

Fraction-free elimination (`fraction_free_form`)
------------------------------------------------
D = 5 is enough, with H = 5, to divide once and at the end by a multiple of det V. A branch
writes nothing along (1, .., 1), so the raw x_2, embedded there as well, stays readable as
the mean over coordinates; the others are read less that mean. Layer 1 turns x_2 into z_2 and
x_1 into C_1 x_1 (three heads of products, two that remove the old values), layer 2 divides

    x_1 C_1 S(z_2, x_2) + z_2 S(z_2, y)  =  V_11 det V (ŷ - ȳ)   by   S(z_2, z_2)  =  V_11 det V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import (
    HEADROOM,
    Basis,
    blank,
    centre,
    coordinate_names,
    n_keys,
    set_head,
)

COORDINATES = ("x_1", "x_2", "y", "z_1", "z_2", "const", "spare")


def determinant_form(
    n_context: int,
    scale: float = 100.0,
    exclude_query: bool = False,
    dtype: torch.dtype = torch.float64,
) -> LinearAttentionTransformer:
    """The transformer that computes least squares of two covariates by Cramer's rule.

    Args:
        n_context: N, at least 4.
        scale: R, how small signals are beside constants; the error falls as R^-2.
        exclude_query: keep the query row out of keys and values; exact up to R.
        dtype: dtype of the weights.

    Raises:
        ValueError: if `n_context` is below 4 or `scale` not positive and finite.
    """
    basis = Basis(COORDINATES)
    model = _centred(basis, n_context, scale, exclude_query, n_heads=2)
    x_1, x_2, y, z_1, z_2 = (basis[name] for name in COORDINATES[:5])
    h = basis.half_difference

    multiply = model.blocks[1].attn
    clean = 1 + basis.gain  # the half difference before this layer
    size = HEADROOM / n_keys(model)
    # Makes the coordinates z_j / R, whatever the constants are.
    products = size * scale**2 * clean**3 / basis.gain
    value = torch.outer(x_2, basis.write("z_1")) - torch.outer(x_1, basis.write("z_2"))
    set_head(
        multiply,
        0,
        query=torch.stack([x_1, x_2]),
        key=torch.stack([x_2, -x_1]),
        value=products * value,
    )
    set_head(multiply, 1, query=h, key=h, value=size * torch.outer(h, basis.divisor))

    divide = model.blocks[2].attn
    clean = 1 + 2 * basis.gain
    size = HEADROOM * scale**2 / n_keys(model)
    value = -clean / basis.gain * torch.outer(y, basis.write("y"))
    set_head(
        divide,
        0,
        query=torch.stack([x_1, x_2]),
        key=torch.stack([z_1, z_2]),
        value=size * value,
    )
    set_head(divide, 1, query=h, key=z_1, value=size * torch.outer(x_1, basis.divisor))

    model.unembed.W_U[-1] = -scale * y
    return model.to(dtype)


def fraction_free_form(
    n_context: int,
    scale: float = 100.0,
    exclude_query: bool = False,
    dtype: torch.dtype = torch.float64,
) -> LinearAttentionTransformer:
    """The transformer that eliminates x_1 without dividing, then divides by V_11 det V.

    Args:
        n_context: N, at least 4.
        scale: R, how small signals are beside constants; the error falls as R^-2.
        exclude_query: keep the query row out of keys and values; exact up to R.
        dtype: dtype of the weights.

    Raises:
        ValueError: if `n_context` is below 4 or `scale` not positive and finite.
    """
    basis = _BesideMean(coordinate_names(2))
    model = _centred(basis, n_context, scale, exclude_query, n_heads=5)
    raw = torch.full((basis.d_model,), 1 / basis.d_model, dtype=torch.float64)
    for row, name in enumerate(("x_1", "x_2", "y"), start=1):
        model.embed.W_E[row] = basis.write(name) / scale
    model.embed.W_E[2] += 1 / scale
    x_1, x_2, y = (basis[name] for name in ("x_1", "x_2", "y"))
    to_x_1, to_x_2, to_y = (basis.write(name) for name in ("x_1", "x_2", "y"))
    h = basis.half_difference

    multiply = model.blocks[1].attn
    clean = 1 + basis.gain
    size = HEADROOM / n_keys(model)
    products = size * scale**2 * clean**3 / basis.gain
    both = torch.outer(y, to_x_1) - torch.outer(x_2, to_x_2)
    set_head(multiply, 0, query=x_2, key=x_1, value=products * torch.outer(x_1, to_x_2))
    set_head(multiply, 1, query=x_1, key=x_1, value=products * both)
    remove = -size * clean / basis.gain
    set_head(multiply, 2, query=x_1, key=h, value=remove * torch.outer(h, to_x_1))
    set_head(multiply, 3, query=x_2, key=h, value=remove * torch.outer(h, to_x_2))
    set_head(multiply, 4, query=h, key=h, value=size * torch.outer(h, basis.divisor))

    divide = model.blocks[2].attn
    size = HEADROOM * scale**2 / n_keys(model)
    numerator = -size * (1 + 2 * basis.gain) / basis.gain
    set_head(divide, 0, query=x_2, key=x_2, value=numerator * torch.outer(y, to_y))
    set_head(divide, 1, query=x_1, key=x_2, value=numerator * torch.outer(raw, to_y))
    set_head(divide, 2, query=h, key=x_2, value=size * torch.outer(x_2, basis.divisor))

    model.unembed.W_U[-1] = -scale * y
    return model.to(dtype)


class _BesideMean(Basis):
    """Reads coordinates less their mean, where another signal stands."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name) - 1 / self.d_model


def _centred(
    basis: Basis, n_context: int, scale: float, exclude_query: bool, n_heads: int
) -> LinearAttentionTransformer:
    """Three layers for two covariates, the first of them written."""
    if n_context < 4:
        raise ValueError(f"n_context={n_context} is too small for two covariates; give 4 or more")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale={scale} must be positive and finite; try 100")
    model = blank(
        ModelConfig(
            d_model=basis.d_model,
            n_layers=3,
            n_heads=n_heads,
            n_context=n_context,
            n_covariates=2,
            readout="query",
            exclude_query=exclude_query,
        )
    )
    centre(model, basis, scale)
    return model
