"""Rival algorithms: independent formulas, published numbers, agreement with built models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

import models
from models import PromptConfig, prompts_from_arrays, sample_prompts
from models.constructed.published import ahn_optimum
from probe.rivals import algorithms
from probe.rivals.algorithms import with_query_row


def draw(batch=64, seed=0, **config):
    return sample_prompts(PromptConfig(**config), batch, torch.Generator().manual_seed(seed))


def features(prompts):
    inputs = prompts.inputs[:, :, :-1]
    return inputs[:, :-1], inputs[:, -1]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---- formulas, written out step by step -------------------------------------------------


@pytest.mark.parametrize("n_covariates", [1, 2, 3])
@pytest.mark.parametrize("gamma", [0.0, 0.2])
def test_gradient_descent_and_plus_plus_step_by_step(n_covariates, gamma):
    prompts = draw(n_covariates=n_covariates)
    rows, query = features(prompts)
    residual, at_query = prompts.y.clone(), torch.zeros(len(prompts)).double()
    for _ in range(4):
        moment = torch.einsum("bn,bnf->bf", residual, rows) / 20
        gram = rows.mT @ rows / 20
        at_query = at_query + 0.3 * (query * moment).sum(1)
        residual = residual - 0.3 * (rows @ moment[..., None])[..., 0]
        rows = rows - gamma * rows @ gram
        query = query - gamma * (query[:, None] @ gram)[:, 0]
    close(algorithms.gradient_descent_pp(prompts, 4, 0.3, gamma), at_query)


def test_preconditioned_descent_step_by_step():
    prompts = draw(n_covariates=2)
    rows, query = features(prompts)
    matrix = torch.tensor([[0.5, 0.1, 0.0], [0.1, 0.4, -0.1], [0.0, -0.1, 0.3]]).double()
    weights = torch.zeros(len(prompts), 3).double()
    for _ in range(3):
        error = (rows @ weights[..., None])[..., 0] - prompts.y
        weights = weights - torch.einsum("bn,bnf->bf", error, rows) / 20 @ matrix
    close(algorithms.preconditioned(prompts, 3, matrix), (weights * query).sum(1))


def test_newton_iterates_the_inverse():
    prompts = draw(n_covariates=2)
    rows, query = features(prompts)
    S = rows.mT @ rows
    M = S / torch.linalg.matrix_norm(S @ S, keepdim=True)
    for _ in range(5):
        M = M @ (2 * torch.eye(3).double() - S @ M)
    weights = M @ rows.mT @ prompts.y[..., None]
    close(algorithms.newton(prompts, 5), (weights[..., 0] * query).sum(1), 1e-9)


@pytest.mark.parametrize("free_intercept", [False, True])
def test_ridge_matches_scikit_learn(free_intercept):
    prompts = draw(n_covariates=2, batch=5)
    predicted = algorithms.ridge(prompts, 0.3, free_intercept)
    rows, query = features(prompts)
    for b in range(5):
        model = Ridge(alpha=0.3 * 20, fit_intercept=free_intercept)
        model.fit(rows[b].numpy(), prompts.y[b].numpy())
        expected = model.predict(query[b : b + 1].numpy())[0]
        assert predicted[b].item() == pytest.approx(expected, rel=1e-9)


def test_bayes_ridge_has_the_least_risk():
    # Akyürek et al.: λ = σ²/τ² on the sum, so σ²/N on the mean with τ = 1.
    generator = torch.Generator().manual_seed(0)
    theta, x = (torch.randn(40_000, n, generator=generator, dtype=torch.float64) for n in (2, 6))
    y = (
        theta[:, :1]
        + theta[:, 1:] * x
        + torch.randn(x.shape, generator=generator, dtype=torch.float64)
    )
    prompts = prompts_from_arrays(x[:, :5], y[:, :5], x[:, 5])
    clean = theta[:, 0] + theta[:, 1] * x[:, 5]

    def risk(penalty):
        return (algorithms.ridge(prompts, penalty) - clean).square().mean().item()

    assert risk(1 / 5) < min(risk(0.8 / 5), risk(1.25 / 5))


# ---- agreement with models built from weights -------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.1])
@pytest.mark.parametrize("n_covariates", [1, 3])
@pytest.mark.parametrize("exclude_query", [True, False])
def test_built_models_are_the_rivals(gamma, n_covariates, exclude_query):
    prompts = draw(n_covariates=n_covariates)
    rows = 20 if exclude_query else 21
    model = models.gradient_descent(
        5, 0.3, rows, n_covariates, gamma=gamma, exclude_query=exclude_query
    )
    seen = prompts if exclude_query else with_query_row(prompts)
    close(algorithms.gradient_descent_pp(seen, 5, 0.3, gamma), model(prompts.inputs))


def test_built_preconditioned_model_is_the_rival():
    prompts = draw()
    matrix = torch.tensor([[0.5, 0.1], [0.1, 0.4]]).double()
    model = models.gradient_descent(3, matrix.expand(3, 2, 2))
    close(algorithms.preconditioned(prompts, 3, matrix), model(prompts.inputs))


@pytest.mark.parametrize("n_covariates", [1, 2])
def test_construction_with_query_row_is_least_squares_with_one_more_sample(n_covariates):
    prompts = draw(n_covariates=n_covariates)
    model = models.closed_form(20, n_covariates, scale=1e4)
    close(with_query_row(prompts).least_squares, model(prompts.inputs), 1e-4)


def test_ahn_optimum_is_one_preconditioned_step():
    prompts = draw(n_covariates=2)
    gamma = 1.05 * torch.eye(2) + 0.1 * torch.eye(2)
    P, Q = ahn_optimum(torch.eye(2), 20)
    preconditioner = torch.zeros(3, 3).double()
    preconditioner[1:, 1:] = torch.linalg.inv(gamma.double())
    close(
        algorithms.preconditioned(prompts, 1, preconditioner),
        models.from_ahn(P, Q, 20)(prompts.inputs),
        1e-6,
    )


def test_tuned_step_of_one_uniform_gd_step():
    # von Oswald et al.: for x ~ U(-a, a)^d and no intercept the best step on the sum is
    # 1 / (s (n + d - 0.2)) with s = a²/3; the fit to least squares' own target y is the same
    # problem. n = 12, d = 2: 12 samples of a mean, so η = n / (s (n + 1.8)).
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60_000, 13, 2, generator=generator, dtype=torch.float64) - 0.5
    slope = torch.randn(60_000, 2, generator=generator, dtype=torch.float64)
    y = torch.einsum("bnp,bp->bn", x, slope)
    prompts = prompts_from_arrays(x[:, :12], y[:, :12], x[:, 12])
    second_moment = 1 / 12
    diagonal = torch.diag(torch.tensor([0.0, 1.0, 1.0]))
    unit = algorithms.preconditioned(prompts, 1, diagonal)
    best = ((unit * y[:, 12]).mean() / unit.square().mean()).item()
    assert best == pytest.approx(12 / (second_moment * (12 + 2 - 0.2)), rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    scale=st.floats(0.01, 100),
    shift=st.floats(-5, 5),
    slope=st.floats(-5, 5),
    seed=st.integers(0, 99),
)
def test_least_squares_is_equivariant_and_newton_converges_to_it(scale, shift, slope, seed):
    prompts = draw(8, seed=seed)
    moved = prompts_from_arrays(
        scale * prompts.x + shift,
        prompts.y + slope * prompts.x[..., 0],
        scale * prompts.query + shift,
    )
    expected = prompts.least_squares + slope * prompts.query[:, 0]
    close(algorithms.least_squares(moved), expected, 1e-7)
    close(algorithms.newton(prompts, 32), prompts.least_squares, 1e-7)


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="n_steps=0"):
        algorithms.newton(draw(4), 0)
