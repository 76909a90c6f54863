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

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from models.training.autograd import loss_and_gradients
from models.training.ensemble import SMALL, Layout, Member, State
from models.training.kernel import FusedKernel
from models.training.optimizer import Adam, learning_rate
from models.training.prompt_stream import PromptStream

if TYPE_CHECKING:
    from models.training.config import TrainConfig

_ABSURD = 1e6  # a loss this many times the mean square of the targets will not come back


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
            kept = weights.copy()
            grads[frozen] = 0

            ramp = config.l1_ramp * config.steps
            rate = learning_rate(
                step, config.steps, config.learning_rate, config.warmup_steps, config.final_rate
            )
            penalty = l1 * min(1.0, step / ramp if ramp else 1.0)
            # A step from a finite gradient may still leave the range of the dtype.
            with np.errstate(over="ignore", invalid="ignore"):
                adam.step(weights, grads, step + 1, rate, penalty)
            diverged[~frozen & ~np.isfinite(weights).all(1)] = step
            frozen = diverged >= 0
            weights[frozen] = kept[frozen]

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
        kernel = FusedKernel(config.model, config.batch_size, np.dtype(config.dtype))

        def fused(params, x, y, targets, group):
            return kernel.loss_and_gradients(params, x.numpy(), y.numpy(), targets.numpy(), group)

        return fused

    model = LinearAttentionTransformer(config.model).to(device, getattr(torch, config.dtype))

    def autograd(params, x, y, targets, group):
        tensors = {name: torch.from_numpy(value).to(device) for name, value in params.items()}
        losses, grads = loss_and_gradients(
            model, tensors, x, y, targets, torch.from_numpy(group).to(device), device.type == "cuda"
        )
        return losses.cpu().numpy(), {name: value.cpu().numpy() for name, value in grads.items()}

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
