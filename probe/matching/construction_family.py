r"""The construction is a family; which member is nearest to a learned model?

`models.closed_form` fixes what the algorithm leaves open:

- R_j, R_y: units and signs of each signal, W_E[x_j] = 1/R_j, W_E[y] = 1/R_y, W_U[y] = -R_y.
  Division makes every layer independent of the units, so nothing else changes.
- kappa, sigma: const starts at kappa and spare at -sigma (sigma = kappa, or 0: unused at first).
- the reading: with u_k = kappa + k√(D/2) on const and -v_k = -(sigma + k√(D/2)) on spare before
  layer k, any α·const - (1 - α)·spare can stand for the constant, scaled by
  r_k / (α u_k + (1 - α) v_k) to the value r_k = 1 + k√(D/2) that the weights expect.
  α = 1/2 reads the half difference (exact as R grows), 1 const, 0 spare.

Units and kappa are taken from the learned embedding. They give the member's rows of W, without
their part along 1, the norms of the learned rows: either as they are, which suits a model
trained with a penalty on its weights, or after the re-encodings of that part are removed
(`gauge.canonical_tokens`), which no symmetry changes. Both are tried.
Signs, sigma and α are tried, and the member with the smallest gauge distance is taken.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.transformer import LinearAttentionTransformer
from models.constructed.basis import coordinate_names
from models.constructed.elimination import closed_form
from probe.matching import gauge
from probe.matching.gauge import canonical_tokens, invariants
from probe.symmetry.weights import (
    Weights,
    attention,
    centring,
    input_map,
    weights_hash,
    weights_of,
)

_READINGS = (0.5, 1.0, 0.0)
# A construction reads its constant; a model that embeds none still gets one this large.
_LEAST_CONSTANT = 0.05


def has_construction_steps(config: ModelConfig) -> bool:
    """Whether the construction has as many layers, normalised on the write, at any width.

    What is computed can then be compared layer by layer.
    """
    return config.norms_writes and config.n_layers == config.n_covariates + 1


def has_construction(config: ModelConfig) -> bool:
    """Whether there is a construction with weights of this shape: of this width, too."""
    width = config.d_model == config.n_covariates + 3
    return has_construction_steps(config) and width and not config.norm_affine


@dataclass(frozen=True)
class Member:
    """One construction of the family.

    Attributes:
        weights: its weights.
        units: R with sign per signal, (R_1 .. R_p, R_y).
        const: kappa.
        spare: sigma.
        reading: α.
    """

    weights: Weights
    units: tuple[float, ...]
    const: float
    spare: float
    reading: float

    def __str__(self) -> str:
        """The member in words."""
        names = (*(f"x_{j + 1}" for j in range(len(self.units) - 1)), "y")
        units = ", ".join(
            f"{name}/{unit:.3g}" for name, unit in zip(names, self.units, strict=True)
        )
        reads = {0.5: "(const − spare)/2", 1.0: "const", 0.0: "spare"}[self.reading]
        return f"{units}, const = {self.const:.3g}, spare = {-self.spare:.3g}, reads {reads}"


@dataclass(frozen=True)
class ConstructionFamily:
    """All closed-form constructions for models of one shape.

    Attributes:
        base: the member with R = 1 in every unit.
    """

    base: LinearAttentionTransformer
    _found: dict[str, Member] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def for_model(cls, config: ModelConfig) -> ConstructionFamily:
        """The family beside models of a shape.

        Raises:
            ValueError: if the construction has another width, number of layers or norm.
        """
        p = config.n_covariates
        if not has_construction(config):
            raise ValueError(
                f"d_model={config.d_model}, n_layers={config.n_layers}, "
                f"normalization={config.normalization!r}, norm_affine={config.norm_affine}: the "
                f"construction for {p} covariate(s) has d_model={p + 3}, n_layers={p + 1} and "
                f"branch normalization without affine map; with n_layers={p + 1}, align to "
                f"models.closed_form at level 'signed_permutation' (another width) or "
                f"'functional' (any model)"
            )
        n_context = max(config.n_context, p + 2)
        # Signals of order 1, so that layer-norm inputs keep their distance from norm_eps.
        return cls(closed_form(n_context, p, scale=1.0, exclude_query=config.exclude_query))

    @property
    def names(self) -> tuple[str, ...]:
        """Coordinate names."""
        return coordinate_names(self.base.cfg.n_covariates)

    def member(
        self, units: tuple[float, ...], const: float, spare: float, reading: float
    ) -> Member:
        """The construction with given free choices."""
        config = self.base.cfg
        p, d = config.n_covariates, config.d_model
        weights = weights_of(self.base)
        const_at, spare_at = p + 1, p + 2
        for row, unit in enumerate(units):
            weights["embed.W_E"][1 + row, row] = 1 / unit
        weights["embed.b_E"][const_at], weights["embed.b_E"][spare_at] = const, -spare
        weights["unembed.W_U"][-1, p] = -units[-1]
        gain = math.sqrt(d / 2)
        for layer in range(config.n_layers):
            step = layer * gain
            held = reading * (const + step) + (1 - reading) * (spare + step)
            factor = (1 + step) / held
            for name in ("W_Q", "W_K", "W_V"):
                value = weights[attention(layer, name)]
                # The base reads (const - spare) / 2: opposite rows.
                clean = value[:, const_at] - value[:, spare_at]
                value[:, const_at] = reading * factor * clean
                value[:, spare_at] = -(1 - reading) * factor * clean
        return Member(weights, units, const, spare, reading)

    def members_like(self, learned: Weights) -> list[Member]:
        """Members with the units of a learned model, all signs and readings."""
        d = self.base.cfg.d_model
        tokens = input_map(learned)
        plain = (tokens @ centring(d)).norm(dim=1).clamp(min=1e-3)
        reduced = canonical_tokens(tokens).norm(dim=1).clamp(min=1e-3)
        single = math.sqrt(1 - 1 / d)
        found = []
        for used in (True, False):
            as_they_are = [single / float(norm) for norm in plain[1:]]
            as_they_are.append(float(plain[0]) / (math.sqrt(2) if used else single))
            for *sizes, constant in (as_they_are, self._fit_units(reduced, used)):
                # All signs at once are one symmetry, so the first may stay positive.
                signs = itertools.product((1.0, -1.0), repeat=self.base.cfg.n_covariates)
                constant = max(constant, _LEAST_CONSTANT)
                for sign, reading, flip in itertools.product(signs, _READINGS, (1.0, -1.0)):
                    units = tuple(s * size for s, size in zip((1.0, *sign), sizes, strict=True))
                    found.append((units, flip * constant, flip * constant * used, reading))
        return [self.member(*choice) for choice in found if self._readable(*choice[1:])]

    def _fit_units(self, wanted: Tensor, used: bool) -> list[float]:
        """R_1 .. R_p, R_y and kappa whose rows have the wanted norms (constant's row first)."""
        p, d = self.base.cfg.n_covariates, self.base.cfg.d_model

        def rows(logs: np.ndarray) -> Tensor:
            tokens = torch.zeros(p + 2, d, dtype=torch.float64)
            tokens[0, p + 1], tokens[0, p + 2] = math.exp(logs[-1]), -math.exp(logs[-1]) * used
            for j in range(p + 1):
                tokens[1 + j, j] = math.exp(-logs[j])
            return canonical_tokens(tokens).norm(dim=1)

        start = np.log([*(1 / wanted[1:]).tolist(), float(wanted[0])])
        found = least_squares(
            lambda logs: (rows(logs) / wanted - 1).numpy(), start, bounds=(-10, 10), max_nfev=30
        )
        return np.exp(found.x).tolist()

    def nearest(self, learned: Weights, config: ModelConfig) -> Member:
        """The member nearest to learned weights of a branch model without affine map.

        Null models come back at every level: each is looked up once.
        """
        key = weights_hash(learned, config)
        if key not in self._found:
            self._found[key] = self._nearest(learned, config)
        return self._found[key]

    def _nearest(self, learned: Weights, config: ModelConfig) -> Member:
        members = self.members_like(learned)
        reduced = [invariants(one.weights, self.base.cfg, True) for one in members]
        target = invariants(learned, config, True)
        return members[gauge.nearest(reduced, target, free_last=True)]

    def model_of(self, member: Member) -> LinearAttentionTransformer:
        """A member as a model."""
        return self.base.like(member.weights)

    def _readable(self, const: float, spare: float, reading: float) -> bool:
        """Whether the read constant keeps away from zero in every layer."""
        steps = [k * math.sqrt(self.base.cfg.d_model / 2) for k in range(self.base.cfg.n_layers)]
        return all(
            abs(reading * (const + step) + (1 - reading) * (spare + step)) > 0.01 for step in steps
        )
