"""Sites: the places in a model that can be read and edited, and what may be asked of a model.

A site has a transformer-lens name and a *role*: what it is for in the forward pass. Instruments
ask for roles, never for names or classes, so that a model of another class, or a site of another
name, is studied by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from models.wording import near_matches

Role = Literal[
    "embedding",  # the stream before the first block
    "stream in",  # the stream before a block
    "stream out",  # the stream after a block
    "queries",
    "keys",
    "values",
    "state",  # KᵀV of a head, what all rows tell it
    "scores",
    "head output",
    "heads summed",  # what attention writes, before a norm
    "norm mean",
    "divisor",  # what the forward pass divides by
    "norm output",  # the quotient
    "added",  # what a block adds to the stream
    "prediction",
]

# A replacement for an activation, or a function from the activation to one.
Write = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """A place in the forward pass.

    Attributes:
        name: of the hook point, as in transformer-lens.
        axes: words for the axes of the activation, such as ("batch", "position", "d_model").
        role: what the site is for.
        label: short words for figures.
        meaning: what stands there, in words.
        layer: index of its block; None outside the blocks.
        on_request: computed only while a hook or a filter names it.
    """

    name: str
    axes: tuple[str, ...]
    role: Role
    label: str
    meaning: str
    layer: int | None
    on_request: bool = False

    @property
    def title(self) -> str:
        """The label with its layer: "layer 1: norm scale"."""
        return self.label if self.layer is None else f"layer {self.layer}: {self.label}"


@runtime_checkable
class Studied(Protocol):
    """All that instruments may ask of a model: a callable on inputs that has sites.

    Attributes:
        sites: by name, in forward order.
        axis_sizes: size of each axis word in this model ("batch" left out).
        dtype: of weights and activations.
    """

    sites: Mapping[str, Site]

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """Size of each axis word."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        ...

    def __call__(self, inputs: Tensor) -> Tensor:
        """Predictions [batch] for inputs [batch, position, column]."""
        ...

    def run(
        self,
        prompts: Any,
        reads: str | Collection[str] = (),
        writes: Mapping[str, Write] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Predictions for prompts, and copies of the activations at `reads`, under `writes`."""
        ...

    def hooks(
        self, fwd_hooks: Sequence[tuple[Any, Callable[..., Any]]] = ()
    ) -> AbstractContextManager[Any]:
        """Context in which hooks are attached."""
        ...

    def select_sites(self, names_filter: Any) -> list[str]:
        """Names of sites; ValueError on an unknown one."""
        ...

    def untrained(self, generator: torch.Generator) -> Self:
        """A model of the same class, shape and dtype with fresh weights."""
        ...

    def like(self, weights: Mapping[str, Tensor]) -> Self:
        """A model of the same class, shape and dtype with these weights."""
        ...


def sites_with(model: Studied, role: Role, layer: int | None = None) -> tuple[Site, ...]:
    """Sites of a role in forward order, of one layer or (None) of all."""
    return tuple(
        site
        for site in model.sites.values()
        if site.role == role and (layer is None or site.layer == layer)
    )


def site_with(model: Studied, role: Role, layer: int | None = None) -> Site:
    """The one site of a role, in one layer or (None) in the whole model.

    Raises:
        ValueError: if there is none, or more than one; names the role and the layer.
    """
    found = sites_with(model, role, layer)
    if len(found) == 1:
        return found[0]
    where = "the model" if layer is None else f"layer {layer}"
    if not found:
        roles = ", ".join(dict.fromkeys(site.role for site in model.sites.values()))
        raise ValueError(
            f"not applicable: {where} has no site of the role {role!r}; it has {roles}"
        )
    names = ", ".join(site.name for site in found)
    raise ValueError(f"{where} has {len(found)} sites of the role {role!r} ({names}); name one")


def layers_of(model: Studied) -> tuple[int, ...]:
    """Indices of the blocks, in forward order."""
    return tuple(dict.fromkeys(s.layer for s in model.sites.values() if s.layer is not None))


def require_site(name: str, known: Mapping[str, Site]) -> Site:
    """The site of a name; ValueError on an unknown one lists near matches."""
    if name not in known:
        raise ValueError(
            f"unknown site {name!r}{near_matches(name, known)}; probe.sites(model) lists all"
        )
    return known[name]
