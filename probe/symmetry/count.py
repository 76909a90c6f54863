"""How many directions of weight space leave every prediction as it is, measured."""

from __future__ import annotations

import torch
from torch import Tensor

from models.architecture.transformer import LinearAttentionTransformer
from models.tasks.config import PromptConfig
from probe.symmetry.weights import Weights, weights_of


def symmetry_count(model: LinearAttentionTransformer) -> int:
    """Number of directions in weight space along which no prediction changes.

    Parameters minus the rank of the Jacobian of predictions, in float64 and at eps = 0
    (where `LayerScale` is exact): of any class of model, by its own forward pass. Compare with
    the rank of `known_directions`.
    """
    return model.cfg.n_parameters - jacobian_rank(model)[0]


def jacobian_rank(model: LinearAttentionTransformer) -> tuple[int, float]:
    """Rank of d prediction / d parameters over many prompts, and how clear it is.

    The rank is where the singular values fall most, among falls that end below 1e-6 of the
    largest: no threshold depends on the units of the weights.

    Returns:
        The rank, and the factor of the fall.
    """
    matrix = prediction_jacobian(model)
    values = torch.linalg.svdvals(matrix)
    floor = values[0] * torch.finfo(torch.float64).eps * max(matrix.shape)
    values = torch.cat([values, floor[None]]).clamp(min=floor)
    falls = (values[:-1] / values[1:]).where(values[1:] < 1e-6 * values[0], 0.0)
    rank = int(falls.argmax()) + 1
    return rank, float(falls[rank - 1])


def prediction_jacobian(model: LinearAttentionTransformer) -> Tensor:
    """d prediction / d parameters at eps = 0, [prompts, parameters], twice as many prompts.

    Columns are per relative change (times the root mean square of their parameter), rows have
    unit norm, so that neither the units of the weights nor large predictions matter.
    """
    config = model.cfg
    weights = weights_of(model)
    twin = model.like(weights, norm_eps=0.0).double()
    prompt_config = PromptConfig(
        n_context=config.n_context,
        n_covariates=config.n_covariates,
        noise_std=0.5,
        x_mean_std=1.0,
        x_log_scale=0.7,
    )
    generator = torch.Generator().manual_seed(0)
    inputs = prompt_config.sample(2 * config.n_parameters, generator).inputs

    def predict(values: Weights) -> Tensor:
        return torch.func.functional_call(twin, values, (inputs,))

    jacobian = torch.func.jacrev(predict, chunk_size=100)(weights)
    columns = [
        jacobian[name].reshape(len(inputs), -1) * size
        for name, size in parameter_sizes(weights).items()
    ]
    matrix = torch.cat(columns, 1)
    return matrix / matrix.norm(dim=1, keepdim=True)


def parameter_sizes(weights: Weights) -> dict[str, float]:
    """Root mean square of each parameter, 1 for one that is zero."""
    sizes = {name: float(value.square().mean().sqrt()) for name, value in weights.items()}
    return {name: size or 1.0 for name, size in sizes.items()}
