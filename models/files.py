"""Files that are written whole or not at all, and JSON that is the same text every time."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, or replace it, in one step; its mode is what the umask leaves.

    The data stand on the disk before the name does: a reader, and a process that goes on after
    a crash, finds the old file or the new one, never a part.

    Args:
        path: where; the folder must exist.
        data: the whole content.

    Raises:
        OSError: if it cannot be written; the old file stays, and nothing beside it.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    # A mode given to `os.open` is cut by the umask, as for any new file.
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def to_json(value: Any) -> str:
    """Stable JSON text; NaN and infinity raise ValueError."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"
