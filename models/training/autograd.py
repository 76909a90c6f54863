"""Loss and gradients of an ensemble by automatic differentiation of the model itself.

The same arguments and results as `models.training.kernel`, as tensors. Any class of model and
any device; on a CPU the kernel is faster where it applies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap


def loss_and_gradients(
    model: nn.Module,
    params: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    group: Tensor,
    together: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of every model over its prompts, and its gradient.

    Args:
        model: a model of the ensemble's shape, dtype and device; its weights play no part.
        params: every parameter by name, shapes led by the model axis [M].
        x: covariates, [groups, p, N+1, batch]; position N is the query.
        y: [groups, N, batch].
        targets: what to predict at the query, [groups, batch].
        group: integers [M], the prompts of each model.
        together: compute all models at once, as pays on a GPU. How a matrix product rounds
            depends on its size: only one by one is a model independent of its company to the
            last bit.

    Returns:
        Losses [M], and gradients with the names and shapes of `params`.
    """
    inputs = inputs_of(x, y)

    def loss(own: Mapping[str, Tensor], prompts: Tensor, target: Tensor) -> Tensor:
        return (functional_call(model, dict(own), (prompts,)) - target).square().mean()

    if together:
        each = vmap(grad_and_value(loss))
        gradients, losses = each(dict(params), inputs[group], targets[group])
        return losses, gradients
    # Without torch.func, whose layers cost more than the arithmetic of one small model.
    losses, rows = [], []
    for m, g in enumerate(group.tolist()):
        own = {name: value[m].detach().requires_grad_() for name, value in params.items()}
        value = loss(own, inputs[g], targets[g])
        losses.append(value.detach())
        rows.append(torch.autograd.grad(value, list(own.values()), materialize_grads=True))
    columns = map(torch.stack, zip(*rows, strict=True))
    return torch.stack(losses), dict(zip(params, columns, strict=True))


def inputs_of(x: Tensor, y: Tensor) -> Tensor:
    """Prompts as a model takes them, [groups, batch, N+1, 2+p], from x and y as above."""
    y = nn.functional.pad(y, (0, 0, 0, 1))  # the query row of y is 0
    rows = torch.cat([torch.ones_like(x[:, :1]), x, y[:, None]], dim=1)
    return rows.permute(0, 3, 2, 1).contiguous()
