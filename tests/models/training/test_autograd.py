"""The gradients of an ensemble, together and one by one, against plain autograd and the kernel."""

import numpy as np
import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig
from models.training.autograd import inputs_of, loss_and_gradients
from models.training.kernel import FusedKernel

N_MODELS, BATCH = 3, 5
SHAPES = {
    "paper": ModelConfig(n_context=6),
    "post, affine": ModelConfig(n_context=4, normalization="post", norm_affine=True),
    "no norm, query readout": ModelConfig(n_context=6, normalization="none", readout="query"),
    "query excluded, two covariates": ModelConfig(
        n_context=5, n_covariates=2, d_model=5, n_layers=3, exclude_query=True
    ),
}
GROUP = torch.tensor([1, 0, 1])


def draw_problem(config: ModelConfig, dtype=torch.float64, device="cpu"):
    """Random parameters and prompts of two groups: (params, x, y, targets)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    params = {
        name: 0.4 * normal(N_MODELS, *shape) for name, shape in config.parameter_shapes().items()
    }
    n, p = config.n_context, config.n_covariates
    return params, normal(2, p, n + 1, BATCH), normal(2, n, BATCH), normal(2, BATCH)


def one_by_one(config: ModelConfig, params, x, y, targets):
    """Losses and gradients of each model as it stands, with plain autograd."""
    losses, gradients = [], []
    for m, g in enumerate(GROUP.tolist()):
        model = LinearAttentionTransformer(config).double()
        model.load_state_dict({name: value[m] for name, value in params.items()})
        inputs = torch.zeros(BATCH, config.n_context + 1, 2 + config.n_covariates).double()
        inputs[:, :, 0] = 1
        inputs[:, :, 1:-1] = x[g].permute(2, 1, 0)
        inputs[:, :-1, -1] = y[g].T
        loss = (model(inputs) - targets[g]).square().mean()
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    stacked = [torch.stack(parts) for parts in zip(*gradients, strict=True)]
    return torch.stack(losses), dict(zip(params, stacked, strict=True))


def assert_close(found, expected, scale=1e-9):
    torch.testing.assert_close(found[0], expected[0], rtol=scale, atol=scale)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=scale, atol=scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_equals_plain_autograd_and_the_kernel(config, together):
    problem = draw_problem(config)
    model = LinearAttentionTransformer(config).double()
    found = loss_and_gradients(model, *problem, GROUP, together)
    assert_close(found, one_by_one(config, *problem))

    params, *prompts = ({n: v.numpy() for n, v in problem[0].items()}, *problem[1:])
    kernel = FusedKernel(config, BATCH, np.float64)
    losses, gradients = kernel.loss_and_gradients(
        params, *(part.numpy() for part in prompts), GROUP.numpy()
    )
    fused = torch.from_numpy(losses), {n: torch.from_numpy(v) for n, v in gradients.items()}
    assert_close(found, fused)


def test_one_by_one_company_does_not_change_a_bit():
    config = SHAPES["paper"]
    params, *prompts = draw_problem(config, torch.float32)
    model = LinearAttentionTransformer(config)
    losses, gradients = loss_and_gradients(model, params, *prompts, GROUP)
    for m in range(N_MODELS):
        own = {name: value[[m]] for name, value in params.items()}
        loss, alone = loss_and_gradients(model, own, *prompts, GROUP[[m]])
        assert torch.equal(loss, losses[[m]])
        assert all(torch.equal(alone[name], gradients[name][[m]]) for name in alone)


def test_the_model_itself_is_left_alone():
    config = SHAPES["paper"]
    model = LinearAttentionTransformer(config).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for together in (False, True):
        loss_and_gradients(model, *draw_problem(config), GROUP, together)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_any_class_of_model_is_differentiated_as_it_is():
    class Halved(LinearAttentionTransformer):
        def forward(self, inputs):
            return super().forward(inputs) / 2

    config = SHAPES["paper"]
    params, x, y, targets = draw_problem(config)
    halved = loss_and_gradients(Halved(config).double(), params, x, y, targets, GROUP)
    double = {n: v * (2 if n.startswith("unembed") else 1) for n, v in params.items()}
    own, _ = loss_and_gradients(Halved(config).double(), double, x, y, targets, GROUP)
    plain, _ = loss_and_gradients(
        LinearAttentionTransformer(config).double(), params, x, y, targets, GROUP
    )
    torch.testing.assert_close(own, plain)
    assert not torch.allclose(halved[0], plain)


def test_inputs_are_those_of_the_prompts():
    _, x, y, _ = draw_problem(SHAPES["query excluded, two covariates"])
    inputs = inputs_of(x, y)
    assert inputs.shape == (2, BATCH, 6, 4)
    assert (inputs[..., 0] == 1).all()
    assert (inputs[:, :, -1, -1] == 0).all()
    torch.testing.assert_close(inputs[1, 3, 2], torch.tensor([1, *x[1, :, 2, 3], y[1, 2, 3]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_runs_on_a_gpu():
    config = SHAPES["paper"]
    expected = one_by_one(config, *draw_problem(config))
    model = LinearAttentionTransformer(config).double().cuda()
    losses, gradients = loss_and_gradients(
        model, *draw_problem(config, device="cuda"), GROUP.cuda(), together=True
    )
    assert losses.is_cuda
    assert_close((losses.cpu(), {n: v.cpu() for n, v in gradients.items()}), expected)
