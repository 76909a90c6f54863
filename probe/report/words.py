"""Prompts and models as sentences."""

from __future__ import annotations

import math

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig

# What the sentences say.
_OF_PROMPTS = {"kind", "n_context", "n_covariates", "noise_std", "x_log_scale", "x_mean_std"}
_OF_PROMPTS |= {"x_distribution", "x_bounds", "x_correlation"}
_OF_MODELS = {"d_model", "n_layers", "n_heads", "n_context", "n_covariates"}
_OF_MODELS |= {"normalization", "readout"}


def prompts_in_words(prompts: PromptConfig) -> str:
    """A prompt distribution as a sentence; settings that it has no words for follow by name."""
    low, high = (f"{math.exp(sign * prompts.x_log_scale):.2f}" for sign in (-1, 1))
    law = "N(0, 1)"
    if prompts.x_distribution == "uniform":
        law = f"U({prompts.x_bounds[0]:g}, {prompts.x_bounds[1]:g})"
    scale = f"scaled per prompt by {low} to {high}" if prompts.x_log_scale else "unscaled"
    mean = (
        f"shifted per prompt by N(0, {prompts.x_mean_std:g}²)"
        if prompts.x_mean_std
        else "unshifted"
    )
    related = (
        f", correlated per prompt by up to ±{prompts.x_correlation:g}"
        if prompts.x_correlation
        else ""
    )
    p = prompts.n_covariates
    return (
        f"{prompts.n_context} samples of {p} covariate{'s' * (p > 1)}, x ~ {law}, {scale}, {mean}"
        f"{related}; noise {prompts.noise_std:g} on y{_rest(prompts, _OF_PROMPTS)}"
    )


def model_in_words(model: LinearAttentionTransformer) -> str:
    """A model's shape as a sentence; settings that it has no words for follow by name."""
    config = model.cfg
    return (
        f"{config.n_layers} layers, {config.n_heads} heads, {config.d_model} dimensions, "
        f"{config.normalization} norm, {config.readout} readout, {config.n_parameters} parameters"
        f"{_rest(config, _OF_MODELS)}"
    )


def _rest(config: PromptConfig | ModelConfig, said: set[str]) -> str:
    """The settings that were not said and are not the defaults: "; exclude_query True"."""
    return "".join(
        f"; {name} {getattr(config, name)}"
        for name, field in type(config).model_fields.items()
        if name not in said and getattr(config, name) != field.default
    )
