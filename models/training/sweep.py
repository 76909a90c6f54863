"""Where an ensemble is trained: in this process, in local processes, or on a Dask cluster.

In this process all models advance together, the kernel spreading them over threads.
Elsewhere they are split into units, one per seed and prompt distribution (whose models
share their prompts), each trained on one core. The split changes no bit of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import numba
import numpy as np
from tqdm import tqdm

from models.training.ensemble import Member, State, initial_state
from models.training.loop import advance
from models.training.run_folder import RUN, RunFolder, TrainingError

if TYPE_CHECKING:
    from models.training.config import TrainConfig

_CONNECT_SECONDS = 20

# Models that advance together, by the step they are at and what else they share.
Units = dict[tuple[int, object], list[Member]]


@dataclass(frozen=True)
class Result:
    """A trained model: its row of every array of `models.training.ensemble.State`."""

    member: Member
    arrays: dict[str, np.ndarray]

    @property
    def diverged(self) -> int | None:
        """Step at which the model was frozen, if it was."""
        step = int(self.arrays["diverged"])
        return None if step < 0 else step


@dataclass(frozen=True)
class Sweep:
    """How to train; see `models.train` for the fields."""

    config: TrainConfig
    n_jobs: int
    scheduler: str | None
    save_seconds: float
    save_steps: int
    progress: bool

    def run(self, members: Sequence[Member], folder: RunFolder | None = None) -> Iterator[Result]:
        """Train `members`, from the states in `folder` if there are any.

        Yields:
            Models as they are finished.

        Raises:
            TrainingError: if the scheduler cannot be reached or a state not be saved.
        """
        saved = folder.states() if folder else {}
        split = self.scheduler is not None or self.n_jobs != 1
        units: Units = {}
        for member in members:
            # Models of one unit advance in step, so those that stopped elsewhere are apart.
            step = saved[member.name][0] if member.name in saved else 0
            key = (step, (member.prompts, member.seed) if split else None)
            units.setdefault(key, []).append(member)

        path = folder.path if folder else None
        train = self._elsewhere if split else self._here
        for unit, state in train(units, path):
            for row, member in enumerate(unit):
                yield Result(member, {name: array[row] for name, array in state.arrays.items()})

    def _here(self, units: Units, path: Path | None) -> Iterator[tuple[list[Member], State]]:
        saving = (path, self.save_seconds, self.save_steps)
        for (step, _), unit in units.items():
            with tqdm(
                total=self.config.steps,
                initial=step,
                unit="step",
                mininterval=0.5,
                disable=not self.progress,
            ) as bar:

                def show(state: State, losses: np.ndarray, bar: tqdm = bar) -> None:
                    if bar.update(state.step - bar.n) or state.step == self.config.steps:
                        alive = state.arrays["diverged"] < 0
                        span = losses[alive] if alive.any() else losses
                        bar.set_postfix_str(
                            f"loss {span.min():.1e} to {span.max():.1e}, "
                            f"{alive.sum()}/{len(alive)} models alive",
                            refresh=False,
                        )

                state = train_unit(self.config, unit, *saving, show)
            yield unit, state

    def _elsewhere(self, units: Units, path: Path | None) -> Iterator[tuple[list[Member], State]]:
        saving = (path, self.save_seconds, self.save_steps)
        groups = list(units.values())
        jobs = [joblib.delayed(_train_on_one_core)(self.config, unit, *saving) for unit in groups]
        with _workers(self.n_jobs, self.scheduler):
            # joblib's signature says batch_size: str and a list as result; it takes and gives more.
            options: dict[str, Any] = {"batch_size": 1, "pre_dispatch": "all"}
            states: Any = joblib.Parallel(return_as="generator", **options)(jobs)
            bar = tqdm(states, total=len(groups), unit="unit", disable=not self.progress)
            yield from zip(groups, bar, strict=True)


def train_unit(
    config: TrainConfig,
    members: Sequence[Member],
    path: Path | None,
    save_seconds: float,
    save_steps: int,
    watch: Callable[[State, np.ndarray], None] | None = None,
) -> State:
    """Train some models to the end of the run, in step with one another.

    Args:
        config: what to train.
        members: models whose saved states, if any, are at the same step.
        path: the run's folder; a machine that does not see it keeps no state.
        save_seconds: time between saved states.
        save_steps: steps between saved states.
        watch: called with the state and the losses [M] after every step.

    Raises:
        TrainingError: if the state cannot be saved.
    """
    folder = RunFolder(path) if path is not None and (path / RUN).is_file() else None
    state = (folder and _saved_state(folder, members)) or initial_state(config, members)
    names = [member.name for member in members]
    last_step, last_time = state.step, time.monotonic()

    def after_step(state: State, losses: np.ndarray) -> None:
        nonlocal last_step, last_time
        now = time.monotonic()
        if folder and (state.step - last_step >= save_steps or now - last_time >= save_seconds):
            folder.save_state(names, state.step, state.arrays)
            last_step, last_time = state.step, now
        if watch:
            watch(state, losses)

    advance(config, members, state, after_step)
    if folder:
        folder.save_state(names, state.step, state.arrays)
    return state


def _train_on_one_core(*arguments) -> State:
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        return train_unit(*arguments)
    finally:
        numba.set_num_threads(threads)


def _saved_state(folder: RunFolder, members: Sequence[Member]) -> State | None:
    """The state all members share, if they do."""
    saved = folder.states()
    rows = [saved[member.name] for member in members if member.name in saved]
    if len(rows) < len(members) or len({step for step, _ in rows}) > 1:
        return None
    step, first = rows[0]
    return State(step, {name: np.stack([row[name] for _, row in rows]) for name in first})


@contextmanager
def _workers(n_jobs: int, scheduler: str | None) -> Iterator[None]:
    """Context in which joblib runs on local processes, or on the workers of a scheduler."""
    if scheduler is None:
        with joblib.parallel_config(backend="loky", n_jobs=n_jobs):
            yield
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise TrainingError(
            "training on a Dask scheduler needs the extra 'cluster': "
            "pip install 'which-algorithm[cluster]'"
        ) from error
    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"no Dask scheduler answers at {scheduler} ({error}); start one with "
            f"'dask scheduler' and give its address, such as tcp://host:8786"
        ) from error
    with (
        client,
        joblib.parallel_config(
            backend="dask", client=client, wait_for_workers_timeout=_CONNECT_SECONDS
        ),
    ):
        yield
