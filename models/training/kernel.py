"""Fused forward and backward pass of an ensemble on the CPU.

`FusedKernel` computes loss and gradients of many small transformers at once, each on
its own prompts, several times faster than automatic differentiation: prompts fill the
SIMD lanes, heads are merged into one D x D state per prompt, and nothing is allocated
per step but the result. The mathematics is that of `models.architecture.transformer`; the tests
hold the two against each other. Neither torch nor transformer-lens is imported here.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numba.core import config as numba_config

from models.architecture.config import ModelConfig
from models.training import kernel_loops as loops

_NORMALIZATION = {"branch": loops.BRANCH, "post": loops.POST, "none": loops.NONE}
_READOUT = {"flatten": 0, "query": 1}


@functools.cache
def _compiled():
    """The compiled entry point; numba adds one version per dtype, when first called.

    Machine code is kept in `__pycache__`, in `NUMBA_CACHE_DIR` or in the user's cache.
    """
    compile_ = functools.partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return compile_(cache=True)(loops.run_models)
    except RuntimeError as error:  # no folder can be written
        warnings.warn(
            f"the compiled kernel cannot be kept for later runs ({error}); "
            "set NUMBA_CACHE_DIR to a folder that can be written",
            stacklevel=3,
        )
        return compile_()(loops.run_models)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    # numba fills its config in while it is imported, where no type checker sees it.
    n_threads = numba_config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]
    return ThreadPoolExecutor(n_threads, "fused-kernel")


def _share(work, n_parts: int) -> None:
    """Call `work` here and in up to `n_parts` - 1 helper threads, which divide it themselves.

    Numba's own threads (`prange`) wait by spinning: with another process on one of the
    cores a step takes many times as long as on one thread. A helper that gets no core is
    not waited for.
    """
    n_helpers = min(n_parts, numba.get_num_threads()) - 1
    futures = [_helpers().submit(work) for _ in range(n_helpers)]
    try:
        work()
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


class FusedKernel:
    """Loss, gradients and predictions of an ensemble of models that share one shape.

    Axes: model [M], group (sets of prompts; models may share one), covariate, position
    (the query is last, N), prompt [batch]. Results are bit-identical for any number of
    threads (`numba.set_num_threads`) and for any company of other models, and a model
    that is not finite affects no other. Models, not prompts, are spread over threads.

    Args:
        config: shape of every model.
        batch: prompts per group.
        dtype: numpy float32 or float64, of all arrays.

    Raises:
        ValueError: if `batch` is not positive, `dtype` is another one, or the kernel does not
            compute models of this config (`supports`).
    """

    def __init__(self, config: ModelConfig, batch: int, dtype):
        if reason := self.supports(config):
            raise ValueError(reason)
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 prompt")
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype={self.dtype} must be float32 or float64")
        self.config = config
        self.batch = batch
        self._shapes = config.parameter_shapes()
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()]).tolist()
        starts = [0, *ends[:-1]]
        self._parts = dict(zip(self._shapes, map(slice, starts, ends), strict=True))
        # The last vector of prompts is filled up with copies that have no weight.
        self._n_padding = -batch % loops.lanes_of(self.dtype)
        self._weight = np.zeros(batch + self._n_padding, self.dtype)
        self._weight[:batch] = 1 / batch
        self._options = (
            config.n_layers,
            config.n_heads,
            config.d_model,
            _NORMALIZATION[config.normalization],
            int(config.norm_affine),
            _READOUT[config.readout],
            int(config.exclude_query),
        )

    @staticmethod
    def supports(config: ModelConfig) -> str:
        """Why the kernel does not compute models of a config; empty if it does."""
        if type(config) is not ModelConfig:
            return f"the kernel computes models of ModelConfig, not of {type(config).__name__}"
        for name, known in (("normalization", _NORMALIZATION), ("readout", _READOUT)):
            if getattr(config, name) not in known:
                return (
                    f"the kernel does not know {name}={getattr(config, name)!r}, only "
                    f"{', '.join(known)}"
                )
        return ""

    def loss_and_gradients(
        self,
        params: Mapping[str, np.ndarray],
        x: np.ndarray,
        y: np.ndarray,
        targets: np.ndarray,
        group: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Mean squared error of every model over its prompts, and its gradient.

        Args:
            params: every name of `ModelConfig.parameter_shapes`, shapes led by [M].
            x: covariates, [groups, p, N+1, batch]; position N is the query.
            y: [groups, N, batch].
            targets: what to predict at the query, [groups, batch].
            group: integers [M], the prompts of each model; by default model m uses group m.

        Returns:
            Losses [M], and gradients with the names and shapes of `params` (views of one
            fresh array [M, parameters]).

        Raises:
            ValueError: if a name, shape, dtype or group does not fit.
        """
        theta = self._flatten(params)
        gradient = np.empty_like(theta)
        losses, _ = self._run(theta, gradient, x, y, targets, group)
        return losses, {
            name: gradient[:, part].reshape(len(theta), *self._shapes[name])
            for name, part in self._parts.items()
        }

    def predictions(
        self,
        params: Mapping[str, np.ndarray],
        x: np.ndarray,
        y: np.ndarray,
        group: np.ndarray | None = None,
    ) -> np.ndarray:
        """Predictions at the query, [M, batch]; arguments as in `loss_and_gradients`."""
        theta = self._flatten(params)
        targets = np.zeros((len(x), self.batch), self.dtype)
        no_gradient = np.empty((len(theta), 0), self.dtype)
        return self._run(theta, no_gradient, x, y, targets, group)[1][:, : self.batch]

    def _run(self, theta, gradient, x, y, targets, group):
        config, n_models = self.config, len(theta)
        n_groups = len(x)
        n, p = config.n_context, config.n_covariates
        x = self._prompts("x", x, (n_groups, p, n + 1, self.batch), "groups, p, N+1, batch")
        y = self._prompts("y", y, (n_groups, n, self.batch), "groups, N, batch")
        targets = self._prompts("targets", targets, (n_groups, self.batch), "groups, batch")
        group = self._groups(group, n_models, n_groups)
        predictions = np.empty((n_models, len(self._weight)), self.dtype)
        losses = np.empty(n_models, self.dtype)
        work = functools.partial(
            _compiled(), theta, gradient, x, y, targets, self._weight, group, predictions, losses,
            self._options, self.dtype.type(config.norm_eps), np.zeros(1, np.int64),
        )  # fmt: skip
        _share(work, n_models)
        return losses, predictions

    def _flatten(self, params: Mapping[str, np.ndarray]) -> np.ndarray:
        """One row of parameters per model, in the order of `parameter_shapes`."""
        if params.keys() != self._shapes.keys():
            missing = sorted(self._shapes.keys() - params.keys())
            unknown = sorted(params.keys() - self._shapes.keys())
            raise ValueError(
                f"params lack {missing} and have the unknown {unknown}; "
                "give exactly the names of config.parameter_shapes()"
            )
        n_models = len(params["embed.W_E"])
        if n_models == 0:
            raise ValueError("params hold 0 models; their leading axis must be at least 1")
        for name, shape in self._shapes.items():
            self._check(name, params[name], (n_models, *shape), "models, *parameter_shapes()")
        return np.concatenate([params[name].reshape(n_models, -1) for name in self._shapes], axis=1)

    def _prompts(self, name: str, array: np.ndarray, shape: tuple[int, ...], axes: str):
        self._check(name, array, shape, axes)
        if self._n_padding:
            widths = [(0, 0)] * (array.ndim - 1) + [(0, self._n_padding)]
            array = np.pad(array, widths, mode="edge")
        # Numba compiles anew for read-only, unaligned or strided arrays.
        return np.require(array, requirements=["C", "A", "W"])

    def _check(self, name: str, array: np.ndarray, shape: tuple[int, ...], axes: str) -> None:
        if not isinstance(array, np.ndarray) or array.dtype != self.dtype:
            found = getattr(array, "dtype", type(array).__name__)
            raise ValueError(
                f"{name} is {found}, but this kernel takes numpy arrays of {self.dtype}; "
                "convert it or build the kernel with another dtype"
            )
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, but [{axes}] is {shape}; "
                "reorder its axes or build the kernel for another config or batch"
            )

    @staticmethod
    def _groups(group: np.ndarray | None, n_models: int, n_groups: int) -> np.ndarray:
        if group is None:
            if n_models != n_groups:
                raise ValueError(
                    f"{n_models} models and {n_groups} groups of prompts do not pair up; "
                    "pass group, the prompts each model uses"
                )
            return np.arange(n_models)
        group = np.asarray(group)
        if group.shape != (n_models,) or not np.issubdtype(group.dtype, np.integer):
            raise ValueError(
                f"group has shape {group.shape} and dtype {group.dtype}; "
                f"give one integer per model, shape ({n_models},)"
            )
        if group.min() < 0 or group.max() >= n_groups:
            raise ValueError(
                f"group runs from {group.min()} to {group.max()}, but x holds groups "
                f"0 to {n_groups - 1}; pass more prompts or smaller indices"
            )
        return group.astype(np.int64)
