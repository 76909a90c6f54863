"""Runs that are small enough for a test, and how to compare them."""

import numpy as np

from models import ModelConfig, PromptConfig, TrainConfig, train
from models.training.run_folder import RunFolder

TINY = {
    "model": ModelConfig(d_model=3, n_layers=1, n_heads=1, n_context=5),
    "prompts": (PromptConfig(n_context=5),),
    "l1": (0.0, 1e-3),
    "seeds": (0, 1),
    "steps": 60,
    "batch_size": 16,
    "backend": "kernel",
}


def tiny(**changes) -> TrainConfig:
    return TrainConfig(**{**TINY, **changes})


def quietly(config, *args, **options):
    return train(config, *args, progress=False, **options)


def weights_of(model) -> np.ndarray:
    return np.concatenate([value.detach().numpy().ravel() for value in model.parameters()])


def same_weights(left, right) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(weights_of(a), weights_of(b)) for a, b in zip(left, right, strict=True)
    )


def step_of(folder) -> int:
    """Step of the saved state; 0 before the first."""
    states = RunFolder(folder).states()
    return max((step for step, _ in states.values()), default=0)
