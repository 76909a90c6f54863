"""The state of many models of one shape that are trained side by side.

Shapes: M models, P parameters of one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig

if TYPE_CHECKING:
    from models.training.config import TrainConfig

CURVE_POINTS = 200  # loss and sparsity curves are averaged down to this many points
SMALL = 1e-3  # weights below this count as small in the sparsity curve


@dataclass(frozen=True)
class Member:
    """One model of an ensemble: where its prompts come from, and its penalty λ."""

    name: str
    prompts: PromptConfig
    l1: float
    seed: int


@dataclass
class State:
    """Everything needed to go on from `step`; each array has a leading models axis.

    Attributes:
        step: number of steps taken.
        arrays: ``weights``, ``m``, ``v`` [M, P]; ``loss`` (sums), ``zero``, ``small``
            (shares of weights) [M, points]; ``diverged`` [M], the step at which a model
            was frozen, or -1.
    """

    step: int
    arrays: dict[str, np.ndarray]


class Layout:
    """Where each parameter stands in a flat row of P numbers.

    Attributes:
        size: P.
        fold: [P], the factor from trained to model weights: 1/(N+1) for W_V, else 1.
        penalised: [P], all but the gain and bias of layer norm. Biases pay as weights
            do, because the constant column of the prompt does the same through W_E.
    """

    def __init__(self, model: ModelConfig):
        self._parts: list[tuple[str, slice, tuple[int, ...]]] = []
        start, fold, penalised = 0, [], []
        for name, shape in model.parameter_shapes().items():
            count = int(np.prod(shape))
            self._parts.append((name, slice(start, start + count), shape))
            start += count
            fold += [1 / (model.n_context + 1) if name.endswith("W_V") else 1.0] * count
            penalised += ["ln1_post" not in name] * count
        self.size = start
        self.fold = np.array(fold)
        self.penalised = np.array(penalised)

    def split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Views of [M, P] as parameters by name, [M, *shape]."""
        return {name: flat[:, part].reshape(-1, *shape) for name, part, shape in self._parts}

    def join(self, params: dict[str, np.ndarray], out: np.ndarray) -> np.ndarray:
        """Parameters by name, [M, *shape], into `out` [M, P]."""
        for name, part, _ in self._parts:
            out[:, part] = params[name].reshape(len(out), -1)
        return out


def initial_state(config: TrainConfig, members: Sequence[Member]) -> State:
    """State before the first step; the weights depend on the seed alone."""
    layout = Layout(config.model)
    fresh = {}
    for seed in {member.seed for member in members}:
        generator = torch.Generator().manual_seed(seed)
        model = LinearAttentionTransformer(config.model, generator)
        row = {name: value.detach().numpy()[None] for name, value in model.named_parameters()}
        fresh[seed] = layout.join(row, np.empty((1, layout.size)))[0] / layout.fold
    weights = np.stack([fresh[member.seed] for member in members]).astype(config.dtype)
    points = (len(members), min(config.steps, CURVE_POINTS))
    arrays = {"weights": weights, "m": np.zeros_like(weights), "v": np.zeros_like(weights)}
    arrays |= {name: np.zeros(points) for name in ("loss", "zero", "small")}
    arrays["diverged"] = np.full(len(members), -1)
    return State(0, arrays)


def curve_steps(steps: int) -> np.ndarray:
    """Number of steps taken at the end of each point of a curve."""
    points = min(steps, CURVE_POINTS)
    return -(-np.arange(1, points + 1) * steps // points)
