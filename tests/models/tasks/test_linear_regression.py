"""Prompts: statistics against scikit-learn and NumPy, distributions, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.linear_model import LinearRegression

from models import PromptConfig, Prompts, prompts_from_arrays, sample_prompts


def data(batch: int, n: int, p: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    return (
        torch.randn(batch, n, p, **draw),
        torch.randn(batch, n, **draw),
        torch.randn(batch, p, **draw),
    )


@given(seed=st.integers(0, 2**31), p=st.integers(1, 4), extra=st.integers(2, 30))
def test_least_squares_agrees_with_scikit_learn(seed, p, extra):
    x, y, query = data(3, p + extra, p, seed)
    prompts = prompts_from_arrays(x, y, query)
    for i in range(3):
        fit = LinearRegression().fit(x[i].numpy(), y[i].numpy())
        np.testing.assert_allclose(prompts.slope[i].reshape(-1), fit.coef_, rtol=1e-6, atol=1e-8)
        expected = fit.predict(query[i : i + 1].numpy())[0]
        np.testing.assert_allclose(prompts.least_squares[i], expected, rtol=1e-6, atol=1e-8)


@given(seed=st.integers(0, 2**31), p=st.integers(1, 4))
def test_statistics_are_the_biased_ones(seed, p):
    x, y, query = data(2, 12, p, seed)
    prompts = prompts_from_arrays(x, y, query)
    for i in range(2):
        columns = np.column_stack([x[i].numpy(), y[i].numpy()])
        cov = np.cov(columns.T, bias=True)
        np.testing.assert_allclose(prompts.x_mean[i].reshape(-1), columns[:, :p].mean(0))
        np.testing.assert_allclose(prompts.y_mean[i], columns[:, p].mean())
        np.testing.assert_allclose(prompts.x_cov[i], cov[:p, :p], atol=1e-12)
        np.testing.assert_allclose(prompts.x_var[i].reshape(-1), np.diag(cov)[:p])
        np.testing.assert_allclose(prompts.xy_cov[i].reshape(-1), cov[:p, p], atol=1e-12)


def test_rows_are_one_x_y_and_the_query_comes_last():
    prompts = prompts_from_arrays([[1.0, 2.0, 4.0]], [[3.0, 5.0, 6.0]], [7.0])
    rows = [[1, 1, 3], [1, 2, 5], [1, 4, 6], [1, 7, 0]]
    assert prompts.inputs.tolist() == [rows]
    assert prompts.x_var.shape == prompts.slope.shape == prompts.least_squares.shape == (1,)
    assert (prompts.n_context, prompts.n_covariates, len(prompts)) == (3, 1, 1)
    assert prompts.query.tolist() == [[7.0]]


def test_large_offsets_keep_six_digits_of_the_variance():
    x, y, query = data(50, 20, 1)
    plain = prompts_from_arrays(x, y, query)
    moved = prompts_from_arrays(x + 1e6, y - 1e6, query + 1e6)
    torch.testing.assert_close(moved.x_var, plain.x_var, rtol=1e-6, atol=0)
    torch.testing.assert_close(moved.xy_cov, plain.xy_cov, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(moved.least_squares + 1e6, plain.least_squares, rtol=1e-6, atol=1e-7)


def test_integers_and_numpy_arrays_are_taken():
    prompts = prompts_from_arrays(np.arange(8).reshape(2, 4), np.ones((2, 4), int), [1, 2])
    assert prompts.inputs.dtype == torch.float64
    assert prompts.slope.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_is_a_function_of_the_generator(dtype):
    config = PromptConfig(x_mean_std=1, x_log_scale=0.7)
    first, again = (
        sample_prompts(config, 6, torch.Generator().manual_seed(3), dtype) for _ in range(2)
    )
    other = sample_prompts(config, 6, torch.Generator().manual_seed(4), dtype)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert first.inputs.dtype == first.least_squares.dtype == dtype


def test_normal_prompts_follow_their_model(generator):
    prompts = sample_prompts(PromptConfig(n_context=50, noise_std=0.5), 4000, generator)
    assert prompts.x.mean().abs() < 0.01
    assert (prompts.x.var() - 1).abs() < 0.02
    residual = prompts.y - prompts.y_mean[:, None]
    residual -= prompts.slope[:, None] * (prompts.x[..., 0] - prompts.x_mean[:, None])
    noise = residual.square().sum(1) / (50 - 2)  # unbiased for the noise variance
    assert (noise.mean() - 0.25).abs() < 0.003
    # slope ~ N(0, 1 + noise / (N V)): its variance is 1 plus about .005
    assert (prompts.slope.var() - 1).abs() < 0.07


def test_prompt_scales_and_means_vary_as_configured(generator):
    config = PromptConfig(n_context=400, x_log_scale=0.7, x_mean_std=2.0)
    prompts = sample_prompts(config, 4000, generator)
    log_scale = prompts.x_var.log() / 2
    assert (log_scale.var() - 1.4**2 / 12).abs() < 0.01
    assert log_scale.abs().max() < 0.7 + 5 / 400**0.5
    assert (prompts.x_mean.std() - 2).abs() < 0.08
    # The query has the same law as the context.
    z = (prompts.query[:, 0] - prompts.x_mean) / prompts.x_var.sqrt()
    assert (z.var() - 1).abs() < 0.1


def test_uniform_prompts_stay_in_their_bounds(generator):
    config = PromptConfig(x_distribution="uniform", x_bounds=(-3, 5))
    x = sample_prompts(config, 2000, generator).inputs[:, :, 1]
    assert x.min() >= -3
    assert x.max() <= 5
    assert (x.mean() - 1).abs() < 0.05
    assert (x.var() - 64 / 12).abs() < 0.1


def test_correlation_is_uniform_and_decays_by_powers(generator):
    config = PromptConfig(n_context=2000, n_covariates=3, x_correlation=0.8)
    cov = sample_prompts(config, 600, generator).x_cov
    deviation = cov.diagonal(dim1=1, dim2=2).sqrt()
    corr = cov / deviation[:, :, None] / deviation[:, None, :]
    assert corr[:, 0, 1].abs().max() < 0.86
    assert (corr[:, 0, 1].var() - 1.6**2 / 12).abs() < 0.02
    assert (corr[:, 0, 2] - corr[:, 0, 1].square()).abs().max() < 0.15


X, Y, U = (array.numpy() for array in data(3, 6, 1))


def poisoned(array, value):
    array = array.copy()
    array[1].flat[0] = value
    return array


@pytest.mark.parametrize(
    ("x", "y", "query", "message"),
    [
        (X[:, :2], Y[:, :2], U, "2 context sample.* at least 3"),
        (X[:, :1], Y[:, :1], U, "1 context sample.* at least 3"),
        (X, Y[:, :5], U, r"shapes do not fit.*\(3, 6, 1\).*\(3, 5\)"),
        (X, Y, U[:2], "shapes do not fit"),
        (X[0], Y, U, "shapes do not fit"),
        (X[:0], Y[:0], U[:0], "empty"),
        (poisoned(X, np.nan), Y, U, "x holds NaN or infinity in prompt 1"),
        (X, poisoned(Y, np.inf), U, "y holds NaN or infinity in prompt 1"),
        (X, Y, poisoned(U, np.nan), "query holds NaN or infinity in prompt 1"),
        (np.concatenate([X[:2], 0 * X[2:] + 7]), Y, U, "prompt 2: the variance of x_1 is 0"),
        (X * 1e-14 + 1e6, Y, U, "prompt 0: the variance of x_1"),
        (np.concatenate([X, 2 * X], 2), Y, np.ones((3, 2)), "x_2 given x_1"),
        (X + 1j, Y, U, "prompts must be real"),
        ([[1, 2], [3]], Y, U, "x is not a rectangular array of numbers"),
    ],
)
def test_bad_arrays_are_refused(x, y, query, message):
    with pytest.raises(ValueError, match=message):
        prompts_from_arrays(x, y, query)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_context": 2}, "greater than or equal to 3"),
        ({"n_context": 4, "n_covariates": 3}, "n_context=4 is too small.*at least 5"),
        ({"n_covariates": 0}, "n_covariates"),
        ({"noise_std": -1}, "noise_std"),
        ({"noise_std": float("nan")}, "noise_std"),
        ({"x_log_scale": float("inf")}, "x_log_scale"),
        ({"x_mean_std": -0.1}, "x_mean_std"),
        ({"x_distribution": "cauchy"}, "x_distribution"),
        ({"x_distribution": "uniform", "x_bounds": (1, 1)}, "low < high"),
        ({"x_correlation": 0.5}, "n_covariates >= 2"),
        (
            {"x_correlation": 0.5, "n_covariates": 2, "x_distribution": "uniform"},
            "x_distribution='normal'",
        ),
        ({"n_contexts": 5}, "n_contexts"),
    ],
)
def test_bad_configs_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        PromptConfig(**options)


def test_a_batch_has_at_least_one_prompt(generator):
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        sample_prompts(PromptConfig(), 0, generator)


def test_configs_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        PromptConfig().n_context = 5


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 1.0),
        (torch.float16, 300.0),  # V = 90,000 is beyond float16
        (torch.bfloat16, 1.0),
        (torch.float32, 1e15),
        (torch.float64, 1e100),
    ],
)
def test_least_squares_of_any_dtype_is_that_of_its_values(dtype, size, generator):
    x, query = (size * torch.randn(8, n, generator=generator).double() for n in (20, 1))
    y = 2 * x / size + 1 + 0.1 * torch.randn(8, 20, generator=generator)
    prompts = prompts_from_arrays(x.to(dtype), y.to(dtype), query.to(dtype))
    assert prompts.inputs.dtype == dtype
    for row in range(8):
        features, answers, at = (each[row].to(dtype).double().numpy() for each in (x, y, query))
        expected = LinearRegression().fit(features[:, None], answers).predict(at[:, None])
        assert float(prompts.least_squares[row]) == pytest.approx(expected[0], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (torch.float64, 1e160)])
@pytest.mark.parametrize("p", [1, 2])
def test_moments_beyond_the_dtype_are_refused(dtype, size, p, generator):
    x = (size * torch.randn(3, 20, p, generator=generator, dtype=torch.float64)).to(dtype)
    with pytest.raises(ValueError, match=r"prompt 0: .* overflow torch\.float.*smaller units"):
        prompts_from_arrays(x, x[..., 0] / size, x[:, 0])


def test_values_that_differ_by_rounding_of_half_precision_are_refused(generator):
    x = (1000 + torch.randn(2, 20, generator=generator)).to(torch.bfloat16)
    with pytest.raises(ValueError, match="rounding of values around"):
        prompts_from_arrays(x, x, x[:, 0])


def test_from_inputs_goes_there_and_back(generator):
    prompts = sample_prompts(PromptConfig(n_covariates=2), 5, generator)
    again = Prompts.from_inputs(prompts.inputs)
    torch.testing.assert_close(again.least_squares, prompts.least_squares)
    assert again.tokens.equal(prompts.inputs[:, :, 1:])
