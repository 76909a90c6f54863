"""The linear self-attention transformer (paper section 2, eqs. 9-10), hooked at every site.

Shapes: b batch, p position (N context rows, then the query), h head, d d_model.
Matrices act from the right on row vectors. In the paper's letters
W_Q = W3, W_K = W1ᵀ, W_V = W2, and with Q the residual stream one head is

    LSA(Q) = (Q W_Q)(W_Kᵀ Qᵀ Q W_V)                                        (9)

without scaling, softmax or mask. The inner [d, d] state is computed first, so a
head costs O(N d²); the [N, N] scores exist only while a hook asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from models.architecture.config import ModelConfig
from models.architecture.hooks import HookedModule, StrictHookPoint
from models.architecture.registry import register

# Standard deviations of the initial weights.
EMBED_STD, ATTENTION_STD, UNEMBED_STD = 0.5, 0.3, 0.1
# Axes of everything that lies along the residual stream.
_STREAM = "batch position d_model"


class Embed(nn.Module):
    """Affine input map from prompt rows to the residual stream, eq. (10)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(2 + config.n_covariates, config.d_model))
        self.b_E = nn.Parameter(torch.empty(config.d_model))

    def forward(self, inputs: Float[Tensor, "b p columns"]) -> Float[Tensor, "b p d"]:
        """Rows [1, x_1 .. x_p, y] to the stream."""
        return inputs @ self.W_E + self.b_E


class LinearAttention(nn.Module):
    """Multi-head linear self-attention, eq. (9), summed over heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        shape = (config.n_heads, config.d_model, config.d_model)
        self.exclude_query = config.exclude_query
        self.W_Q = nn.Parameter(torch.empty(shape))
        self.W_K = nn.Parameter(torch.empty(shape))
        self.W_V = nn.Parameter(torch.empty(shape))
        per_head = "batch position head d_model"
        self.hook_q = StrictHookPoint(per_head, "queries", "queries", "queries Q W_Q")
        self.hook_k = StrictHookPoint(per_head, "keys", "keys", "keys Q W_K")
        self.hook_v = StrictHookPoint(per_head, "values", "values", "values Q W_V")
        self.hook_state = StrictHookPoint(
            "batch head d_model d_model", "state", "head state", "head state KᵀV"
        )
        self.hook_attn_scores = StrictHookPoint(
            "batch head position position",
            "scores",
            "scores",
            "scores QKᵀ, on request",
            on_request=True,
        )
        self.hook_result = StrictHookPoint(
            per_head, "head output", "head output", "output per head"
        )
        self.hook_out = StrictHookPoint(
            _STREAM, "heads summed", "heads summed", "heads summed, before the norm"
        )

    def forward(self, resid: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        """What all heads together write."""
        project = "b p d, h d e -> b p h e"
        q = self.hook_q(einsum(resid, self.W_Q, project))
        k = self.hook_k(einsum(resid, self.W_K, project))
        v = self.hook_v(einsum(resid, self.W_V, project))
        if self.exclude_query:
            keys, values = k[:, :-1], v[:, :-1]
        else:
            keys, values = k, v
        state = self.hook_state(einsum(keys, values, "b p h i, b p h j -> b h i j"))
        result = einsum(q, state, "b p h i, b h i j -> b p h j")
        if self.hook_attn_scores.has_hooks():
            result = result + self._edit_of_scores(q, keys, values)
        result = self.hook_result(result)
        return self.hook_out(result.sum(dim=2))

    def _edit_of_scores(
        self,
        q: Float[Tensor, "b p h d"],
        keys: Float[Tensor, "b k h d"],
        values: Float[Tensor, "b k h d"],
    ) -> Float[Tensor, "b p h d"]:
        """What hooks on the scores change in the result: exactly zero without an edit.

        Writing the result as state term plus edit keeps edits of `hook_state` in
        force and makes looking at the scores free of rounding. With
        `exclude_query` the query's key column is zero and takes no part.
        """
        scores = einsum(q, keys, "b q h d, b k h d -> b h q k")
        n_hidden = q.shape[1] - keys.shape[1]
        shown = nn.functional.pad(scores, (0, n_hidden))
        # A tensor of its own, so that its gradient is that of the prediction by the scores.
        edited = self.hook_attn_scores(shown.clone())
        change = (edited - shown)[..., : keys.shape[1]]
        return einsum(change, values, "b h q k, b k h d -> b q h d")


class LayerNorm(nn.Module):
    """Layer norm over d_model; biased variance, eps inside the root.

    `hook_scale` is the divisor sqrt(variance + eps), `hook_normalized` the
    quotient before the affine map. Edits of mean and scale act downstream.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        if config.norm_affine:
            self.w = nn.Parameter(torch.empty(config.d_model))
            self.b = nn.Parameter(torch.empty(config.d_model))
        else:
            self.w = self.b = None
        per_token = "batch position 1"
        self.hook_mean = StrictHookPoint(
            per_token, "norm mean", "norm mean", "mean over features in the norm"
        )
        self.hook_scale = StrictHookPoint(per_token, "divisor", "norm scale", "divisor of the norm")
        self.hook_normalized = StrictHookPoint(
            _STREAM, "norm output", "norm output", "quotient of the norm"
        )

    def forward(self, x: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        """(x - mean) / scale, and the affine map if there is one."""
        centred = x - self.hook_mean(x.mean(dim=-1, keepdim=True))
        variance = centred.square().mean(dim=-1, keepdim=True)
        scale = self.hook_scale((variance + self.eps).sqrt())
        normalized = self.hook_normalized(centred / scale)
        return normalized if self.w is None else normalized * self.w + self.b


class Block(nn.Module):
    """One layer. Placements of the norm:

    "branch": Q + LN(LSA(Q)); "post": LN(Q + LSA(Q)); "none": Q + LSA(Q).
    `hook_attn_out` is what is added to the stream: after the norm for "branch".
    """

    def __init__(self, config: ModelConfig, attention: type[LinearAttention] = LinearAttention):
        super().__init__()
        self.normalization = config.normalization
        # Made in the order of the forward pass, which is the order sites are listed in.
        self.hook_resid_pre = StrictHookPoint(
            _STREAM, "stream in", "stream in", "residual stream before the block"
        )
        self.attn = attention(config)
        added = StrictHookPoint(_STREAM, "added", "added", "what is added to the stream")
        if self.normalization == "post":
            self.hook_attn_out = added
        if self.normalization != "none":
            self.ln1_post = LayerNorm(config)
        if self.normalization != "post":
            self.hook_attn_out = added
        self.hook_resid_post = StrictHookPoint(
            _STREAM, "stream out", "stream out", "residual stream after the block"
        )

    def forward(self, resid: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        """The stream after the block."""
        resid = self.hook_resid_pre(resid)
        attn_out = self.attn(resid)
        if self.normalization == "branch":
            attn_out = self.ln1_post(attn_out)
        resid = resid + self.hook_attn_out(attn_out)
        if self.normalization == "post":
            resid = self.ln1_post(resid)
        return self.hook_resid_post(resid)


class Unembed(nn.Module):
    """Linear readout of all positions ("flatten") or of the last one ("query")."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        positions = config.n_context + 1 if config.readout == "flatten" else 1
        self.W_U = nn.Parameter(torch.empty(positions, config.d_model))
        self.b_U = nn.Parameter(torch.empty(()))

    def forward(self, resid: Float[Tensor, "b p d"]) -> Float[Tensor, " b"]:
        """The prediction at the query."""
        return einsum(resid[:, -self.W_U.shape[0] :], self.W_U, "b p d, p d -> b") + self.b_U


@register
class LinearAttentionTransformer(HookedModule):
    """A transformer of linear self-attention that predicts y at the query.

    A `transformer_lens.HookedRootModule`: `run_with_cache`, `run_with_hooks`,
    `hooks` and `add_hook` work as there, stricter (see `models.architecture.hooks`).

    Args:
        config: shape of the model.
        generator: source of the initial weights; torch's global one by default.

    Raises:
        ValueError: if the model would not fit in memory.

    Attributes:
        cfg: the config, under the name transformer-lens uses.
        architecture: name of the class in checkpoints (`models.architecture.registry`).
        plain_forward: whether the forward pass is eqs. (9)-(10) and nothing else, so that the
            weights say what is computed. Counts only where a class says it in its own body: a
            subclass may compute something else with the same weights.
        config_type: class of the config.
        attention_type: class of the attention of every block; a subclass may put in another.
    """

    architecture: ClassVar[str] = "linear_attention"
    plain_forward: ClassVar[bool] = True
    config_type: ClassVar[type[ModelConfig]] = ModelConfig
    attention_type: ClassVar[type[LinearAttention]] = LinearAttention

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None):
        super().__init__()
        config.require_memory()
        self.cfg = config
        self.embed = Embed(config)
        self.hook_embed = StrictHookPoint(_STREAM, "embedding", "embedding", "input map")
        blocks = nn.ModuleList(Block(config, self.attention_type) for _ in range(config.n_layers))
        self.blocks = cast(Sequence[Block], blocks)
        self.unembed = Unembed(config)
        self.hook_prediction = StrictHookPoint(
            "batch", "prediction", "prediction", "prediction at the query"
        )
        self.setup()
        self.init_weights(generator)

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.cfg

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.embed.W_E.dtype

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis word of the sites ("batch" is free)."""
        cfg = self.cfg
        sizes = {"position": cfg.n_context + 1, "head": cfg.n_heads, "d_model": cfg.d_model}
        return sizes | {"1": 1}

    @property
    def any_length(self) -> bool:
        """Whether N is free: the query readout reads one row, whatever their number."""
        return self.cfg.any_length

    def untrained(self, generator: torch.Generator) -> LinearAttentionTransformer:
        """A model of the same class, shape and dtype with fresh weights."""
        return type(self)(self.cfg, generator).to(self.dtype)

    def like(self, weights: Mapping[str, Tensor], **changes: Any) -> LinearAttentionTransformer:
        """A model of the same class and dtype that holds `weights`, gradients off.

        Args:
            weights: by parameter name.
            **changes: fields of the config that differ.
        """
        config = type(self.cfg)(**(self.cfg.model_dump() | changes))
        twin = type(self)(config).double().requires_grad_(False)
        twin.load_state_dict(dict(weights))
        return twin.to(self.dtype)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights, every matrix normal with mean 0.

        W_V is divided by N + 1, so that attention sums over rows start as means.
        """
        value_std = ATTENTION_STD / (self.cfg.n_context + 1)
        for module in self.modules():
            if isinstance(module, Embed):
                module.W_E.normal_(0, EMBED_STD, generator=generator)
                module.b_E.zero_()
            elif isinstance(module, LinearAttention):
                module.W_Q.normal_(0, ATTENTION_STD, generator=generator)
                module.W_K.normal_(0, ATTENTION_STD, generator=generator)
                module.W_V.normal_(0, value_std, generator=generator)
            elif isinstance(module, LayerNorm) and module.w is not None and module.b is not None:
                module.w.fill_(1)
                module.b.zero_()
            elif isinstance(module, Unembed):
                module.W_U.normal_(0, UNEMBED_STD, generator=generator)
                module.b_U.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict y at the query of each prompt.

        Args:
            inputs: [b, N+1, 2+p], rows ``[1, x, y]`` and ``[1, u, 0]`` last; converted
                to the model's dtype. With the query readout N is free.

        Returns:
            Predictions, [b].

        Raises:
            ValueError: on another number of axes, columns or (flatten) rows, another
                device, or no tensor.
        """
        self._require_fit(inputs)
        resid = self.hook_embed(self.embed(inputs.to(self.dtype)))
        for block in self.blocks:
            resid = block(resid)
        return self.hook_prediction(self.unembed(resid))

    def _require_fit(self, inputs: Tensor) -> None:
        if not isinstance(inputs, Tensor):
            kind = f"{type(inputs).__module__}.{type(inputs).__qualname__}"
            raise ValueError(
                f"inputs are a {kind.removeprefix('builtins.')}; give a torch.Tensor, such as "
                f"torch.as_tensor(inputs)"
            )
        columns, rows = 2 + self.cfg.n_covariates, self.cfg.n_context + 1
        fits = (
            inputs.ndim == 3
            and inputs.shape[2] == columns
            and inputs.shape[1] >= 2
            and (self.any_length or inputs.shape[1] == rows)
        )
        if not fits:
            expected_rows = "n_context + 1 >= 2" if self.any_length else str(rows)
            raise ValueError(
                f"inputs have shape {tuple(inputs.shape)}, expected [batch, {expected_rows}, "
                f"{columns}]: rows [1, x, y] and the query row [1, u, 0] last"
            )
        if inputs.device != self.embed.W_E.device:
            raise ValueError(
                f"inputs are on {inputs.device}, the model on {self.embed.W_E.device}; "
                f"move one of them with .to(device)"
            )
