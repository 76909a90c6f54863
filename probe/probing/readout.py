r"""What every coordinate of the residual stream holds, in named quantities.

Each coordinate of the stream after a block, and of each layer-norm output, is regressed on the
quantities the algorithm would keep there (`probe.quantities.dictionary`), over tokens and prompts:

    coordinate_c(token) = Σ_q coefficient_qc · quantity_q(token) + rest.

R² is taken on fresh prompts. Intervals are bootstrapped over blocks of prompts: tokens
of one prompt are not independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import pandas as pd
import torch
from torch import Tensor

from models.architecture.sites import Site, Studied, layers_of, site_with, sites_with
from models.tasks.config import PromptConfig
from models.tasks.linear_regression import Prompts, sample_prompts
from probe.activations.collect import collect
from probe.activations.table import with_titles
from probe.probing.varimax import canonical_rotation
from probe.quantities.dictionary import Quantities, added_quantities, stream_quantities
from probe.stats.bootstrap import percentiles, resample_counts
from probe.symmetry.weights import require_plain_forward

Basis = Literal["model", "canonical"]
_BLOCKS = 48
_HELD_OUT = 16
# Coefficients below this share of a coordinate's largest contribution are left out of words.
_WORTH_SAYING = 0.05


def read_out(
    model: Studied,
    prompt_config: PromptConfig,
    *,
    basis: Basis = "model",
    n_prompts: int = 1024,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Express every coordinate after each block and at each layer norm in named quantities.

    With several covariates the order of elimination is the one whose quantities explain
    most; it stands in ``.attrs["order"]``.

    Args:
        model: the model.
        prompt_config: prompts to read on.
        basis: the model's own, or the canonical one (`probe.probing.varimax`): the rotation that
            fixes 1, a symmetry of the model, in which the read-out is sparsest. The
            rotation stands in ``.attrs["rotation"]``.
        n_prompts: prompts to fit on; a third as many again to score on.
        generator: source of prompts, starts and resamples; seeded with 0 by default.

    Returns:
        DataFrame, one row per site and coordinate: site, coordinate, r2, one column per
        quantity with its coefficient (NaN where it is not in the site's dictionary),
        ``<quantity>_low`` and ``_high``, words; ``.attrs["titles"]`` has words for the sites.

    Raises:
        ValueError: on a basis the model does not have, too few prompts, or prompts that do not
            fit the model.
    """
    if basis not in get_args(Basis):
        raise ValueError(f"basis={basis!r} is none of {', '.join(get_args(Basis))}")
    if basis == "canonical":
        _require_canonical(model)
    if n_prompts < _BLOCKS:
        raise ValueError(f"n_prompts={n_prompts} is too few; give at least {_BLOCKS}")
    generator = generator or torch.Generator().manual_seed(0)
    size = n_prompts // _BLOCKS
    batches = [sample_prompts(prompt_config, size, generator) for _ in range(_BLOCKS + _HELD_OUT)]
    activations = [_activations(model, batch) for batch in batches]
    orders = itertools.permutations(range(prompt_config.n_covariates))
    fits = {order: CoordinateFits(model, batches, activations, order) for order in orders}
    order = max(fits, key=lambda one: fits[one].explained())
    fit = fits[order]
    rotation = torch.eye(model.axis_sizes["d_model"], dtype=torch.float64)
    if basis == "canonical":
        # Starts of their own: the resamples are the same in either basis.
        starts = torch.Generator().manual_seed(generator.initial_seed())
        rotation = canonical_rotation(fit.loadings(), starts)
    table = with_titles(fit.table(rotation, generator), model)
    table.attrs |= {"order": [j + 1 for j in order], "rotation": rotation.tolist()}
    return table


def describe(coordinate: int, coefficients: dict[str, float], sizes: dict[str, float]) -> str:
    """A coordinate in words: "coordinate 3 = −0.31·(x−x̄)".

    A variable and its mean with opposite coefficients (to a tenth) are written as one term.

    Args:
        coordinate: its index.
        coefficients: by quantity.
        sizes: standard deviation of each quantity (1 for the constant); what contributes
            next to nothing is left out.
    """
    contributions = {name: abs(value) * sizes[name] for name, value in coefficients.items()}
    largest = max(contributions.values())
    said = {
        name: value
        for name, value in coefficients.items()
        if contributions[name] > _WORTH_SAYING * largest
    }
    for name in tuple(said):
        mean = f"ȳ{name[1:]}" if name.startswith("y") else f"x̄{name[1:]}"
        if mean != name and mean in said and name in said:
            value = said[name]
            if abs(value + said[mean]) <= 0.1 * abs(value):
                said = {
                    f"({n}−{mean})" if n == name else n: v for n, v in said.items() if n != mean
                }
    terms = ""
    for name, value in said.items():
        sign = ("− " if value < 0 else "+ ") if terms else ("−" if value < 0 else "")
        number = f"{abs(value):.2f}" if abs(value) >= 0.1 else f"{abs(value):.2g}"
        terms += f" {sign}{number}" if terms else f"{sign}{number}"
        bare = "−" in name and not name.startswith("(")
        terms += "" if name == "1" else f"·({name})" if bare else f"·{name}"
    return f"coordinate {coordinate} = {terms or '0'}"


class CoordinateFits:
    """Regressions of all sites on their quantities, from moments per block of prompts."""

    def __init__(
        self,
        model: Studied,
        batches: Sequence[Prompts],
        activations: Sequence[dict[str, Tensor]],
        order: tuple[int, ...],
    ):
        self.sites = list(activations[0])
        self.names: dict[str, tuple[str, ...]] = {}
        # Per site: moments of [quantities | coordinates], [block, q + d, q + d].
        self.moments: dict[str, Tensor] = {}
        for site in self.sites:
            blocks = []
            for batch, acts in zip(batches, activations, strict=True):
                quantities = _dictionary(model.sites[site], batch, order)
                self.names[site] = quantities.names
                joint = torch.cat([quantities.values, acts[site]], -1).flatten(0, 1)
                blocks.append(joint.T @ joint / len(joint))
            self.moments[site] = torch.stack(blocks)

    def coefficients(self, site: str, counts: Tensor | None = None) -> Tensor:
        """Least squares on the fitting blocks, [..., quantity, coordinate].

        Args:
            site: the site.
            counts: how often each fitting block is drawn, [resamples, block]; once by default.
        """
        blocks = self.moments[site][:_BLOCKS]
        total = blocks.mean(0) if counts is None else torch.einsum("rb,bij->rij", counts, blocks)
        q = len(self.names[site])
        scale = total.diagonal(dim1=-2, dim2=-1)[..., :q].sqrt().clamp(min=1e-300)
        gram = total[..., :q, :q] / scale[..., :, None] / scale[..., None, :]
        cross = total[..., :q, q:] / scale[..., :, None]
        return torch.linalg.pinv(gram, hermitian=True, rtol=1e-12) @ cross / scale[..., :, None]

    def explained(self) -> float:
        """Mean R² over sites, all coordinates of a site together."""
        identity = torch.eye(self.moments[self.sites[0]].shape[-1] - len(self.names[self.sites[0]]))
        shares = []
        for site in self.sites:
            residual, spread = self._held_out(site, identity.double())
            shares.append(1 - float(residual.sum() / spread.sum()))
        return sum(shares) / len(shares)

    def loadings(self) -> list[Tensor]:
        """Coefficient times standard deviation, per site [quantity, coordinate]."""
        return [self.coefficients(site) * self._sizes(site)[:, None] for site in self.sites]

    def table(self, rotation: Tensor, generator: torch.Generator) -> pd.DataFrame:
        """The read-out in the basis Q O."""
        rows = []
        for site in self.sites:
            names = self.names[site]
            values = self.coefficients(site) @ rotation
            counts = resample_counts(_BLOCKS, generator)
            low, high = percentiles(self.coefficients(site, counts) @ rotation)
            residual, spread = self._held_out(site, rotation)
            sizes = dict(zip(names, self._sizes(site).tolist(), strict=True))
            for c in range(rotation.shape[0]):
                held = dict(zip(names, values[:, c].tolist(), strict=True))
                r2 = 1 - float(residual[c] / spread[c]) if spread[c] > 0 else float("nan")
                row = {"site": site, "coordinate": c, "r2": r2, **held}
                for q, name in enumerate(names):
                    row[f"{name}_low"], row[f"{name}_high"] = float(low[q, c]), float(high[q, c])
                quality = f"R² {r2:.2f}" if spread[c] > 0 else "constant"
                row["words"] = f"{describe(c, held, sizes)}, {quality}"
                rows.append(row)
        table = pd.DataFrame(rows)
        named = list(dict.fromkeys(name for site in self.sites for name in self.names[site]))
        bounds = [f"{name}_{side}" for name in named for side in ("low", "high")]
        return table.loc[:, ["site", "coordinate", "r2", *named, *bounds, "words"]]

    def _held_out(self, site: str, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Squared rest and variance per coordinate on fresh prompts; 0 variance if constant."""
        q = len(self.names[site])
        values = self.coefficients(site) @ rotation
        total = self.moments[site][_BLOCKS:].mean(0)
        held, cross = total[q:, q:], total[:q, q:] @ rotation
        square = torch.einsum("ic,ij,jc->c", rotation, held, rotation)
        predicted = torch.einsum("ic,ij,jc->c", values, total[:q, :q], values)
        residual = square - 2 * (values * cross).sum(0) + predicted
        spread = square - cross[0].square()  # quantity 0 is the constant
        return residual, torch.where(spread > 1e-12 * square, spread, 0.0)

    def _sizes(self, site: str) -> Tensor:
        """Standard deviation of each quantity, 1 for the constant, [quantity]."""
        q = len(self.names[site])
        total = self.moments[site][:_BLOCKS].mean(0)
        variance = total.diagonal()[:q] - total[0, :q].square()
        variance[0] = 1
        return variance.clamp(min=0).sqrt()


def _require_canonical(model: Studied) -> None:
    """Refuse a model whose predictions change under rotations of the stream that fix 1."""
    require_plain_forward(model, "the canonical basis")
    config = getattr(model, "config", None)
    if config is None or not config.has_norm or config.norm_affine:
        raise ValueError(
            "the canonical basis is a rotation that fixes 1, a symmetry of layer norms without an "
            f"affine map; this model is not of that kind ({config!r}): read it in basis='model'"
        )


def _activations(model: Studied, prompts: Prompts) -> dict[str, Tensor]:
    names = []
    for layer in layers_of(model):
        names += [site_with(model, "stream out", layer).name, _written(model, layer).name]
    return {site: value.double() for site, value in collect(model, prompts, names).items()}


def _written(model: Studied, layer: int) -> Site:
    """What a block writes: the norm's quotient where that is added, else the sum over heads."""
    order = list(model.sites)
    added = order.index(site_with(model, "added", layer).name)
    quotients = sites_with(model, "norm output", layer)
    before = [site for site in quotients if order.index(site.name) < added]
    return before[-1] if before else site_with(model, "heads summed", layer)


def _dictionary(site: Site, prompts: Prompts, order: tuple[int, ...]) -> Quantities:
    layer = int(site.layer or 0)
    if site.role == "stream out":
        return stream_quantities(prompts, layer, order)
    return added_quantities(prompts, layer, order)
