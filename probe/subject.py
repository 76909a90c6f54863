"""What an analysis studies: a model together with the prompts it is studied on."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

import torch

from models.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoint_hash,
    load,
    training_prompts,
)
from models.config import ModelConfig, PromptConfig
from models.constructed import closed_form, gradient_descent
from models.transformer import LinearAttentionTransformer

# Name that scripts give to all shipped checkpoints together.
ZOO = "zoo"
# Models whose algorithm is known, made on the spot: the controls of every analysis.
# R = 10 and N = 20 are the sizes of the published reference values.
_MADE = {
    "constructed": lambda: closed_form(20, scale=10),
    "gradient_descent": lambda: gradient_descent(2, 0.6, n_context=20),
    "untrained": lambda: LinearAttentionTransformer(
        ModelConfig(), torch.Generator().manual_seed(0)
    ),
}


@dataclass(frozen=True)
class Subject:
    """A model under study.

    Attributes:
        name: checkpoint name, or the last part of its folder.
        model: the model in float64, gradients off.
        prompts: the distribution it was trained on (constructions: standard normal x).
        sha256: hash of the checkpoint's files, or of the weights of a made model.
    """

    name: str
    model: LinearAttentionTransformer
    prompts: PromptConfig
    sha256: str


def load_subject(checkpoint: str | os.PathLike[str]) -> Subject:
    """Load what is to be studied.

    Args:
        checkpoint: a shipped name, a checkpoint folder, or one of the made models
            "constructed", "gradient_descent", "untrained".

    Raises:
        CheckpointError: if it is none of these or cannot be loaded.
    """
    if str(checkpoint) in _MADE:
        model = _MADE[str(checkpoint)]().double().requires_grad_(False)
        prompts = PromptConfig(n_context=model.cfg.n_context)
        return Subject(str(checkpoint), model, prompts, _weights_hash(model))
    try:
        folder = checkpoint_folder(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; made on the spot: {', '.join(_MADE)}") from None
    model = load(folder, dtype=torch.float64).requires_grad_(False)
    return Subject(folder.name, model, training_prompts(folder), checkpoint_hash(folder))


def family_of(name: str) -> str:
    """Name of a checkpoint without its seed: those trained alike share it."""
    return re.sub(r"_seed\d+$", "", name)


def _weights_hash(model: LinearAttentionTransformer) -> str:
    digest = hashlib.sha256(model.cfg.model_dump_json().encode())
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
