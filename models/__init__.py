"""What is studied: prompts, the transformer, constructions, training, checkpoints.

Names are imported on first use, so that work on prompts or training alone does
not pay the seconds that transformer-lens takes to import.
"""

from models.lazy import attach

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

__getattr__, __dir__, __all__ = attach(__name__, _HOMES)
