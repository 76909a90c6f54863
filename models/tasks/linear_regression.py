"""In-context regression prompts and their sufficient statistics (paper eqs. 1-8).

Shapes: b batch, N context samples, p covariates. A prompt is an (N+1) x (2+p)
matrix with rows ``[1, x_n, y_n]`` and the query row ``[1, u, 0]`` last.

Statistics are biased (1/N) and computed from centred values. Least squares is
solved by modified Gram-Schmidt with y as a last column, which is as accurate as
Householder QR and never forms the square of the condition number:

    for k = 1..p:  pivot_k = |x_k|² / N,  then remove x_k from x_{k+1}..x_p and y.

For p = 1 this is eq. (8) to the letter: y_mean + (C / V)(u - x_mean).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.tasks.config import PromptConfig

# A spread below this many rounding steps of the largest |x| is not a spread. Where x is given in
# half precision and summed in float32, only the rounding of x itself is left.
_ROUNDING_STEPS, _ROUNDING_STEPS_OF_HALF = 64, 2


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts with the statistics of their context rows.

    For p = 1 the covariate axis is dropped: `x_mean`, `x_var`, `xy_cov` and
    `slope` are [b].

    Attributes:
        inputs: [b, N+1, 2+p], what the model sees.
        x_mean: x̄, [b, p].
        y_mean: ȳ, [b].
        x_var: V, the variance of each covariate, [b, p].
        x_cov: covariance matrix of the covariates, [b, p, p] (also for p = 1).
        xy_cov: C, covariance of each covariate with y, [b, p].
        slope: least-squares slopes, C / V for p = 1, [b, p].
        least_squares: least-squares prediction at the query, [b].

    Statistics have the dtype of the inputs, and float32 where those are in half precision.
    """

    inputs: Tensor
    x_mean: Tensor
    y_mean: Tensor
    x_var: Tensor
    x_cov: Tensor
    xy_cov: Tensor
    slope: Tensor
    least_squares: Tensor

    def __len__(self) -> int:
        """Number of prompts."""
        return self.inputs.shape[0]

    @property
    def n_context(self) -> int:
        """N, the number of context samples."""
        return self.inputs.shape[1] - 1

    @property
    def n_covariates(self) -> int:
        """Number of covariates, p."""
        return self.inputs.shape[2] - 2

    @property
    def target(self) -> Tensor:
        """What a model of the task should predict: least squares, [b]."""
        return self.least_squares

    @property
    def tokens(self) -> Tensor:
        """Rows (x, y) without the constant, y = 0 at the query, [b, N+1, p+1]."""
        return self.inputs[:, :, 1:]

    @property
    def x(self) -> Tensor:
        """Context covariates, [b, N, p]."""
        return self.inputs[:, :-1, 1:-1]

    @property
    def y(self) -> Tensor:
        """Context responses, [b, N]."""
        return self.inputs[:, :-1, -1]

    @property
    def query(self) -> Tensor:
        """Query covariates u, [b, p]."""
        return self.inputs[:, -1, 1:-1]

    @classmethod
    def from_inputs(cls, inputs: Tensor) -> Prompts:
        """Prompts from what a model sees, [b, N+1, 2+p]; raises as `prompts_from_arrays`."""
        return prompts_from_arrays(inputs[:, :-1, 1:-1], inputs[:, :-1, -1], inputs[:, -1, 1:-1])


def sample_prompts(
    config: PromptConfig,
    batch: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Prompts:
    """Draw `batch` prompts, on the device of `generator`.

    Args:
        config: the prompt distribution.
        batch: number of prompts, at least 1.
        generator: source of all randomness; the same state gives the same prompts.
        dtype: floating dtype of every tensor of the result.

    Raises:
        ValueError: if `batch` is not positive, or a drawn prompt has V at rounding level or
            beyond the range of `dtype`.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    x, y = draw(config, batch, generator, dtype)
    return _prompts(x, y)


def prompts_from_arrays(x: Tensor, y: Tensor, query: Tensor) -> Prompts:
    """Build prompts from a user's own regression data.

    Args:
        x: context covariates, [b, N, p], or [b, N] for one covariate.
        y: context responses, [b, N].
        query: query covariates, [b, p], or [b] for one covariate.
            NumPy arrays and nested lists are accepted; integers become float64.

    Raises:
        ValueError: on shapes that do not fit together, fewer than p + 2 context
            samples, NaN or infinity, or covariates with no spread (V = 0 or
            collinear, up to rounding) or moments beyond the range of the dtype; the message names
            the prompt.
    """
    x, y, query = _floating(x=x, y=y, query=query)
    if x.ndim == 2:
        x = x[:, :, None]
    if query.ndim == 1:
        query = query[:, None]
    if x.ndim != 3 or y.shape != x.shape[:2] or query.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"shapes do not fit: x {tuple(x.shape)}, y {tuple(y.shape)}, query "
            f"{tuple(query.shape)}; expected x [batch, n_context, n_covariates], "
            f"y [batch, n_context], query [batch, n_covariates]"
        )
    batch, n_context, n_covariates = x.shape
    if batch == 0 or n_covariates == 0:
        raise ValueError(f"x {tuple(x.shape)} is empty; give at least one prompt and covariate")
    if n_context < n_covariates + 2:
        raise ValueError(
            f"{n_context} context sample(s) are too few: least squares with {n_covariates} "
            f"covariate(s) and an intercept needs at least {n_covariates + 2}"
        )
    for name, values in (("x", x), ("y", y), ("query", query)):
        bad = ~values.isfinite().reshape(batch, -1).all(1)
        if bad.any():
            raise ValueError(
                f"{name} holds NaN or infinity in prompt {int(bad.nonzero()[0, 0])}; "
                f"remove or repair it"
            )
    rows = torch.cat([x, query[:, None, :]], dim=1)
    return _prompts(rows.permute(2, 1, 0), y.T)


def draw(
    config: PromptConfig,
    batch: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    query_y: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw raw samples in the layout the training loop wants.

    Args:
        config: the prompt distribution.
        batch: b, number of prompts.
        generator: source of all randomness.
        dtype: floating dtype of the result.
        query_y: also draw the noisy y of the query, last, so that all else stays the same.

    Returns:
        x [p, N+1, b] with the query as row N, and y [N, b], or [N+1, b] with `query_y`.
    """
    shape = (config.n_covariates, config.n_context + 1, batch)
    options = {"generator": generator, "dtype": dtype, "device": generator.device}
    if config.x_distribution == "uniform":
        low, high = config.x_bounds
        x = torch.rand(shape, **options).mul_(high - low).add_(low)
    else:
        x = torch.randn(shape, **options)
    if config.x_correlation:
        rho = torch.rand(batch, **options).mul_(2).sub_(1).mul_(config.x_correlation)
        fresh = (1 - rho * rho).sqrt()
        for j in range(1, config.n_covariates):
            x[j] = rho * x[j - 1] + fresh * x[j]
    if config.x_log_scale:
        log_scale = torch.rand((config.n_covariates, 1, batch), **options).mul_(2).sub_(1)
        x *= log_scale.mul_(config.x_log_scale).exp_()
    if config.x_mean_std:
        x += torch.randn((config.n_covariates, 1, batch), **options).mul_(config.x_mean_std)
    theta = torch.randn((config.n_covariates + 1, batch), **options)
    y = theta[0] + (theta[1:, None] * (x if query_y else x[:, :-1])).sum(0)
    if config.noise_std:
        context = y[: config.n_context]
        context += torch.randn(context.shape, **options).mul_(config.noise_std)
        if query_y:
            y[-1] += torch.randn(batch, **options).mul_(config.noise_std)
    return x, y


@dataclass(frozen=True)
class Elimination:
    """Least squares by elimination, in the layout of `draw`.

    Attributes:
        x_mean: [p, b].
        y_mean: [b].
        centred_x: context and query rows minus `x_mean`, [p, N+1, b].
        centred_y: [N, b].
        pivots: variance of x_k given x_1..x_{k-1}, [p, b].
        factors: coefficient of x_k in x_j, [p, p, b], zero unless j > k.
        partial_slopes: slope of y on x_k given x_1..x_{k-1}, [p, b].
        prediction: least-squares prediction at the query, [b].
    """

    x_mean: Tensor
    y_mean: Tensor
    centred_x: Tensor
    centred_y: Tensor
    pivots: Tensor
    factors: Tensor
    partial_slopes: Tensor
    prediction: Tensor


def eliminate(x: Tensor, y: Tensor) -> Elimination:
    """Solve least squares with intercept for x [p, N+1, b], y [N, b] (last x row: query)."""
    n_covariates, _, batch = x.shape
    # Shifting by one sample first keeps the mean exact under large common offsets.
    x_mean = x[:, 0] + (x[:, :-1] - x[:, :1]).mean(1)
    y_mean = y[0] + (y - y[:1]).mean(0)
    centred_x, centred_y = x - x_mean[:, None], y - y_mean
    residual_x = centred_x.clone() if n_covariates > 1 else centred_x
    residual_y = centred_y
    pivots, partial = [], []
    factors = x.new_zeros(n_covariates, n_covariates, batch)
    prediction = y_mean
    for k in range(n_covariates):
        column = residual_x[k, :-1]
        pivot = (column * column).mean(0)
        slope = (column * residual_y).mean(0) / pivot
        prediction = prediction + slope * residual_x[k, -1]
        if k + 1 < n_covariates:
            residual_y = residual_y - slope * column
            factors[k, k + 1 :] = (column * residual_x[k + 1 :, :-1]).mean(1) / pivot
            residual_x[k + 1 :] -= factors[k, k + 1 :, None] * residual_x[k]
        pivots.append(pivot)
        partial.append(slope)
    return Elimination(
        x_mean=x_mean,
        y_mean=y_mean,
        centred_x=centred_x,
        centred_y=centred_y,
        pivots=torch.stack(pivots),
        factors=factors,
        partial_slopes=torch.stack(partial),
        prediction=prediction,
    )


def _prompts(x: Tensor, y: Tensor) -> Prompts:
    """Assemble prompts from x [p, N+1, b] and y [N, b]."""
    n_covariates, rows, batch = x.shape
    held = torch.promote_types(x.dtype, torch.float32)
    solved = eliminate(x.to(held), y.to(held))
    _require_spread(x, solved.pivots)
    _require_range(x, solved)
    context = solved.centred_x[:, :-1]
    x_cov = torch.einsum("jnb,knb->bjk", context, context) / (rows - 1)
    xy_cov = torch.einsum("jnb,nb->bj", context, solved.centred_y) / (rows - 1)
    slope = solved.partial_slopes.clone()
    for k in reversed(range(n_covariates - 1)):
        slope[k] -= (solved.factors[k, k + 1 :] * slope[k + 1 :]).sum(0)

    inputs = x.new_ones(batch, rows, n_covariates + 2)
    inputs[:, :, 1:-1] = x.permute(2, 1, 0)
    inputs[:, :-1, -1] = y.T
    inputs[:, -1, -1] = 0

    def per_covariate(values: Tensor) -> Tensor:
        return values[:, 0] if n_covariates == 1 else values

    return Prompts(
        inputs=inputs,
        x_mean=per_covariate(solved.x_mean.T.contiguous()),
        y_mean=solved.y_mean,
        x_var=per_covariate(x_cov.diagonal(dim1=1, dim2=2)),
        x_cov=x_cov,
        xy_cov=per_covariate(xy_cov),
        slope=per_covariate(slope.T.contiguous()),
        least_squares=solved.prediction,
    )


def _require_range(x: Tensor, solved: Elimination) -> None:
    """Refuse prompts whose second moments or prediction overflow the dtype they are held in."""
    moments = [*solved.pivots, *solved.partial_slopes, solved.prediction]
    beyond = ~torch.stack(moments).isfinite().all(0)
    if beyond.any():
        prompt = int(beyond.nonzero()[0, 0])
        dtype = solved.pivots.dtype
        raise ValueError(
            f"prompt {prompt}: with |x| up to {float(x[:, :, prompt].abs().max()):.3g} the moments "
            f"of x and y overflow {dtype} (largest {torch.finfo(dtype).max:.3g}), so that least "
            f"squares cannot be computed; bring x and y to smaller units, or use a wider dtype"
        )


def _require_spread(x: Tensor, pivots: Tensor) -> None:
    """Refuse prompts whose covariates have no spread beyond rounding."""
    rounding = _ROUNDING_STEPS * torch.finfo(pivots.dtype).eps
    if x.dtype != pivots.dtype:
        rounding = max(rounding, _ROUNDING_STEPS_OF_HALF * torch.finfo(x.dtype).eps)
    smallest = rounding * x.abs().amax(1).to(pivots.dtype)
    flat = pivots <= smallest.square()
    if flat.any():
        covariate, prompt = (int(i) for i in flat.nonzero()[0])
        given = f" given x_1..x_{covariate}" if covariate else ""
        raise ValueError(
            f"prompt {prompt}: the variance of x_{covariate + 1}{given} is "
            f"{float(pivots[covariate, prompt]):.3g}, which is rounding of values around "
            f"{float(x[covariate, :, prompt].abs().max()):.3g}; least squares divides by it, "
            f"so give samples whose covariates differ and are not collinear"
        )


def _floating(**arrays: Tensor) -> list[Tensor]:
    """Turn arrays into tensors of one floating dtype."""
    tensors = []
    for name, array in arrays.items():
        try:
            tensors.append(torch.as_tensor(array))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} is not a rectangular array of numbers: {error}") from error
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not dtype.is_floating_point:
        if dtype.is_complex:
            raise ValueError(f"prompts must be real, got {dtype}; drop the imaginary part")
        dtype = torch.float64
    return [tensor.to(dtype) for tensor in tensors]
