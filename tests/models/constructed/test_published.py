"""Published parametrisations: the formulas of their papers, and numbers derived from them."""

import pytest
import torch

from models import (
    PromptConfig,
    from_ahn,
    from_von_oswald,
    from_zhang,
    gradient_descent,
    sample_prompts,
)
from models.constructed.published import ahn_optimum, von_oswald_step, zhang_optimum


def noiseless(n_context, n_covariates, batch, std=None, half_width=None, seed=0):
    """Prompts without intercept or noise, slopes ~ N(0, I): inputs and y at the query."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, n_context + 1, n_covariates)
    if half_width is not None:
        x = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * half_width
    else:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if std is not None:
        x = x * std
    slope = torch.randn(batch, n_covariates, generator=generator, dtype=torch.float64)
    y = torch.einsum("bnp,bp->bn", x, slope)
    inputs = torch.cat([torch.ones(batch, n_context + 1, 1), x, y[..., None]], dim=2)
    inputs[:, -1, -1] = 0
    return inputs, y[:, -1]


def monte_carlo_risk(model, batch=40_000, **prompts):
    inputs, target = noiseless(batch=batch, **prompts)
    return (model(inputs) - target).square().mean().item()


def gamma(eigenvalues, n):
    return (1 + 1 / n) * eigenvalues + eigenvalues.sum() / n


# Eigenvalues of the covariance, mean squared error (Ahn et al., theorem 1; n = 20).
AHN = {
    "identity": (torch.ones(5), 1.15385),
    "unequal": (torch.tensor([4.0, 1.0, 0.25]), 0.7836),
}


@pytest.mark.parametrize(("eigenvalues", "risk"), AHN.values(), ids=AHN)
def test_ahn_optimum_reaches_the_published_risk(eigenvalues, risk):
    eigenvalues = eigenvalues.double()
    formula = (eigenvalues * (1 - eigenvalues / gamma(eigenvalues, 20))).sum().item()
    assert formula == pytest.approx(risk, abs=5e-5)

    model = from_ahn(*ahn_optimum(torch.diag(eigenvalues), 20), n_context=20)
    measured = monte_carlo_risk(
        model, n_context=20, n_covariates=len(eigenvalues), std=eigenvalues.sqrt()
    )
    assert measured == pytest.approx(risk, rel=0.03)


def test_ahn_optimum_matrices():
    P, Q = ahn_optimum(torch.eye(5), 20)
    assert torch.equal(P[0], torch.diag(torch.tensor([0.0, 0, 0, 0, 0, 1]).double()))
    expected = -0.76923 * torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]).double())
    torch.testing.assert_close(Q[0], expected, rtol=0, atol=5e-6)


# Test length M, risk (Zhang et al., theorem 4.2; covariance I, N = 20, p = 5).
@pytest.mark.parametrize(("length", "risk"), [(20, 1.1538), (40, 0.7101), (200, 0.3550)])
def test_zhang_optimum_at_other_test_lengths(length, risk):
    model = from_zhang(*zhang_optimum(torch.eye(5), 20), n_context=length)
    measured = monte_carlo_risk(model, n_context=length, n_covariates=5, batch=20_000)
    assert measured == pytest.approx(risk, rel=0.04)


def test_zhang_risk_has_a_floor_that_no_test_length_removes():
    # At infinite length Σ y x / M is Λw, so the error is (1 - λ/Γ) w per direction.
    eigenvalues = torch.ones(5).double()
    floor = (eigenvalues * (1 - eigenvalues / gamma(eigenvalues, 20)).square()).sum()
    assert floor.item() == pytest.approx(0.2663, abs=5e-5)


def test_ahn_and_zhang_optima_are_the_same_predictor():
    covariance = torch.tensor([[2.0, 0.3], [0.3, 0.5]]).double()
    inputs, _ = noiseless(20, 2, 16)
    ahn = from_ahn(*ahn_optimum(covariance, 20), n_context=20)
    zhang = from_zhang(*zhang_optimum(covariance, 20), n_context=20)
    torch.testing.assert_close(ahn(inputs), zhang(inputs), rtol=0, atol=1e-12)


def test_ahn_layers_follow_the_formula():
    generator = torch.Generator().manual_seed(1)
    P, Q = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    inputs, _ = noiseless(6, 3, 1)
    E = inputs[0, :, 1:].T
    hide_query = torch.diag(torch.tensor([1.0] * 6 + [0.0]).double())
    for layer in range(3):
        E = E + P[layer] @ E @ hide_query @ (E.T @ Q[layer] @ E) / 6
    torch.testing.assert_close(from_ahn(P, Q, 6)(inputs)[0], -E[-1, -1], rtol=1e-10, atol=0)


def test_von_oswald_layers_follow_the_formula():
    generator = torch.Generator().manual_seed(2)
    shape = (4, 2, 3, 4, 4)  # matrices, layers, heads
    query, key, value, projection = 0.3 * torch.randn(
        shape, generator=generator, dtype=torch.float64
    )
    inputs, _ = noiseless(6, 3, 1)
    E = inputs[0, :, 1:].T
    for layer in range(2):
        context, step = E[:, :-1], torch.zeros_like(E)
        for q, k, v, p in zip(
            query[layer], key[layer], value[layer], projection[layer], strict=True
        ):
            step += p @ v @ context @ context.T @ k.T @ q @ E
        E = E + step
    model = from_von_oswald(query, key, value, projection, 6)
    torch.testing.assert_close(model(inputs)[0], -E[-1, -1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.7, -1.3]])
def test_von_oswald_step_is_one_gradient_step_from_any_start(weights):
    w = torch.tensor(weights, dtype=torch.float64)
    model = from_von_oswald(**von_oswald_step(0.4, 20, w))
    prompts = sample_prompts(
        PromptConfig(n_covariates=2), 32, torch.Generator().manual_seed(0), torch.float64
    )
    error = prompts.y - prompts.x @ w
    stepped = w + 0.4 / 20 * torch.einsum("bn,bnp->bp", error, prompts.x)
    expected = (stepped * prompts.query).sum(1)
    torch.testing.assert_close(model(prompts.inputs), expected, rtol=0, atol=1e-12)
    built = gradient_descent(1, 0.4, n_covariates=2, intercept=False, initial_weights=weights)
    torch.testing.assert_close(model(prompts.inputs), built(prompts.inputs), rtol=0, atol=1e-12)


def test_von_oswald_best_step_and_its_loss():
    # x ~ U(-1/2, 1/2)^10, n = 10; the paper's step multiplies the sum, not the mean.
    n, d, second_moment = 10, 10, 0.5**2 / 3
    best = 1 / (second_moment * (n + d - 0.2))
    loss = 0.5 * second_moment * d * (1 - n / (n + d - 0.2))
    assert best == pytest.approx(0.60606, abs=5e-6)
    assert loss == pytest.approx(0.20623, abs=5e-6)

    def half_mse(step):
        model = from_von_oswald(**von_oswald_step(step * n, n, torch.zeros(d)))
        return 0.5 * monte_carlo_risk(model, n_context=n, n_covariates=d, half_width=0.5)

    assert half_mse(best) == pytest.approx(loss, rel=0.02)
    assert half_mse(best) < min(half_mse(0.8 * best), half_mse(1.2 * best))


BAD = {
    "not square": lambda: from_ahn(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), 5),
    "missing layer axis": lambda: from_ahn(torch.zeros(2, 2), torch.zeros(2, 2), 5),
    "different shapes": lambda: from_zhang(torch.zeros(3, 3), torch.zeros(2, 2), 5),
    "initial weights": lambda: from_von_oswald(
        *[torch.zeros(1, 1, 3, 3)] * 4, 5, initial_weights=torch.zeros(3)
    ),
    "covariance not symmetric": lambda: ahn_optimum(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), 5),
    "covariance not definite": lambda: zhang_optimum(torch.diag(torch.tensor([1.0, 0.0])), 5),
}


@pytest.mark.parametrize("build", BAD.values(), ids=BAD)
def test_bad_shapes_are_refused(build):
    with pytest.raises(ValueError, match=r"expected|must be"):
        build()
