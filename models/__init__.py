"""What is studied: prompts, the transformer, constructions, training, checkpoints.

Names are imported on first use, so that work on prompts or training alone does
not pay the seconds that transformer-lens takes to import.
"""

import importlib

_HOMES = {
    "ModelConfig": "models.config",
    "PromptConfig": "models.config",
    "Prompts": "models.prompts",
    "prompts_from_arrays": "models.prompts",
    "sample_prompts": "models.prompts",
    "LinearAttentionTransformer": "models.transformer",
    "closed_form": "models.constructed",
    "coordinate_names": "models.constructed",
    "gradient_descent": "models.constructed",
    "determinant_form": "models.determinant",
    "fraction_free_form": "models.determinant",
    "from_ahn": "models.published",
    "from_von_oswald": "models.published",
    "from_zhang": "models.published",
    "CheckpointError": "models.checkpoint",
    "available": "models.checkpoint",
    "from_paper_weights": "models.checkpoint",
    "load": "models.checkpoint",
    "save": "models.checkpoint",
    "training_prompts": "models.checkpoint",
    "TrainConfig": "models.training",
    "train": "models.training",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
