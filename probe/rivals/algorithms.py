r"""The algorithms a model may have learned, as plain functions of prompts.

With features f = [1, x] (F is [N, f] for one prompt), Gram matrix G = FᵀF/N and moment
c = Fᵀy/N, every rival predicts f_u · w at the query f_u = [1, u]:

    least squares      w = G⁻¹ c
    ridge(λ)           w = (G + λ I)⁻¹ c, or λ on the slopes only ("free intercept");
                       λ adds to the mean, so Nλ is the penalty on the sum of squares
    GD_k(η)            w <- w - η_t (G w - c), k times from 0
    preconditioned GD  w <- w - P_t (G w - c), P_t symmetric positive semidefinite
    GD++_k(η, γ)       GD on features that move too, F <- F (I - γ G)
                       (von Oswald et al., arXiv 2212.07677)
    Newton_k           M <- M (2I - G M) from M = Gᵀ / |G Gᵀ|_F, w = M c
                       (Fu et al., arXiv 2310.17086)
    context mean       ȳ, and zero.

In the eigenbasis of G, with eigenvalues g, all but the preconditioned one are filters:
the prediction is Σ_i φ(g_i) (f_u)_i c_i. A sweep over k and over many step sizes is then
one pass of elementwise operations, a *path*: it yields the predictions after 1, 2, ...
steps for many parameter sets at once.

Attention that keeps the query row among its keys treats it as one more sample (u, 0).
On prompts with that sample added (`with_query_row`) least squares is exactly what
`models.closed_form` computes as R grows, and GD what
`models.gradient_descent(exclude_query=False)` computes.

Shapes: b batch, f features, K parameter sets. Batches come last: rows stay long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from models.tasks.linear_regression import Prompts, prompts_from_arrays


def least_squares(prompts: Prompts) -> Tensor:
    """Ordinary least squares with an intercept, [b]."""
    return prompts.least_squares


def context_mean(prompts: Prompts) -> Tensor:
    """ȳ, [b]."""
    return prompts.y_mean


def zero(prompts: Prompts) -> Tensor:
    """0 for every prompt, [b]."""
    return torch.zeros_like(prompts.y_mean)


def ridge(prompts: Prompts, penalty: float, free_intercept: bool = False) -> Tensor:
    """Ridge regression, [b].

    Args:
        prompts: the prompts.
        penalty: λ >= 0, added to G (to V when the intercept is free). Bayes optimal for
            weights ~ N(0, τ²) and noise σ² is λ = σ² / (N τ²) (Akyürek et al.,
            arXiv 2211.15661, who add to the sum).
        free_intercept: leave the intercept unpenalised.
    """
    path = free_intercept_ridge_path if free_intercept else ridge_path
    return _after(path(NormalEquations.of(prompts), _one(penalty)), 1)


def gradient_descent(prompts: Prompts, n_steps: int, step_size: float) -> Tensor:
    """GD_k from zero on (1/2N) Σ (y - w·f)², [b]."""
    return gradient_descent_pp(prompts, n_steps, step_size, gamma=0.0)


def gradient_descent_pp(prompts: Prompts, n_steps: int, step_size: float, gamma: float) -> Tensor:
    """GD++_k of von Oswald et al.; gamma = 0 is `gradient_descent`, [b]."""
    steps = _one(step_size).expand(n_steps, -1)
    return _after(descent_path(NormalEquations.of(prompts), steps, _one(gamma)), n_steps)


def preconditioned(prompts: Prompts, n_steps: int, preconditioner: Tensor) -> Tensor:
    """GD_k with the preconditioner P [f, f] at every step, [b]."""
    matrix = torch.as_tensor(preconditioner, dtype=prompts.inputs.dtype)
    steps = matrix.expand(n_steps, 1, -1, -1)
    return _after(preconditioned_path(NormalEquations.of(prompts), steps), n_steps)


def newton(prompts: Prompts, n_steps: int) -> Tensor:
    """Newton iteration for the inverse, k steps, [b]."""
    return _after(newton_path(NormalEquations.of(prompts)), n_steps)


def with_query_row(prompts: Prompts) -> Prompts:
    """The same prompts with the sample (u, 0) added: what attention to the query row sees."""
    x = torch.cat([prompts.x, prompts.query[:, None]], dim=1)
    y = torch.cat([prompts.y, torch.zeros_like(prompts.y[:, :1])], dim=1)
    return prompts_from_arrays(x, y, prompts.query)


@dataclass(frozen=True)
class NormalEquations:
    """Normal equations of a batch, as the paths read them.

    Attributes:
        gram: G, [f, f, b].
        moment: c, [f, b].
        query: f_u, [f, b].
        eigenvalues: of G, ascending, [f, b].
        products: (f_u)_i c_i in the eigenbasis of G, [f, b].
        centred_eigenvalues: of the covariance of x, [p, b].
        centred_products: (u - x̄)_i C_i in its eigenbasis, [p, b].
        y_mean: ȳ, [b].
        least_squares: [b].
    """

    gram: Tensor
    moment: Tensor
    query: Tensor
    eigenvalues: Tensor
    products: Tensor
    centred_eigenvalues: Tensor
    centred_products: Tensor
    y_mean: Tensor
    least_squares: Tensor

    @classmethod
    def of(cls, prompts: Prompts) -> NormalEquations:
        """Solve the eigenproblems of a batch of prompts once."""
        ones = torch.ones_like(prompts.inputs[:, :, :1])
        features = torch.cat([ones, prompts.inputs[:, :, 1:-1]], dim=2)
        context, query = features[:, :-1], features[:, -1]
        gram = context.mT @ context / prompts.n_context
        moment = (context.mT @ prompts.y[..., None])[..., 0] / prompts.n_context
        eigenvalues, products = _spectrum(gram, moment, query)
        x_mean = prompts.x_mean.reshape(len(prompts), -1)
        xy_cov = prompts.xy_cov.reshape(len(prompts), -1)
        centred = _spectrum(prompts.x_cov, xy_cov, prompts.query - x_mean)
        return cls(
            gram=gram.permute(1, 2, 0).contiguous(),
            moment=moment.T.contiguous(),
            query=query.T.contiguous(),
            eigenvalues=eigenvalues,
            products=products,
            centred_eigenvalues=centred[0],
            centred_products=centred[1],
            y_mean=prompts.y_mean,
            least_squares=prompts.least_squares,
        )


def ridge_path(problem: NormalEquations, penalties: Tensor) -> Iterator[Tensor]:
    """Ridge with penalties [K]; a path of one element, [K, b]."""
    filters = 1 / (problem.eigenvalues + penalties[:, None, None])
    yield (filters * problem.products).sum(1)


def free_intercept_ridge_path(problem: NormalEquations, penalties: Tensor) -> Iterator[Tensor]:
    """Ridge with unpenalised intercept and penalties [K]; a path of one element, [K, b]."""
    filters = 1 / (problem.centred_eigenvalues + penalties[:, None, None])
    yield problem.y_mean + (filters * problem.centred_products).sum(1)


def descent_path(problem: NormalEquations, steps: Tensor, gammas: Tensor) -> Iterator[Tensor]:
    """GD++ (GD where γ = 0), [K, b] after each step.

    With r_i the residual moment Fᵀe/N and h_i the query feature along eigenvector i, a step
    adds η h_i r_i to the prediction; then r <- (1-γg)(1-ηg) r, h <- (1-γg) h, g <- (1-γg)² g.

    Args:
        problem: the batch.
        steps: η of each step, [n_steps, K].
        gammas: γ, [K].
    """
    eigenvalues = problem.eigenvalues.expand(len(gammas), -1, -1)
    product = problem.products
    prediction = torch.zeros(())
    moving = bool(gammas.any())
    for step in steps[:, :, None, None]:
        update = step * product
        prediction = prediction + update.sum(1)
        yield prediction
        product = product - update * eigenvalues
        if moving:
            shrink = (1 - gammas[:, None, None] * eigenvalues).square()
            product = product * shrink
            eigenvalues = eigenvalues * shrink


def newton_path(problem: NormalEquations) -> Iterator[Tensor]:
    """Newton iteration, [1, b] after each step, without end."""
    g = problem.eigenvalues
    inverse = g / g.square().norm(dim=0)
    while True:
        inverse = inverse * (2 - g * inverse)
        yield (inverse * problem.products).sum(0, keepdim=True)


def preconditioned_path(problem: NormalEquations, steps: Tensor) -> Iterator[Tensor]:
    """GD with a preconditioner per step, [n_steps, K, f, f]: [K, b] after each step."""
    weights = problem.moment.new_zeros(steps.shape[1], *problem.moment.shape)
    for step in steps:
        gradient = (problem.gram * weights[:, None]).sum(2) - problem.moment
        weights = weights - step @ gradient
        yield (weights * problem.query).sum(1)


def _spectrum(gram: Tensor, moment: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and query times moment in the eigenbasis: [f, b] each."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    products = (query[:, None] @ vectors)[:, 0] * (moment[:, None] @ vectors)[:, 0]
    return eigenvalues.T.contiguous(), products.T.contiguous()


def _one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _after(path: Iterator[Tensor], n_steps: int) -> Tensor:
    """Prediction after `n_steps` steps of a path with one parameter set, [b]."""
    if n_steps < 1:
        raise ValueError(f"n_steps={n_steps} must be at least 1")
    return next(islice(path, n_steps - 1, None))[0]
