r"""Named quantities of tokens: what a coordinate may hold if the algorithm runs.

Shapes: b prompts, t = N + 1 tokens, p covariates. Elimination of x_1, x_2, .. (Frisch-Waugh)
keeps after k pivots the residuals

    x̃_j^(k) = x_j - x̄_j - Σ_{i<=k} F_ij x̃_i^(i-1),   ỹ^(k) = y - ȳ - Σ_{i<=k} G_i x̃_i^(i-1)

with F_kj = cov(x̃_k, x_j) / var(x̃_k), G_k = cov(x̃_k, y) / var(x̃_k), and removes the terms
F_kj x̃_k, G_k x̃_k in layer k. At the query, where the prompt has y = 0, the same formulas hold
with that 0. For p = 1: x̃_1 = x - x̄ and G_1 x̃_1 = (C/V)(x - x̄).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.tasks.linear_regression import Prompts, eliminate

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Quantities:
    """Values of named quantities at every token.

    Attributes:
        names: in words, such as "x", "x̄", "(C/V)(x−x̄)"; the constant is "1".
        values: [b, t, quantity].
    """

    names: tuple[str, ...]
    values: Tensor


def stream_quantities(prompts: Prompts, layer: int, order: tuple[int, ...]) -> Quantities:
    """What the stream may hold after a block.

    Block 0 centres: {1, x_j, y, x̄_j, ȳ}. Block k adds the terms that pivots 1 .. k removed.

    Args:
        prompts: the prompts.
        layer: the block.
        order: covariates (from 0) in the order of elimination.
    """
    steps = EliminationSteps(prompts, order)
    names, values = _raw(prompts)
    if layer:
        for k in range(1, min(layer, prompts.n_covariates) + 1):
            for name, value in steps.terms(k):
                names.append(name)
                values.append(value)
    return _quantities(names, values)


def added_quantities(prompts: Prompts, layer: int, order: tuple[int, ...]) -> Quantities:
    """What the layer norm of a block may write.

    Layer 0: {1, x_j, y, x̄_j, ȳ}. Layer k: {1, the terms pivot k removes, the residuals
    before it, its slopes}; for p = 1: {1, (C/V)(x - x̄), x - x̄, y - ȳ, C/V}.
    """
    if layer == 0:
        return _quantities(*_raw(prompts))
    k = min(layer, prompts.n_covariates)
    steps = EliminationSteps(prompts, order)
    columns = [*steps.terms(k), *steps.residuals(k - 1), *steps.slopes(k)]
    tokens = prompts.inputs.shape[:2]
    names, values = ["1"], [torch.ones(tokens, dtype=torch.float64)]
    for name, value in columns:
        names.append(name)
        values.append(value)
    return _quantities(names, values)


class EliminationSteps:
    """Elimination of the covariates in a given order, at every token."""

    def __init__(self, prompts: Prompts, order: tuple[int, ...]):
        self.order, self.p = order, prompts.n_covariates
        tokens = prompts.tokens.double()
        x, y = tokens[..., list(order)], tokens[..., -1]
        solved = eliminate(x.permute(2, 1, 0), y[:, :-1].T)
        self.factors, self.gains = solved.factors, solved.partial_slopes
        # residual[k]: x̃^(k) [b, t, p] and ỹ^(k) [b, t] after k pivots.
        rest_x = x - solved.x_mean.T[:, None]
        rest_y = y - solved.y_mean[:, None]
        self._residuals = [(rest_x, rest_y)]
        for k in range(self.p):
            pivot = rest_x[..., k]
            factors = self.factors[k].T[:, None]
            rest_y = rest_y - self.gains[k][:, None] * pivot
            rest_x = rest_x - factors * pivot[..., None]
            self._residuals.append((rest_x, rest_y))

    def terms(self, k: int) -> list[tuple[str, Tensor]]:
        """What pivot k removes: G_k x̃_k, and F_kj x̃_k for the later covariates."""
        pivot = self._residuals[k - 1][0][..., k - 1]
        held = self._residual_name(k - 1, k - 1)
        named = [
            (f"({self._factor_name(k, j)})({held})", self.factors[k - 1, j][:, None] * pivot)
            for j in range(k, self.p)
        ]
        named.append((f"({self._gain_name(k)})({held})", self.gains[k - 1][:, None] * pivot))
        return named

    def residuals(self, k: int) -> list[tuple[str, Tensor]]:
        """x̃_j and ỹ after k pivots, covariates that are still there."""
        rest_x, rest_y = self._residuals[k]
        named = [(self._residual_name(j, k), rest_x[..., j]) for j in range(k, self.p)]
        given = "".join(f"·{self._covariate(i)}" for i in range(k))
        return [*named, ("y−ȳ" if k == 0 else f"ỹ{given}", rest_y)]

    def slopes(self, k: int) -> list[tuple[str, Tensor]]:
        """G_k and F_kj, the same at every token."""
        tokens = self._residuals[0][1]
        named = [
            (self._factor_name(k, j), self.factors[k - 1, j][:, None].expand_as(tokens))
            for j in range(k, self.p)
        ]
        return [*named, (self._gain_name(k), self.gains[k - 1][:, None].expand_as(tokens))]

    def _covariate(self, j: int) -> str:
        return "x" if self.p == 1 else f"x{str(self.order[j] + 1).translate(_SUBSCRIPTS)}"

    def _residual_name(self, j: int, k: int) -> str:
        name = self._covariate(j)
        if k == 0:
            return f"{name}−x̄{name[1:]}"
        return f"x̃{name[1:]}" + "".join(f"·{self._covariate(i)}" for i in range(k))

    def _gain_name(self, k: int) -> str:
        if self.p == 1:
            return "C/V"
        return f"G{str(self.order[k - 1] + 1).translate(_SUBSCRIPTS)}"

    def _factor_name(self, k: int, j: int) -> str:
        pair = f"{self.order[k - 1] + 1}{self.order[j] + 1}".translate(_SUBSCRIPTS)
        return f"F{pair}"


def _raw(prompts: Prompts) -> tuple[list[str], list[Tensor]]:
    """1, x_j, y, x̄_j, ȳ at every token."""
    rows = prompts.tokens.double()
    p = prompts.n_covariates
    means = prompts.x_mean.reshape(len(prompts), p).double()
    marks = [""] if p == 1 else [str(j + 1).translate(_SUBSCRIPTS) for j in range(p)]
    tokens = torch.ones_like(rows[..., 0])
    names = ["1", *(f"x{m}" for m in marks), "y", *(f"x̄{m}" for m in marks), "ȳ"]
    values = [tokens, *rows.unbind(-1)]
    values += [means[:, j, None].expand_as(tokens) for j in range(p)]
    values.append(prompts.y_mean.double()[:, None].expand_as(tokens))
    return names, values


def _quantities(names: list[str], values: list[Tensor]) -> Quantities:
    return Quantities(tuple(names), torch.stack(values, -1))
