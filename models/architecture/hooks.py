"""A thin, stricter layer over transformer-lens hooks.

The only module of the project that imports transformer-lens (it costs seconds).
What it changes, each for a trap that silently gives a wrong answer:

- cached tensors are copies, not views that later in-place edits change;
- an unknown site name, or a filter that matches nothing, raises and lists near matches;
- a hook that returns another shape, dtype or device raises instead of broadcasting;
- `run_with_cache` takes a str, list, tuple, set or callable, and can run with hooks;
- gradients can be cached without touching the parameters' ``.grad``;
- temporary hooks act on the calls of the thread that attached them, and on no other's;
- the cache refuses decompositions that assume head outputs add into the residual stream.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint, LensHandle

from models.architecture.sites import Role, Site, Write, require_site
from models.wording import near_matches

SiteFilter = str | Collection[str] | Callable[[str], bool] | None
Direction = Literal["fwd", "bwd"]
Hook = tuple[str | Callable[[str], bool], Callable[..., Tensor | None]]


class StrictHookPoint(HookPoint):
    """An identity module whose hooks may not change shape, dtype or device.

    Args:
        axes: words for the axes of the activation, such as "batch position d_model".
        role: what the site is for.
        label: short words for figures.
        meaning: what stands there; the label by default.
        on_request: computed only while a hook or a filter names it.
    """

    def __init__(
        self, axes: str, role: Role, label: str, meaning: str = "", on_request: bool = False
    ):
        super().__init__()
        self._axes, self._label = tuple(axes.split()), label
        self._role: Role = role
        self._meaning, self._on_request = meaning or label, on_request

    def site(self, name: str, layer: int | None) -> Site:
        """The site that this point is in a model where it has a name."""
        return Site(
            name, self._axes, self._role, self._label, self._meaning, layer, self._on_request
        )

    def add_hook(
        self,
        hook: Callable[..., Tensor | None],
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> LensHandle:
        """Attach ``hook(tensor, hook=point)``; see transformer-lens for the arguments."""
        return self._attach(hook, dir, is_permanent, level, prepend, alias_names, thread=None)

    def add_temporary_hook(self, hook: Callable[..., Any], dir: Direction) -> LensHandle:
        """Attach a hook that acts on calls of this thread only."""
        return self._attach(hook, dir, thread=threading.get_ident())

    def _attach(
        self,
        hook: Callable[..., Tensor | None],
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
        thread: int | None = None,
    ) -> LensHandle:
        def checked(tensor: Tensor, hook: HookPoint) -> Tensor | None:
            # Gradients of a GPU come from a thread of autograd's own.
            elsewhere = thread is not None and thread != threading.get_ident()
            if elsewhere and (dir == "fwd" or tensor.device.type == "cpu"):
                return None
            result = user_hook(tensor, hook=hook)
            if result is not None:
                # A backward hook may hand back the gradient as a tuple of one.
                single = isinstance(result, tuple) and len(result) == 1
                _require_same_kind(hook.name, tensor, result[0] if single else result)
            return result

        user_hook = hook
        handle = super().add_hook(checked, dir, is_permanent, level, prepend, alias_names)
        handle.user_hook = user_hook
        return handle

    def remove(self, handle: LensHandle) -> None:
        """Take off the hook of a handle, and no other."""
        handle.hook.remove()
        for handles in (self.fwd_hooks, self.bwd_hooks):
            # `list.remove` would compare handles by value.
            handles[:] = [each for each in handles if each is not handle]


class SiteCache(ActivationCache):
    """Activations by site name; transformer-lens shorthand such as ``("scale", 1, "ln1_post")``
    works too. Behaves as an `ActivationCache`.
    """

    def __getitem__(self, key: str | tuple) -> Tensor:
        """Activation at a site; raises KeyError naming what is cached."""
        try:
            return super().__getitem__(key)
        except KeyError as error:
            near = near_matches(str(error.args[0]), self.cache_dict)
            raise KeyError(f"{key!r} is not in the cache{near}") from None

    def __contains__(self, key: object) -> bool:
        """Whether a full site name is cached."""
        return key in self.cache_dict

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "this decomposition assumes that head outputs add into the residual stream; here a "
            "layer norm may stand between them. Use attn.hook_result (per head, before the norm), "
            "ln1_post.hook_scale and hook_attn_out (what is added) instead"
        )

    stack_head_results: Any = _refuse
    compute_head_results: Any = _refuse
    accumulated_resid: Any = _refuse
    decompose_resid: Any = _refuse
    get_full_resid_decomposition: Any = _refuse
    logit_lens: Any = _refuse
    logit_attrs: Any = _refuse
    apply_ln_to_stack: Any = _refuse
    stack_neuron_results: Any = _refuse
    get_neuron_results: Any = _refuse


class HookedModule(HookedRootModule):
    """A `HookedRootModule` with strict names, copied caches and hooks that keep to their thread.

    Any number of threads may share a model: hooks attached by `hooks`, `run_with_hooks`,
    `run_with_cache` and `run` act on the calls of their own thread only. Hooks of `add_hook` stay
    until `reset_hooks` and act on every call, as in transformer-lens.

    Attributes:
        sites: every site by name, in forward order.
    """

    sites: Mapping[str, Site]

    def setup(self) -> None:
        """Name the hook points; call it when all modules have been made."""
        super().setup()
        points = {name: p for name, p in self.hook_dict.items() if isinstance(p, StrictHookPoint)}
        self._points = points
        self.sites = {name: point.site(name, _layer_of(name)) for name, point in points.items()}

    def run(
        self,
        prompts: Any,
        reads: str | Collection[str] = (),
        writes: Mapping[str, Write] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Predictions, and copies of activations, with some activations replaced.

        Args:
            prompts: `Prompts`, or their inputs.
            reads: names of sites; what they hold after every write.
            writes: by site, the activation to put in its place, or a function from the
                activation to one; shape, dtype and device stay.

        Returns:
            Predictions [batch]; activations by site, in forward order.

        Raises:
            ValueError: on an unknown site, or a write of another shape, dtype or device.
        """
        inputs = getattr(prompts, "inputs", prompts)
        hooks: list[Hook] = [(site, _writing(value)) for site, value in (writes or {}).items()]
        if not reads:
            with self.hooks(hooks):
                return self(inputs), {}
        return self.run_with_cache(
            inputs, names_filter=reads, fwd_hooks=hooks, return_cache_object=False
        )

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: SiteFilter = None,
        fwd_hooks: Sequence[Hook] = (),
        incl_bwd: bool = False,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        return_cache_object: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Run the model and return its output with copies of the named activations.

        Args:
            *model_args: arguments of the forward pass.
            names_filter: a site name, a collection of names, or a predicate on names.
                None means every site that is not computed on request only.
            fwd_hooks: (name or predicate, hook) pairs in force during the run;
                the cache holds the edited values.
            incl_bwd: also cache the gradient of the summed output at each site as
                ``<site>_grad``; parameters' ``.grad`` stay as they were.
            device: where to keep the copies; the model's device by default.
            remove_batch_dim: drop the batch axis of a single prompt.
            return_cache_object: return a `SiteCache`; False gives a plain dict.
            **model_kwargs: keyword arguments of the forward pass.

        Returns:
            Predictions [batch], and the `SiteCache` or dict.

        Raises:
            ValueError: on an unknown site or a filter that matches nothing.
        """
        names = self.select_sites(names_filter)
        live: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}

        def keep(tensor: Tensor, hook: HookPoint) -> None:
            name = str(hook.name)
            if incl_bwd:
                live[name] = tensor
            copies[name] = tensor.detach().clone().to(device)

        # The caching hooks go last so that they see what every other hook has done.
        with self.hooks(fwd_hooks=[*fwd_hooks, *((name, keep) for name in names)]):
            output = self(*model_args, **model_kwargs)
        if incl_bwd:
            if not output.requires_grad:
                raise ValueError(
                    "incl_bwd=True needs gradients: no parameter requires grad, or the call "
                    "stands under torch.no_grad()"
                )
            # A site that the output does not depend on has no gradient: zero.
            grads = torch.autograd.grad(
                output.sum(),
                list(live.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, grad in zip(live, grads, strict=True):
                copies[name + "_grad"] = grad.clone().to(device)
        cache = SiteCache(copies, self)
        if remove_batch_dim:
            cache.remove_batch_dim(output.shape[0])
        return output, cache if return_cache_object else cache.cache_dict

    def select_sites(self, names_filter: SiteFilter) -> list[str]:
        """Resolve a filter to site names in forward order.

        Raises:
            ValueError: on an unknown site or a filter that matches nothing.
        """
        if names_filter is None:
            return [name for name, site in self.sites.items() if not site.on_request]
        if callable(names_filter):
            chosen = [name for name in self.hook_dict if names_filter(name)]
            if not chosen:
                raise ValueError(
                    f"the filter matches none of the {len(self.hook_dict)} sites; "
                    f"they are: {', '.join(self.hook_dict)}"
                )
            return chosen
        wanted = {names_filter} if isinstance(names_filter, str) else set(names_filter)
        if not wanted:
            raise ValueError("the list of sites is empty; name at least one, or None for all")
        for name in wanted:
            require_site(name, self.sites)
        return [name for name in self.hook_dict if name in wanted]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ):
        """Context in which hooks are attached to the calls of this thread.

        Only these are removed at its end, whatever other threads do meanwhile.

        Args:
            fwd_hooks: (name or predicate, hook) pairs.
            bwd_hooks: the same for gradients.
            reset_hooks_end: False leaves the hooks in place, for a backward pass that follows.
            clear_contexts: also empty the ``ctx`` of every hook point.

        Raises:
            ValueError: on an unknown site, before any hook is attached.
        """
        directions: list[tuple[Direction, Sequence[Hook]]]
        directions = [("fwd", fwd_hooks), ("bwd", bwd_hooks)]
        resolved: list[tuple[str, Callable[..., Any], Direction]] = [
            (name, hook, direction)
            for direction, hooks in directions
            for where, hook in hooks
            for name in self.select_sites(where)
        ]
        attached: list[tuple[StrictHookPoint, LensHandle]] = []
        try:
            for name, hook, direction in resolved:
                point = self._points[name]
                attached.append((point, point.add_temporary_hook(hook, direction)))
            yield self
        finally:
            if reset_hooks_end:
                for point, handle in attached:
                    point.remove(handle)
                if clear_contexts:
                    self.clear_contexts()

    def get_caching_hooks(
        self,
        names_filter: SiteFilter = None,
        incl_bwd: bool = False,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[Hook], list[Hook]]:
        """Hooks that keep copies of activations, to be attached with `hooks`.

        Args:
            names_filter: as in `run_with_cache`; sites computed on request are left out by default.
            incl_bwd: also keep gradients of the backward pass that follows, as ``<site>_grad``.
            device: where to keep the copies; the model's device by default.
            remove_batch_dim: drop the batch axis of a single prompt.
            cache: dict to fill; a new one by default.
            pos_slice: transformer-lens's; not supported, slice the copies instead.

        Returns:
            The dict, filled by each call; hooks forward; hooks backward.

        Raises:
            ValueError: on an unknown site or a filter that matches nothing.
        """
        if pos_slice is not None:
            raise ValueError(f"pos_slice={pos_slice} is not supported; slice what is cached")
        kept: dict[str, Tensor] = {} if cache is None else cache

        def keep(suffix: str) -> Callable[..., None]:
            def hook(tensor: Tensor, hook: HookPoint) -> None:
                copy = tensor.detach().clone().to(device)
                single = remove_batch_dim and copy.shape[0] == 1
                kept[f"{hook.name}{suffix}"] = copy[0] if single else copy

            return hook

        names = self.select_sites(names_filter)
        forward: list[Hook] = [(name, keep("")) for name in names]
        return kept, forward, [(name, keep("_grad")) for name in names if incl_bwd]

    def add_caching_hooks(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Attach `get_caching_hooks` (same arguments) until `reset_hooks`; returns the dict."""
        cache, forward, backward = self.get_caching_hooks(*args, **kwargs)
        for direction, hooks in (("fwd", forward), ("bwd", backward)):
            for name, hook in hooks:
                self.add_hook(name, hook, direction)
        self.is_caching = True
        return cache

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **kwargs: Any
    ) -> None:
        """Attach a hook that stays until `reset_hooks`; raises ValueError on an unknown site."""
        for site in self.select_sites(name):
            super().add_hook(site, hook, *args, **kwargs)


def _layer_of(name: str) -> int | None:
    """Index of the block that a hook point stands in."""
    match = re.match(r"blocks\.(\d+)\.", name)
    return int(match[1]) if match else None


def _writing(value: Write) -> Callable[..., Tensor]:
    return lambda tensor, hook: value if isinstance(value, Tensor) else value(tensor)


def _require_same_kind(site: str | None, before: Tensor, after: Any) -> None:
    if not isinstance(after, Tensor):
        raise TypeError(
            f"the hook at {site!r} returned {type(after).__name__}; return a tensor of shape "
            f"{tuple(before.shape)}, or None to leave the activation alone"
        )
    for what, old, new in (
        ("shape", tuple(before.shape), tuple(after.shape)),
        ("dtype", before.dtype, after.dtype),
        ("device", before.device, after.device),
    ):
        if old != new:
            raise ValueError(
                f"the hook at {site!r} returned {what} {new}, expected {old}; "
                f"a hook keeps shape, dtype and device"
            )
