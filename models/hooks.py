"""A thin, stricter layer over transformer-lens hooks.

The only module of the project that imports transformer-lens (it costs seconds).
What it changes, each for a trap that silently gives a wrong answer:

- cached tensors are copies, not views that later in-place edits change;
- an unknown site name, or a filter that matches nothing, raises and lists near matches;
- a hook that returns another shape, dtype or device raises instead of broadcasting;
- `run_with_cache` takes a str, list, tuple, set or callable, and can run with hooks;
- gradients can be cached without touching the parameters' ``.grad``;
- the cache refuses decompositions that assume head outputs add into the residual stream.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint, LensHandle

SiteFilter = str | Collection[str] | Callable[[str], bool] | None
Hook = tuple[str | Callable[[str], bool], Callable[..., Tensor | None]]


class StrictHookPoint(HookPoint):
    """An identity module whose hooks may not change shape, dtype or device."""

    def add_hook(
        self,
        hook: Callable[..., Tensor | None],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> LensHandle:
        """Attach ``hook(tensor, hook=point)``; see transformer-lens for the arguments."""

        def checked(tensor: Tensor, hook: HookPoint) -> Tensor | None:
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

    stack_head_results = compute_head_results = _refuse
    accumulated_resid = decompose_resid = get_full_resid_decomposition = _refuse
    logit_lens = logit_attrs = apply_ln_to_stack = _refuse
    stack_neuron_results = get_neuron_results = _refuse


class HookedModule(HookedRootModule):
    """A `HookedRootModule` with strict names and copied caches.

    Attributes:
        on_request: sites computed only when a hook or filter names them.
    """

    on_request: frozenset[str] = frozenset()

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
    ) -> tuple[Tensor, SiteCache | dict[str, Tensor]]:
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

        Raises:
            ValueError: on an unknown site or a filter that matches nothing.
        """
        names = self.select_sites(names_filter)
        live: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}

        def keep(tensor: Tensor, hook: HookPoint) -> None:
            if incl_bwd:
                live[hook.name] = tensor
            copies[hook.name] = tensor.detach().clone().to(device)

        # The caching hooks go last so that they see what every other hook has done.
        with self.hooks(fwd_hooks=[*fwd_hooks, *((name, keep) for name in names)]):
            output = self(*model_args, **model_kwargs)
        if incl_bwd:
            if not output.requires_grad:
                raise ValueError(
                    "incl_bwd=True needs gradients: no parameter requires grad, or the call "
                    "stands under torch.no_grad()"
                )
            grads = torch.autograd.grad(
                output.sum(), list(live.values()), retain_graph=True, allow_unused=True
            )
            for name, grad in zip(live, grads, strict=True):
                zero = grad is None
                grad = torch.zeros_like(live[name]) if zero else grad.clone()
                copies[name + "_grad"] = grad.to(device)
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
            return [name for name in self.hook_dict if name not in self.on_request]
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
            self._require_site(name)
        return [name for name in self.hook_dict if name in wanted]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ):
        """Context in which hooks are attached; only these are removed at its end.

        Raises:
            ValueError: on an unknown site, before any hook is attached.
        """
        resolved = [
            [(name, hook) for where, hook in hooks for name in self.select_sites(where)]
            for hooks in (fwd_hooks, bwd_hooks)
        ]
        with super().hooks(*resolved, reset_hooks_end, clear_contexts) as model:
            yield model

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **kwargs: Any
    ) -> None:
        """Attach a hook that stays until `reset_hooks`; raises ValueError on an unknown site."""
        for site in self.select_sites(name):
            super().add_hook(site, hook, *args, **kwargs)

    def _require_site(self, name: str) -> None:
        if name not in self.hook_dict:
            raise ValueError(
                f"unknown site {name!r}{near_matches(name, self.hook_dict)}; "
                f"probe.sites(model) lists all"
            )


def near_matches(name: str, known: Collection[str]) -> str:
    """Text that lists the known names nearest to `name`, empty if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; near matches: {', '.join(near)}" if near else ""


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
