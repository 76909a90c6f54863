"""The folder of a training run: one process at a time, and nothing half written.

    run.json                what is trained, and the names of the models
    .lock                   held while a process trains here; the system releases it
                            when the process ends, however it ends
    .state/*.safetensors    how far the models are; gone when all are finished
    <name>/                 a finished model (see `models.checkpoint`)

Every file is written beside its place and renamed into it, so that a reader, or a
run that continues after a crash, sees the old or the new one and never a part.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from models.checkpoint import holds_checkpoint
from models.files import to_json, write_atomically

RUN, LOCK, STATE = "run.json", ".lock", ".state"


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says why and what to do."""


class RunFolder:
    """A run's folder, opened with `RunFolder.hold`."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    @contextmanager
    def hold(
        cls,
        path: str | os.PathLike[str],
        run: Mapping[str, Any],
        names: Sequence[str],
        complete: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> Iterator[RunFolder]:
        """Hold the folder for this process, making it if needed.

        Args:
            path: where.
            run: JSON values that say what is trained.
            names: of the models.
            complete: adds to a recorded `run` the fields that are newer than the record.

        Raises:
            TrainingError: if another process trains there, it holds another run or
                foreign folders, or it cannot be written.
        """
        folder = cls(Path(os.path.abspath(path)))
        lock = FileLock(folder.path / LOCK, timeout=0)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise TrainingError(
                f"another process is training in {folder.path}; wait for it to end, "
                f"or choose another output folder"
            ) from None
        except OSError as error:
            raise TrainingError(
                f"cannot use {folder.path} as output: {error.strerror or error}; choose another "
                f"folder"
            ) from error
        try:
            folder._claim({"run": run, "models": list(names)}, complete)
            yield folder
        finally:
            lock.release()

    def finished(self, name: str) -> bool:
        """Whether a model stands in the folder."""
        return holds_checkpoint(self.path / name)

    def save_state(self, names: Sequence[str], step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep how far a group of models is, in place of what was kept before.

        Raises:
            TrainingError: if it cannot be written; the earlier state stays.
        """
        unit = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
        metadata = {"step": str(step), "models": json.dumps(list(names))}
        try:
            (self.path / STATE).mkdir(exist_ok=True)
            write_atomically(
                self.path / STATE / f"{unit}.safetensors", to_bytes(dict(arrays), metadata)
            )
        except OSError as error:
            raise TrainingError(
                f"cannot save step {step} in {self.path / STATE}: {error.strerror}; the last saved "
                f"state is intact: make room, then run the same command again to continue from it"
            ) from error

    def states(self) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
        """Name of each model with a saved state -> its step and its row of every array.

        Raises:
            TrainingError: if a file is damaged.
        """
        found: dict[str, tuple[int, dict[str, np.ndarray]]] = {}
        for path in sorted((self.path / STATE).glob("*.safetensors")):
            try:
                with safe_open(path, framework="np") as file:
                    step = int(file.metadata()["step"])
                    names = json.loads(file.metadata()["models"])
                    arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
                raise TrainingError(
                    f"{path} is damaged ({error}); delete it to train its models from the start"
                ) from error
            for row, name in enumerate(names):
                if name not in found or found[name][0] < step:
                    found[name] = (step, {key: array[row] for key, array in arrays.items()})
        return found

    def clear_states(self) -> None:
        """Drop all saved states, once their models are finished."""
        shutil.rmtree(self.path / STATE, ignore_errors=True)

    def _claim(
        self, record: dict[str, Any], complete: Callable[[dict[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Write run.json, or compare with the one that is there."""
        path = self.path / RUN
        if path.exists():
            # Through JSON, so that tuples compare equal to the lists they are stored as.
            now = json.loads(json.dumps(record))
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
                before["run"] = complete(before["run"])
                changes = _differences(before["run"], now["run"]) or _differences(before, now)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise TrainingError(
                    f"{path} is damaged ({error!r}); choose another output folder"
                ) from error
            if changes:
                raise TrainingError(
                    f"{self.path} holds another run: {'; '.join(changes)}; repeat that run's "
                    f"settings to continue it, or choose another output folder"
                )
            return
        foreign = [name for name in record["models"] if (self.path / name).exists()]
        if foreign:
            raise TrainingError(
                f"{self.path} already holds {', '.join(foreign)}, of no recorded run; "
                f"choose another output folder"
            )
        try:
            write_atomically(path, to_json(record).encode())
        except OSError as error:
            raise TrainingError(f"cannot write {path}: {error.strerror}") from error


def _differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Leaves in which two JSON values differ, as text."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            text
            for key in sorted(before.keys() | after.keys())
            for text in _differences(
                before.get(key), after.get(key), f"{where}.{key}" if where else key
            )
        ]
    return [] if before == after else [f"{where} was {before}, is now {after}"]
