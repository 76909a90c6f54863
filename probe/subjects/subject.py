"""What an analysis studies: a model together with the prompts it is studied on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.checkpoint import (
    PREFIX,
    CheckpointError,
    checkpoint_hash,
    load,
    provenance,
    resolve,
    training_prompts,
)
from models.constructed.descent import gradient_descent
from models.constructed.elimination import closed_form
from models.tasks.config import PromptConfig
from models.wording import near_matches
from probe.subjects.names import CONSTRUCTED, GRADIENT_DESCENT, MADE_PREFIX, UNTRAINED, ZOO
from probe.symmetry.weights import weights_hash, weights_of

# R = 10 and N = 20 are the sizes of the published reference values.
_MADE = {
    CONSTRUCTED: lambda: closed_form(20, scale=10),
    GRADIENT_DESCENT: lambda: gradient_descent(2, 0.6, n_context=20),
    UNTRAINED: lambda: LinearAttentionTransformer(ModelConfig(), torch.Generator().manual_seed(0)),
}


@dataclass(frozen=True)
class Subject:
    """A model under study.

    Attributes:
        name: checkpoint name, or the last part of its folder.
        model: the model in float64, gradients off.
        prompts: the distribution it was trained on (constructions: standard normal x).
        sha256: hash of the checkpoint's files, or of the weights of a made model.
        source: what a record calls it: "shipped:NAME", "made:NAME", or the folder as it was given.
        record: contents of training.json; empty for a made model.
    """

    name: str
    model: LinearAttentionTransformer
    prompts: PromptConfig
    sha256: str
    source: str
    record: Mapping[str, Any] = field(default_factory=dict)


def load_subject(checkpoint: str | os.PathLike[str]) -> Subject:
    """Load what is to be studied.

    Args:
        checkpoint: a shipped name, a checkpoint folder, or one of the made models "constructed",
            "gradient_descent", "untrained". A word that is a folder here as well is refused:
            "./constructed" is the folder, "made:constructed" the made model (shipped names:
            `models.checkpoint.resolve`).

    Raises:
        CheckpointError: if it is none of these, is two of these, or cannot be loaded.
    """
    made = _made_name(checkpoint)
    if made is not None:
        model = _MADE[made]().double().requires_grad_(False)
        prompts = PromptConfig(n_context=model.cfg.n_context)
        sha256 = weights_hash(weights_of(model), model.cfg)
        return Subject(made, model, prompts, sha256, MADE_PREFIX + made)
    try:
        folder, source = resolve(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; made on the spot: {', '.join(_MADE)}") from None
    model = load(folder, dtype=torch.float64).requires_grad_(False)
    name = os.path.basename(os.path.abspath(folder))
    return Subject(
        name, model, training_prompts(folder), checkpoint_hash(folder), source, provenance(folder)
    )


def is_zoo(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether all shipped checkpoints are meant.

    Raises:
        CheckpointError: if a folder here has the name that stands for them.
    """
    if checkpoint == ZOO and Path(ZOO).is_dir():
        raise CheckpointError(
            f"{ZOO!r} is a folder here, and means all shipped checkpoints; give {PREFIX}{ZOO} for "
            f"these, .{os.sep}{ZOO} for the folder"
        )
    return checkpoint in (ZOO, PREFIX + ZOO)


def family_of(name: str) -> str:
    """Name of a checkpoint without its seed: those trained alike share it."""
    return re.sub(r"_seed\d+$", "", name)


def _made_name(checkpoint: str | os.PathLike[str]) -> str | None:
    """Which made model is meant, if one is."""
    if not isinstance(checkpoint, str):
        return None
    if checkpoint.startswith(MADE_PREFIX) and os.sep not in checkpoint:
        name = checkpoint.removeprefix(MADE_PREFIX)
        if name not in _MADE:
            raise CheckpointError(
                f"{checkpoint!r} is not made on the spot{near_matches(name, _MADE)}; these are: "
                f"{', '.join(_MADE)}"
            )
        return name
    if checkpoint not in _MADE:
        return None
    if os.path.isdir(checkpoint):
        raise CheckpointError(
            f"{checkpoint!r} is both a model made on the spot and a folder here; give "
            f"{MADE_PREFIX}{checkpoint} for the made one, .{os.sep}{checkpoint} for the folder"
        )
    return checkpoint
