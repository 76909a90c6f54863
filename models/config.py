"""Frozen descriptions of what is studied: the prompts and the model.

Both configurations refuse unknown keys and out-of-range values when they are
made, so that nothing downstream has to check them again.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Normalization = Literal["branch", "post", "none"]
Readout = Literal["flatten", "query"]
XDistribution = Literal["normal", "uniform"]


# What the modules and hook points of one block take beside its weights.
_BYTES_PER_BLOCK = 50_000


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PromptConfig(_Frozen):
    """Distribution of in-context regression prompts (paper eqs. 1-2).

    Each prompt draws its own line: ``y_n = theta_0 + theta · x_n + noise`` with
    every theta ~ N(0, 1). Covariates are ``x = mean + scale · z``.

    Attributes:
        n_context: N, the number of (x, y) samples before the query; at least p + 2.
        n_covariates: p.
        noise_std: standard deviation of the noise on y.
        x_mean_std: the per-prompt mean of each covariate ~ N(0, x_mean_std²).
        x_log_scale: the per-prompt log scale of each covariate
            ~ U(-x_log_scale, x_log_scale).
        x_distribution: law of z, ``"normal"`` (standard) or ``"uniform"`` on `x_bounds`.
        x_bounds: (low, high) of the uniform law; unused for ``"normal"``.
        x_correlation: for p >= 2 and the normal law, each prompt draws
            rho ~ U(-x_correlation, x_correlation); covariates j and k then have
            correlation rho^|j-k|.
    """

    n_context: int = Field(20, ge=3)
    n_covariates: int = Field(1, ge=1)
    noise_std: float = Field(0.1, ge=0)
    x_mean_std: float = Field(0.0, ge=0)
    x_log_scale: float = Field(0.0, ge=0, le=300)
    x_distribution: XDistribution = "normal"
    x_bounds: tuple[float, float] = (0.0, 1.0)
    x_correlation: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> PromptConfig:
        if self.n_context < self.n_covariates + 2:
            raise ValueError(
                f"n_context={self.n_context} is too small: least squares with "
                f"{self.n_covariates} covariate(s) and an intercept needs at least "
                f"{self.n_covariates + 2} context samples; raise n_context"
            )
        low, high = self.x_bounds
        if not low < high:
            raise ValueError(f"x_bounds={self.x_bounds} must be (low, high) with low < high")
        if self.x_correlation and self.n_covariates < 2:
            raise ValueError(
                f"x_correlation={self.x_correlation} needs n_covariates >= 2, "
                f"got {self.n_covariates}; set it to 0"
            )
        if self.x_correlation and self.x_distribution != "normal":
            raise ValueError(
                f"x_correlation={self.x_correlation} is defined for x_distribution='normal', "
                f"got {self.x_distribution!r}; set it to 0"
            )
        return self


class ModelConfig(_Frozen):
    """Shape of a linear-attention transformer.

    Attributes:
        d_model: D, width of the residual stream.
        n_layers: L.
        n_heads: H, heads per layer, each with full D x D maps.
        n_context: N, context samples; fixes the prompt length for the flatten readout.
        n_covariates: p; a prompt row is ``[1, x_1..x_p, y]``.
        normalization: ``"branch"``: Q + LN(attention); ``"post"``: LN(Q + attention);
            ``"none"``: Q + attention.
        norm_affine: whether layer norm has a gain and a bias.
        norm_eps: added to the variance inside layer norm.
        readout: ``"flatten"`` reads all (N+1)·D values, ``"query"`` the last token only.
        exclude_query: drop the query row from keys and values.
    """

    d_model: int = Field(4, ge=1)
    n_layers: int = Field(2, ge=1)
    n_heads: int = Field(2, ge=1)
    n_context: int = Field(20, ge=1)
    n_covariates: int = Field(1, ge=1)
    normalization: Normalization = "branch"
    norm_affine: bool = False
    norm_eps: float = Field(1e-5, ge=0)
    readout: Readout = "flatten"
    exclude_query: bool = False

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.norm_affine and self.normalization == "none":
            raise ValueError("norm_affine=True needs a normalization other than 'none'")
        return self

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in the order of the forward pass.

        The readout weight is ``[positions read, d_model]``: all N+1 positions for
        ``"flatten"``, one for ``"query"``.
        """
        d, h = self.d_model, self.n_heads
        shapes: dict[str, tuple[int, ...]] = {
            "embed.W_E": (2 + self.n_covariates, d),
            "embed.b_E": (d,),
        }
        for layer in range(self.n_layers):
            for name in ("W_Q", "W_K", "W_V"):
                shapes[f"blocks.{layer}.attn.{name}"] = (h, d, d)
            if self.norm_affine:
                shapes[f"blocks.{layer}.ln1_post.w"] = (d,)
                shapes[f"blocks.{layer}.ln1_post.b"] = (d,)
        positions = self.n_context + 1 if self.readout == "flatten" else 1
        shapes["unembed.W_U"] = (positions, d)
        shapes["unembed.b_U"] = ()
        return shapes

    @property
    def n_parameters(self) -> int:
        """Total number of scalars in the model (without listing the parameters)."""
        d = self.d_model
        per_layer = 3 * self.n_heads * d * d + 2 * d * self.norm_affine
        positions = self.n_context + 1 if self.readout == "flatten" else 1
        return (3 + self.n_covariates) * d + self.n_layers * per_layer + positions * d + 1

    def require_memory(self, bytes_per_scalar: int = 4) -> None:
        """Refuse a model that cannot be held in this machine's memory.

        Raises:
            ValueError: naming the size asked for and the size at hand.
        """
        needed = self.n_parameters * bytes_per_scalar + self.n_layers * _BYTES_PER_BLOCK
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise ValueError(
                f"a model with d_model={self.d_model}, n_layers={self.n_layers}, "
                f"n_heads={self.n_heads}, n_context={self.n_context} has {self.n_parameters:,} "
                f"parameters and needs {needed / 2**30:,.1f} GiB; this machine has "
                f"{memory / 2**30:,.1f} GiB. Choose smaller sizes"
            )
