"""The ensemble in PyTorch against its models one at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from models import LinearAttentionTransformer, ModelConfig
from models.batched import batched_loss, batched_predictions

N_MODELS, BATCH = 3, 5


def draw_problem(config: ModelConfig, n_groups: int = N_MODELS, dtype=torch.float64, device="cpu"):
    """Random parameters and prompts: (params, x, y, targets)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    params = {
        name: (0.4 * normal(N_MODELS, *shape)).requires_grad_()
        for name, shape in config.parameter_shapes().items()
    }
    n, p = config.n_context, config.n_covariates
    x, y = normal(n_groups, p, n + 1, BATCH), normal(n_groups, n, BATCH)
    return params, x, y, normal(n_groups, BATCH)


def one_by_one(config: ModelConfig, params, x, y, targets, group):
    """Predictions and losses of `LinearAttentionTransformer`, model by model."""
    model = LinearAttentionTransformer(config).to(x)
    n, predictions = config.n_context, []
    for m, g in enumerate(group):
        inputs = x.new_zeros(BATCH, n + 1, 2 + config.n_covariates)
        inputs[:, :, 0] = 1
        inputs[:, :, 1:-1] = x[g].permute(2, 1, 0)
        inputs[:, :-1, -1] = y[g].T
        own = {name: value[m] for name, value in params.items()}
        predictions.append(functional_call(model, own, (inputs,)))
    predictions = torch.stack(predictions)
    return predictions, (predictions - targets[group]).square().mean(dim=1)


@given(
    normalization=st.sampled_from(["branch", "post", "none"]),
    norm_affine=st.booleans(),
    readout=st.sampled_from(["flatten", "query"]),
    exclude_query=st.booleans(),
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
)
def test_equals_the_models_one_at_a_time(normalization, norm_affine, readout, exclude_query, sizes):
    d_model, n_layers, n_heads, n_context, n_covariates = sizes
    config = ModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_context=n_context,
        n_covariates=n_covariates,
        normalization=normalization,
        norm_affine=norm_affine and normalization != "none",
        readout=readout,
        exclude_query=exclude_query,
    )
    params, x, y, targets = draw_problem(config)
    predictions, losses = one_by_one(config, params, x, y, targets, range(N_MODELS))
    torch.testing.assert_close(batched_predictions(config, params, x, y), predictions)
    batched = batched_loss(config, params, x, y, targets)
    torch.testing.assert_close(batched, losses)
    names = list(params)
    expected = torch.autograd.grad(losses.sum(), params.values())
    found = torch.autograd.grad(batched.sum(), params.values())
    # Behind a norm of one or two features gradients vanish: rounding is judged by all of them.
    whole = torch.cat([gradient.flatten() for gradient in expected]).norm().item()
    for name, left, right in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            left, right, rtol=1e-9, atol=1e-9 * whole, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_models_share_the_prompts_of_their_group():
    config = ModelConfig(n_context=6)
    params, x, y, targets = draw_problem(config, n_groups=2)
    group = torch.tensor([1, 0, 1])
    _, losses = one_by_one(config, params, x, y, targets, group)
    torch.testing.assert_close(batched_loss(config, params, x, y, targets, group), losses)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_runs_on_a_gpu():
    config = ModelConfig(n_context=6)
    params, *prompts = draw_problem(config, device="cuda")
    on_cpu = draw_problem(config)
    loss = batched_loss(config, params, *prompts)
    assert loss.is_cuda
    torch.testing.assert_close(loss.cpu(), batched_loss(config, *on_cpu))
