"""The training loop: many models of one shape, step by step, in one process.

Shapes: M models, P parameters of one model, G prompt groups (a seed and a prompt
distribution each), p covariates, N context samples, b prompts per step.

Attention scores are divided by N + 1 while training, so that the loss has the same
curvature at every context length: what is trained is W_V' = (N + 1) W_V, and the
penalty acts on W_V'. The division is folded into W_V at the end.

The path of a model is a function of the config, its seed, penalty and prompt
distribution alone: prompts come from counters, rows of an array never mix, and sums
run in a fixed order. Which models are trained together, on how many threads or
processes, and how often the run was interrupted, changes no bit of the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig, PromptConfig
from models.optimizer import Adam, learning_rate
from models.prompts import draw, eliminate
from models.transformer import LinearAttentionTransformer

if TYPE_CHECKING:
    from models.training import TrainConfig

CURVE_POINTS = 200  # loss and sparsity curves are averaged down to this many points
SMALL = 1e-3  # weights below this count as small in the sparsity curve
_ABSURD = 1e6  # a loss this many times the mean square of the targets will not come back
_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that 2^32 successive steps have distinct seeds


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


class PromptStream:
    """Training prompts of one seed and distribution, as a pure function of the step.

    The generator is seeded anew at every step by a hash of (seed, distribution) plus
    a multiple of the step, so nothing has to be remembered to resume, and models that
    share seed and distribution share their prompts.

    Args:
        prompts: the distribution.
        seed: of the run.
        batch: b.
        n_prompts: size of a fixed set that is drawn once and reshuffled every epoch
            (the last, incomplete batch of an epoch is left out); None for fresh prompts.
        noisy_y: target is the noisy y at the query instead of least squares.
        dtype: of the prompts.
        device: where they are drawn.
    """

    def __init__(
        self,
        prompts: PromptConfig,
        seed: int,
        batch: int,
        n_prompts: int | None,
        noisy_y: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        # Fields at their default are left out: a field added later keeps old streams.
        text = json.dumps([seed, prompts.model_dump(mode="json", exclude_defaults=True)])
        self._base = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        self._prompts, self._batch, self._noisy_y, self._dtype = prompts, batch, noisy_y, dtype
        self._generator = torch.Generator(device)
        self._fixed = None if n_prompts is None else self._draw(-1, n_prompts)
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [p, N+1, b], y [N, b] and targets [b] of a step."""
        if self._fixed is None:
            return self._draw(step, self._batch)
        n_prompts = self._fixed[2].shape[0]
        epoch, place = divmod(step, n_prompts // self._batch)
        if self._order[0] != epoch:
            generator = self._seeded(epoch)
            order = torch.randperm(n_prompts, generator=generator, device=generator.device)
            self._order = (epoch, order)
        chosen = self._order[1][place * self._batch : (place + 1) * self._batch]
        x, y, targets = self._fixed
        return x[..., chosen], y[..., chosen], targets[chosen]

    def _draw(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = draw(self._prompts, count, self._seeded(step), self._dtype, self._noisy_y)
        if self._noisy_y:
            return x, y[:-1], y[-1]
        return x, y, eliminate(x, y).prediction

    def _seeded(self, counter: int) -> torch.Generator:
        return self._generator.manual_seed((self._base + counter * _GOLDEN) % 2**64)


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


def advance(
    config: TrainConfig,
    members: Sequence[Member],
    state: State,
    after_step: Callable[[State, np.ndarray], None],
) -> State:
    """Train from `state` to the end of the run, in place.

    Args:
        config: what to train; ``config.backend`` must be resolved.
        members: the models, in the order of the arrays.
        state: where to start.
        after_step: called with the state and the losses [M] after every step.

    Returns:
        `state`, at the last step, or earlier if every model has diverged.
    """
    layout, dtype = Layout(config.model), np.dtype(config.dtype)
    fold, arrays = layout.fold.astype(dtype), state.arrays
    weights, diverged = arrays["weights"], arrays["diverged"]
    points = arrays["loss"].shape[1]
    adam = Adam(
        arrays["m"], arrays["v"], layout.penalised, config.betas, config.clip_norm, config.l1_method
    )
    l1 = np.array([member.l1 for member in members])
    streams, group, device = _streams(config, members)
    gradients = _backend(config, device)
    grads = np.empty_like(weights)

    def prompts_at(step: int) -> list[Tensor]:
        return [torch.stack(part) for part in zip(*(s.at(step) for s in streams), strict=True)]

    with _one_torch_thread(), ThreadPoolExecutor(1) as pool:
        # The prompts of the next step are drawn while this one is computed.
        ahead = pool.submit(prompts_at, state.step)
        for step in range(state.step, config.steps):
            x, y, targets = ahead.result()
            if step + 1 < config.steps:
                ahead = pool.submit(prompts_at, step + 1)
            params = layout.split(weights * fold)
            losses, by_name = gradients(params, x, y, targets, group)
            layout.join(by_name, grads)
            grads *= fold

            power = targets.square().mean(1).cpu().numpy()[group]
            sound = np.isfinite(grads).all(1) & (losses <= _ABSURD * power)
            diverged[(diverged < 0) & ~sound] = step
            frozen = diverged >= 0
            kept = weights[frozen]
            grads[frozen] = 0

            ramp = config.l1_ramp * config.steps
            rate = learning_rate(
                step, config.steps, config.learning_rate, config.warmup_steps, config.final_rate
            )
            adam.step(weights, grads, step + 1, rate, l1 * min(1.0, step / ramp if ramp else 1.0))
            weights[frozen] = kept

            point = step * points // config.steps
            arrays["loss"][~frozen, point] += losses[~frozen]
            if (step + 1) * points // config.steps > point:
                arrays["zero"][:, point] = (weights == 0).mean(1)
                arrays["small"][:, point] = (np.abs(weights) < SMALL).mean(1)
            state.step = step + 1
            after_step(state, losses)
            if frozen.all():
                break
    return state


def curve_steps(steps: int) -> np.ndarray:
    """Number of steps taken at the end of each point of a curve."""
    points = min(steps, CURVE_POINTS)
    return -(-np.arange(1, points + 1) * steps // points)


def _streams(
    config: TrainConfig, members: Sequence[Member]
) -> tuple[list[PromptStream], np.ndarray, torch.device]:
    """One stream per (seed, distribution), and which of them each model reads, [M]."""
    use_gpu = config.backend == "torch" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    keys = [(member.seed, member.prompts) for member in members]
    distinct = list(dict.fromkeys(keys))
    streams = [
        PromptStream(
            prompts,
            seed,
            config.batch_size,
            config.n_prompts,
            config.target == "noisy_y",
            getattr(torch, config.dtype),
            device,
        )
        for seed, prompts in distinct
    ]
    return streams, np.array([distinct.index(key) for key in keys]), device


def _backend(config: TrainConfig, device: torch.device) -> Callable[..., tuple]:
    """Function (params, x, y, targets, group) -> losses [M], gradients by name."""
    if config.backend == "kernel":
        from models.kernel import FusedKernel

        kernel = FusedKernel(config.model, config.batch_size, np.dtype(config.dtype))

        def fused(params, x, y, targets, group):
            arrays = (part.numpy() for part in (x, y, targets))
            return kernel.loss_and_gradients(params, *arrays, group)

        return fused

    from models.batched import batched_loss

    def autograd(params, x, y, targets, group):
        # How a matrix product rounds depends on its size. On the CPU, where batching gains
        # nothing, one model at a time keeps every model independent of its company.
        at_once = len(group) if device.type == "cuda" else 1
        losses, grads = [], []
        for start in range(0, len(group), at_once):
            chosen = slice(start, start + at_once)
            leaves = {
                name: torch.from_numpy(value[chosen].copy()).to(device).requires_grad_()
                for name, value in params.items()
            }
            groups = torch.from_numpy(group[chosen]).to(device)
            loss = batched_loss(config.model, leaves, x, y, targets, groups)
            loss.sum().backward()
            losses.append(loss.detach().cpu().numpy())
            grads.append({name: leaf.grad.cpu().numpy() for name, leaf in leaves.items()})
        joined = {name: np.concatenate([part[name] for part in grads]) for name in params}
        return np.concatenate(losses), joined

    return autograd


@contextmanager
def _one_torch_thread():
    """Torch sums in an order that depends on its threads; one thread fixes it.

    The parallel work is the kernel's, over models.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
