"""Frozen description of a task: the distribution of in-context regression prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from models.frozen import Frozen

# A config is made and checked without torch, which costs seconds to import.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from models.tasks.linear_regression import Prompts
    from models.tasks.statistics import Statistic

XDistribution = Literal["normal", "uniform"]


class PromptConfig(Frozen):
    """Distribution of in-context regression prompts (paper eqs. 1-2).

    Each prompt draws its own line: ``y_n = theta_0 + theta · x_n + noise`` with
    every theta ~ N(0, 1). Covariates are ``x = mean + scale · z``.

    Attributes:
        kind: which task this is (`models.tasks.task.Task`).
        n_context: N, the number of (x, y) samples before the query; at least p + 2.
        n_covariates: p.
        noise_std: standard deviation of the noise on y.
        x_mean_std: the per-prompt mean of each covariate ~ N(0, x_mean_std²).
        x_log_scale: the per-prompt log scale of each covariate
            ~ U(-x_log_scale, x_log_scale).
        x_distribution: law of z, ``"normal"`` (standard) or ``"uniform"`` on `x_bounds`.
        x_bounds: (low, high) of the uniform law; unused for ``"normal"``.
        x_correlation: for p >= 2 and the normal law, each prompt draws
            rho ~ U(-x_correlation, x_correlation); covariates j and k then have
            correlation rho^|j-k|.
    """

    kind: Literal["linear_regression"] = "linear_regression"
    n_context: Annotated[int, Field(ge=3)] = 20
    n_covariates: Annotated[int, Field(ge=1)] = 1
    noise_std: Annotated[float, Field(ge=0)] = 0.1
    x_mean_std: Annotated[float, Field(ge=0)] = 0.0
    x_log_scale: Annotated[float, Field(ge=0, le=300)] = 0.0
    x_distribution: XDistribution = "normal"
    x_bounds: tuple[float, float] = (0.0, 1.0)
    x_correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> PromptConfig:
        if self.n_context < self.n_covariates + 2:
            raise ValueError(
                f"n_context={self.n_context} is too small: least squares with "
                f"{self.n_covariates} covariate(s) and an intercept needs at least "
                f"{self.n_covariates + 2} context samples; raise n_context"
            )
        low, high = self.x_bounds
        if not low < high:
            raise ValueError(f"x_bounds={self.x_bounds} must be (low, high) with low < high")
        if self.x_correlation and self.n_covariates < 2:
            raise ValueError(
                f"x_correlation={self.x_correlation} needs n_covariates >= 2, "
                f"got {self.n_covariates}; set it to 0"
            )
        if self.x_correlation and self.x_distribution != "normal":
            raise ValueError(
                f"x_correlation={self.x_correlation} is defined for x_distribution='normal', "
                f"got {self.x_distribution!r}; set it to 0"
            )
        return self

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sufficient statistics of its prompts: x̄, ȳ, V, C, slopes, prediction."""
        from models.tasks.statistics import regression_statistics

        return regression_statistics(self.n_covariates)

    def sample(
        self, batch: int, generator: torch.Generator, dtype: torch.dtype | None = None
    ) -> Prompts:
        """Draw prompts, in float64 by default (`models.sample_prompts`)."""
        import torch

        from models.tasks.linear_regression import sample_prompts

        return sample_prompts(self, batch, generator, dtype or torch.float64)

    def draw_rows(
        self, batch: int, generator: torch.Generator, dtype: torch.dtype, noisy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts as training reads them: x [p, N+1, b], y [N, b] and targets [b].

        Args:
            batch: b, number of prompts.
            generator: source of all randomness.
            dtype: of the result.
            noisy: the target is the y of the query, drawn like the others, instead of least
                squares.
        """
        from models.tasks.linear_regression import draw, eliminate

        x, y = draw(self, batch, generator, dtype, noisy)
        if noisy:
            return x, y[:-1], y[-1]
        return x, y, eliminate(x, y).prediction

    def shifts(self, base: Prompts, generator: torch.Generator) -> dict[str, Prompts]:
        """Prompts of `base` under each shift of the distribution, by name in words."""
        from models.tasks.shifts import regression_shifts

        return regression_shifts(base, generator)

    def loss(self, predictions: Tensor, prompts: Prompts) -> Tensor:
        """Squared error against least squares, [b]."""
        return (predictions - prompts.target).square()
