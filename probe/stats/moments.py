"""Streaming second moments, and ridge in closed form from them.

Shapes: v views (positions probed side by side), b batch, f features, q targets.
Everything is float64. Nothing here grows with the number of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A spread below this many rounding steps of the mean is not a spread.
ROUNDING_STEPS = 64
# Ridge penalty in units of each feature's variance: far below what a probe can see, far above
# the rounding of a correlation matrix.
PENALTY = 1e-12
# Share of a feature's variance below which a direction of the correlation matrix is rounding.
RANK = 1e-10


@dataclass(frozen=True)
class LinearMap:
    """An affine probe ``t = target_mean + (x - feature_mean) weights``.

    Attributes:
        weights: [v, f, q].
        feature_mean: [v, f].
        feature_scale: standard deviation of each feature, [v, f]; 0 where it is constant.
        target_mean: [q].
        target_varies: which targets vary beyond rounding, [q].
        pattern: the probes' directions in activation space, [v, f, q]: the regression of the
            features on ``x weights`` (Haufe et al., NeuroImage 2014), so that moving x along
            `pattern` by a moves the probe's reading by a. 0 where a probe reads nothing.
        r2: R² on the samples it was fitted to, [v, q]; NaN for a target that does not vary.
        whiten: ``(x - feature_mean) whiten`` has unit variance and no correlation in as many
            columns as the features have rank, and is 0 in the others, [v, f, f].
        spread: the way back, ``whiten`` coordinates times ``spreadᵀ``, [v, f, f].
    """

    weights: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    target_mean: Tensor
    target_varies: Tensor
    pattern: Tensor
    r2: Tensor
    whiten: Tensor
    spread: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """[v, b, f] -> [v, b, q]."""
        centred = features.double() - self.feature_mean[:, None]
        return self.target_mean + centred @ self.weights


class Moments:
    """Means and centred second moments of features and targets, updated batch by batch.

    Values are shifted by the first batch's mean, and batches are merged by the
    pairwise update (Chan, Golub & LeVeque 1983): large offsets cost no digits.

    Attributes:
        count: samples seen, n.
        xx: Σ (x - x̄)(x - x̄)ᵀ, [v, f, f].
        xt: Σ (x - x̄)(t - t̄)ᵀ, [v, f, q].
        tt: Σ (t - t̄)², [q].
    """

    def __init__(self) -> None:
        self.count = 0
        self._epsilon = 0.0

    def update(self, features: Tensor, targets: Tensor) -> Moments:
        """Add a batch.

        Args:
            features: [v, b, f].
            targets: [b, q].
        """
        # Rounding of the activations is that of the model's dtype.
        self._epsilon = max(self._epsilon, torch.finfo(features.dtype).eps)
        x, t = features.double(), targets.double()
        if not self.count:
            self._x_shift, self._t_shift = x.mean(1), t.mean(0)
        x, t = x - self._x_shift[:, None], t - self._t_shift
        n, x_mean, t_mean = x.shape[1], x.mean(1), t.mean(0)
        xx = x.mT @ x - n * x_mean[:, :, None] * x_mean[:, None]
        xt = x.mT @ t - n * x_mean[:, :, None] * t_mean
        tt = t.square().sum(0) - n * t_mean.square()
        if not self.count:
            self._x_mean, self._t_mean, self.xx, self.xt, self.tt = x_mean, t_mean, xx, xt, tt
        else:
            total = self.count + n
            dx, dt = x_mean - self._x_mean, t_mean - self._t_mean
            between = self.count * n / total
            self.xx += xx + between * dx[:, :, None] * dx[:, None]
            self.xt += xt + between * dx[:, :, None] * dt
            self.tt += tt + between * dt.square()
            self._x_mean, self._t_mean = (
                self._x_mean + dx * n / total,
                self._t_mean + dt * n / total,
            )
        self.count += n
        return self

    @property
    def feature_mean(self) -> Tensor:
        """x̄, [v, f]."""
        return self._x_shift + self._x_mean

    @property
    def target_mean(self) -> Tensor:
        """t̄, [q]."""
        return self._t_shift + self._t_mean

    @property
    def feature_scale(self) -> Tensor:
        """Standard deviations, [v, f]; exactly 0 where only rounding varies."""
        return self._scale(self.xx.diagonal(dim1=1, dim2=2), self.feature_mean, self._epsilon)

    @property
    def target_varies(self) -> Tensor:
        """Which targets vary beyond rounding, [q]."""
        return self._scale(self.tt, self.target_mean, torch.finfo(torch.float64).eps) > 0

    def _scale(self, squares: Tensor, mean: Tensor, epsilon: float) -> Tensor:
        scale = (squares.clamp(min=0) / self.count).sqrt()
        return scale.where(scale > ROUNDING_STEPS * epsilon * mean.abs(), 0.0)

    def ridge(self, penalty: float = PENALTY) -> LinearMap:
        """Ridge regression of the targets on the features, with intercept.

        Minimises ``Σ |t - t̄ - (x - x̄) w|² + n·penalty·Σ_f (σ_f w_f)²``: features are
        brought to unit variance first, so that coordinates on any scale count alike
        (scikit-learn: StandardScaler, then Ridge with alpha = n·penalty).
        """
        scale = self.feature_scale
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        correlation = self.xx / self.count * inverse[:, :, None] * inverse[:, None]
        cross = self.xt / self.count * inverse[:, :, None]
        values, vectors = torch.linalg.eigh(correlation)
        shrunk = (vectors.mT @ cross) / (values.clamp(min=0) + penalty)[:, :, None]
        weights = inverse[:, :, None] * (vectors @ shrunk)
        # Covariance of features and reading, and the variance of the reading.
        covariance = self.xx @ weights
        read = (weights * covariance).sum(1)
        pattern = torch.where(read > 0, 1 / read, 0.0)[:, None] * covariance
        ranked = values > RANK
        root = values.where(ranked, 1.0).sqrt()[:, None] * ranked[:, None]
        spread = scale[:, :, None] * vectors * root
        whiten = inverse[:, :, None] * vectors * torch.where(root > 0, 1 / root, 0.0)
        residual = self.tt - 2 * (weights * self.xt).sum(1) + read
        return LinearMap(
            weights=weights,
            feature_mean=self.feature_mean,
            feature_scale=scale,
            target_mean=self.target_mean,
            target_varies=self.target_varies,
            pattern=pattern,
            r2=(1 - residual / self.tt).where(self.target_varies, torch.nan),
            whiten=whiten,
            spread=spread,
        )
