"""What to train: frozen, and complete enough to repeat a run to the last bit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.architecture.config import ModelConfig
from models.frozen import Frozen
from models.tasks.config import PromptConfig
from models.training.optimizer import L1Method

# Copies of a step's prompts that stand side by side, as measured: this step's, the next one's,
# and those that elimination works on.
_COPIES = 4
# Named prompt distributions, all with 50 samples of one covariate.
DISTRIBUTIONS = {
    "varied": PromptConfig(n_context=50, x_log_scale=0.7, x_mean_std=1.0),
    "uniform": PromptConfig(n_context=50, x_distribution="uniform"),
    "plain": PromptConfig(n_context=50),
}


class TrainConfig(Frozen):
    """What to train: every combination of `seeds`, `l1` and `prompts`.

    Attributes:
        model: shape of every model; its n_context and n_covariates are those of the prompts.
        prompts: prompt distributions.
        l1: weights λ of the penalty λ‖w‖₁, on all parameters but the gain and bias of
            layer norm; on (N+1) W_V in place of W_V (see `models.training.ensemble`).
        seeds: each sets initial weights and prompts.
        steps: optimizer steps.
        batch_size: prompts per step.
        n_prompts: size of a fixed training set; None draws fresh prompts at every step.
        target: "least_squares", or "noisy_y", the y of the query drawn like the others.
        l1_method: "proximal" gives exact zeros, "subgradient" does not
            (`models.training.optimizer`).
        l1_ramp: share of the run over which λ grows from 0.
        learning_rate: peak of Adam's rate.
        warmup_steps: of the rate, at most a tenth of the run.
        final_rate: last rate over the peak, at the end of a cosine.
        betas: Adam's decay rates.
        clip_norm: largest gradient norm of a model.
        dtype: of weights and prompts.
        backend: "kernel" (fused, CPU), "torch" (autograd, on the GPU if there is one), or
            "auto": torch with a GPU or where the kernel does not apply, else kernel.
    """

    model: ModelConfig = ModelConfig(n_context=50)
    prompts: Annotated[tuple[PromptConfig, ...], Field(min_length=1)] = (DISTRIBUTIONS["varied"],)
    l1: Annotated[tuple[float, ...], Field(min_length=1)] = (3e-4, 1e-3, 3e-3)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = tuple(range(8))
    steps: Annotated[int, Field(ge=1)] = 40_000
    batch_size: Annotated[int, Field(ge=1, le=2**63 - 1)] = 256
    n_prompts: Annotated[int | None, Field(ge=1, le=2**63 - 1)] = None
    target: Literal["least_squares", "noisy_y"] = "least_squares"
    l1_method: L1Method = "proximal"
    l1_ramp: Annotated[float, Field(ge=0, le=1)] = 0.3
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    warmup_steps: Annotated[int, Field(ge=0)] = 200
    final_rate: Annotated[float, Field(ge=0, le=1)] = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    dtype: Literal["float32", "float64"] = "float32"
    backend: Literal["auto", "kernel", "torch"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for prompts in self.prompts:
            for name in ("n_context", "n_covariates"):
                ours, theirs = getattr(self.model, name), getattr(prompts, name)
                if ours != theirs:
                    raise ValueError(
                        f"the model has {name}={ours}, its prompts {name}={theirs}; "
                        f"give both the same"
                    )
        for name in ("prompts", "l1", "seeds"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values} has a value twice; name each once")
        if min(self.l1) < 0:
            raise ValueError(f"l1={self.l1} must not be negative")
        if not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError(f"seeds={self.seeds} must be from 0 to 2^63 - 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be at least 0 and below 1")
        if self.n_prompts is not None and self.n_prompts < self.batch_size:
            raise ValueError(
                f"n_prompts={self.n_prompts} is less than batch_size={self.batch_size}; "
                f"lower batch_size to at most n_prompts"
            )
        return self

    def bytes_at_once(self, n_groups: int, n_models: int) -> int:
        """Least memory that the prompts and activations of one step take.

        Args:
            n_groups: prompt groups that are drawn side by side.
            n_models: models whose activations are kept side by side for automatic
                differentiation; 0 with the kernel, which keeps none.
        """
        shape, rows = self.model, self.model.n_context + 1
        prompts = (_COPIES * self.batch_size + (self.n_prompts or 0)) * n_groups
        numbers = prompts * rows * (shape.n_covariates + 1)
        # Per head queries, keys, values and result, and what the norm keeps, forward and back.
        per_layer = rows * shape.d_model * (4 * shape.n_heads + 32)
        numbers += n_models * self.batch_size * shape.n_layers * per_layer
        return numbers * (4 if self.dtype == "float32" else 8)
