"""Frozen description of a model: sizes, placement of the norm, readout."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.frozen import Frozen

Normalization = Literal["branch", "post", "none"]
Readout = Literal["flatten", "query"]


# Sizes up to some beyond any memory: a bound keeps numbers in messages readable.
_Size = Annotated[int, Field(ge=1, le=10**15)]
# What the modules and hook points of one block take beside its weights.
_BYTES_PER_BLOCK = 50_000


class ModelConfig(Frozen):
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

    d_model: _Size = 4
    n_layers: _Size = 2
    n_heads: _Size = 2
    n_context: _Size = 20
    n_covariates: _Size = 1
    normalization: Normalization = "branch"
    norm_affine: bool = False
    norm_eps: Annotated[float, Field(ge=0)] = 1e-5
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

    @property
    def has_norm(self) -> bool:
        """Whether a layer norm follows what heads write: it divides, and subtracts the mean."""
        return self.normalization != "none"

    @property
    def norms_writes(self) -> bool:
        """Whether the norm stands on what heads write, before that is added to the stream."""
        return self.normalization == "branch"

    @property
    def norms_stream(self) -> bool:
        """Whether the norm stands on the whole stream, after what heads write was added."""
        return self.normalization == "post"

    @property
    def stream_is_centred(self) -> bool:
        """Whether the stream has nothing along (1, .., 1) after a block."""
        return self.norms_stream and not self.norm_affine

    @property
    def any_length(self) -> bool:
        """Whether N is free: the query readout reads one row, whatever their number."""
        return self.readout == "query"

    def require_memory(self, bytes_per_scalar: int = 4) -> None:
        """Refuse a model that cannot be held in this machine's memory.

        Raises:
            ValueError: naming the size asked for and the size at hand.
        """
        needed = self.n_parameters * bytes_per_scalar + self.n_layers * _BYTES_PER_BLOCK
        memory = machine_memory()
        if needed > memory:
            raise ValueError(
                f"a model with d_model={self.d_model}, n_layers={self.n_layers}, "
                f"n_heads={self.n_heads}, n_context={self.n_context} has {self.n_parameters:,} "
                f"parameters and needs {needed / 2**30:,.1f} GiB; this machine has "
                f"{memory / 2**30:,.1f} GiB. Choose smaller sizes"
            )


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
