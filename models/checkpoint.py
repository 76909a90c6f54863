"""Checkpoints: a folder with config.json, model.safetensors and training.json.

`config.json` holds the model's class, shape and dtype, and the hash of its weights;
`training.json` where the model came from (prompt distribution, seed, loss curve). Nothing here
ever unpickles. Sizes and names are checked against the header of the weights file before any
memory is taken.

A save is written in full to a folder ``.saving.*`` inside the checkpoint, which is then renamed
to ``.saved`` in one step: from there on it is the checkpoint, and its files are moved to their
places. Every file is looked for in ``.saved`` first, so that a save killed at any moment leaves
the old checkpoint or the new one; the next save tidies up. Other files in the folder stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from models.architecture.config import ModelConfig
from models.architecture.registry import architecture_named, architecture_of
from models.architecture.transformer import LinearAttentionTransformer
from models.files import to_json, write_atomically
from models.tasks.config import PromptConfig
from models.wording import listed, near_matches, shortened

CONFIG, WEIGHTS, TRAINING = "config.json", "model.safetensors", "training.json"
SHIPPED = Path(__file__).parent / "checkpoints"
# Says of a name that it is a shipped one, where a folder of that name stands as well.
PREFIX = "shipped:"

_SAVING, _SAVED = ".saving", ".saved"
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_SAFETENSORS_DTYPES = {"F32": "float32", "F64": "float64"}
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
# Configs from before classes were recorded.
_FIRST_ARCHITECTURE = LinearAttentionTransformer.architecture
_LONGEST = 1000  # characters of a foreign library's message that are passed on


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message says why and what to do."""


def available() -> list[str]:
    """Names of the checkpoints that ship with the package, for `load`."""
    return sorted(folder.parent.name for folder in SHIPPED.glob(f"*/{CONFIG}"))


def save(
    model: LinearAttentionTransformer, folder: str | os.PathLike[str], **provenance: Any
) -> Path:
    """Write a checkpoint folder in one step.

    Args:
        model: what to save, of a registered class (`models.architecture.registry`).
        folder: where; of an earlier checkpoint there the three files are replaced and nothing
            else is touched. A folder of anything else is refused.
        **provenance: JSON values for training.json. The key ``prompts`` should hold the
            `PromptConfig` the model was trained on: analyses probe on it by default.

    Returns:
        The folder, with symbolic links resolved.

    Raises:
        CheckpointError: on a class that is not registered, parameters that are not those of the
            config, non-finite weights, another dtype than float32 or float64, provenance that
            is not JSON, or a folder that cannot be written.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    try:
        architecture = architecture_of(model)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    _require_shapes(shapes, model.cfg.parameter_shapes(), type(model).__name__)
    dtypes = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise CheckpointError(
            f"weights have dtype {', '.join(sorted(dtypes))}; a checkpoint holds one of "
            f"{', '.join(_DTYPES)}: convert with model.float() or model.double()"
        )
    _require_finite(state, folder)
    weights = to_bytes(state)
    config = {
        "architecture": architecture,
        "dtype": dtypes.pop(),
        "model": model.cfg.model_dump(),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    provenance = {
        key: value.model_dump() if hasattr(value, "model_dump") else value
        for key, value in provenance.items()
    }
    try:
        files = {
            WEIGHTS: weights,
            TRAINING: to_json(provenance).encode(),
            CONFIG: to_json(config).encode(),
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"provenance must be finite JSON values (numbers, strings, lists, dicts): {error}"
        ) from error
    if _is_name(folder) and str(folder).startswith(PREFIX):
        raise CheckpointError(
            f"{str(folder)!r} names a shipped checkpoint, which is not written to; give a folder"
        )
    # A symbolic link stays one: what it points to is written.
    target = Path(os.path.realpath(folder))
    _require_replaceable(target)
    _write(files, target)
    return target


def load(
    checkpoint: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> LinearAttentionTransformer:
    """Load a model by shipped name or from a checkpoint folder.

    Args:
        checkpoint: one of `available()`, or a folder that `save` wrote (see `resolve`).
        dtype: float dtype of the result; the recorded one by default.

    Returns:
        A model of the class on record.

    Raises:
        CheckpointError: on anything that is not a complete, finite checkpoint whose
            tensors fit its config.
    """
    folder = checkpoint_folder(checkpoint)
    record = _read_config(folder)
    state = _read_weights(folder, record)
    try:
        model = record.cls(record.config).to(dtype or _DTYPES[record.dtype])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model.load_state_dict(state)
    return model


def resolve(checkpoint: str | os.PathLike[str]) -> tuple[Path, str]:
    """Where a checkpoint stands, and how a record should call it.

    A path is a path: text with a separator, such as ``./name`` or ``name/``, and any path object
    mean a folder. A bare word means a shipped name, else a folder; if it is both, it is refused.
    ``shipped:name`` means the shipped one.

    Args:
        checkpoint: a shipped name or a folder.

    Returns:
        The folder, and "shipped:NAME", or the path as it was given.

    Raises:
        CheckpointError: if there is none, or a word means two.
    """
    text = os.fspath(checkpoint)
    is_name = _is_name(checkpoint)
    suffix = os.path.splitext(text)[1]
    if is_name and text.startswith(PREFIX):
        name = text.removeprefix(PREFIX)
        if name not in available():
            raise CheckpointError(f"{shortened(text)!r} is not shipped{_shipped_names(name)}")
        return SHIPPED / name, text
    shipped = SHIPPED / text
    if is_name and os.path.isfile(shipped / CONFIG):
        if os.path.isdir(text) and not os.path.samefile(text, shipped):
            raise CheckpointError(
                f"{text!r} is both a shipped name and a folder here; give {PREFIX}{text} for the "
                f"shipped one, .{os.sep}{text} for the folder"
            )
        return shipped, PREFIX + text
    if os.path.isdir(text):
        parent, name = os.path.split(os.path.realpath(text))
        is_shipped = parent == os.path.realpath(SHIPPED) and name in available()
        return Path(text), PREFIX + name if is_shipped else text
    if os.path.isfile(text) or suffix in _PICKLES:
        why = "a pickle can run code and is never opened" if suffix in _PICKLES else "it is a file"
        raise CheckpointError(
            f"{text!r} cannot be loaded: {why}. Give a folder with {CONFIG} and {WEIGHTS}, or one "
            f"of {listed(available())}; models.from_paper_weights takes tensors, models.save "
            f"writes a folder"
        )
    reason = "is neither a shipped name nor a folder" if is_name else "is not a folder"
    raise CheckpointError(f"{shortened(text)!r} {reason}{_shipped_names(text)}")


def checkpoint_folder(checkpoint: str | os.PathLike[str]) -> Path:
    """Folder of a checkpoint; see `resolve`."""
    return resolve(checkpoint)[0]


def holds_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has the files of a checkpoint, readable or not."""
    return all(_file(Path(folder), name).is_file() for name in (CONFIG, WEIGHTS))


def provenance(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of training.json; empty if the folder has none."""
    path = _file(checkpoint_folder(checkpoint), TRAINING)
    return _read_json(path) if path.is_file() else {}


def training_prompts(checkpoint: str | os.PathLike[str]) -> PromptConfig:
    """Prompt distribution a checkpoint was trained on.

    Without one on record: standard normal prompts of the model's own size.

    Raises:
        CheckpointError: if what is on record is none, or does not fit the model.
    """
    folder = checkpoint_folder(checkpoint)
    config = _read_config(folder).config
    recorded = provenance(folder).get("prompts")
    if recorded is None:
        return PromptConfig(n_context=config.n_context, n_covariates=config.n_covariates)
    try:
        prompts = PromptConfig(**recorded)
    except (ValidationError, TypeError) as error:
        raise CheckpointError(
            f"{folder / TRAINING}: 'prompts' is not a PromptConfig: {shortened(error, _LONGEST)}"
        ) from error
    for name in ("n_covariates",) if config.any_length else ("n_context", "n_covariates"):
        ours, theirs = getattr(config, name), getattr(prompts, name)
        if ours != theirs:
            raise CheckpointError(
                f"{folder / TRAINING} has prompts with {name}={theirs}, {folder / CONFIG} a model "
                f"with {name}={ours}; save the model with the prompts it was trained on"
            )
    return prompts


def checkpoint_hash(checkpoint: str | os.PathLike[str]) -> str:
    """SHA-256 over config.json and model.safetensors."""
    folder = checkpoint_folder(checkpoint)
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update(_file(folder, name).read_bytes())
    return digest.hexdigest()


def from_paper_weights(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype = torch.float64
) -> LinearAttentionTransformer:
    """Build a model from weights in the paper's letters (eqs. 9-10).

    Args:
        tensors: W_in [d, 2+p], optionally b_in [d]; per layer l ``layers.{l}.W1``, ``.W2``,
            ``.W3`` [h, d, d]; W_out [positions · d], position-major; b_out, one number.
            Tensors named ``example_*`` are ignored. Arrays of other libraries are accepted.
        config: shape of the model; affine layer norm has no letters in the paper.
        dtype: dtype of the model; float64 holds every usual weight exactly.

    Raises:
        CheckpointError: on missing, foreign, misshapen or non-finite tensors.
    """
    if config.norm_affine:
        raise CheckpointError("norm_affine=True: the paper's layer norm has no affine map")
    given = {
        name: torch.as_tensor(value)
        for name, value in tensors.items()
        if not name.startswith("example_")
    }
    d, heads = config.d_model, (config.n_heads, config.d_model, config.d_model)
    readout_shape = config.parameter_shapes()["unembed.W_U"]
    expected: dict[str, tuple[int, ...]] = {"W_in": (d, 2 + config.n_covariates)}
    expected |= {f"layers.{i}.W{j}": heads for i in range(config.n_layers) for j in (1, 2, 3)}
    expected |= {"W_out": (readout_shape[0] * d,), "b_out": ()}
    given.setdefault("b_in", torch.zeros(d, dtype=given["W_in"].dtype if "W_in" in given else None))
    expected["b_in"] = (d,)
    for name in ("W_out", "b_out"):
        if name in given and given[name].numel() == max(
            1, readout_shape[0] * d * (name == "W_out")
        ):
            given[name] = given[name].reshape(expected[name])
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    _require_shapes(shapes, expected, "paper weights")
    _require_finite(given, "paper weights")

    state = {
        "embed.W_E": given["W_in"].T,
        "embed.b_E": given["b_in"],
        "unembed.W_U": given["W_out"].reshape(readout_shape),
        "unembed.b_U": given["b_out"],
    }
    for i in range(config.n_layers):
        state[f"blocks.{i}.attn.W_Q"] = given[f"layers.{i}.W3"]
        state[f"blocks.{i}.attn.W_K"] = given[f"layers.{i}.W1"].transpose(1, 2)
        state[f"blocks.{i}.attn.W_V"] = given[f"layers.{i}.W2"]
    model = LinearAttentionTransformer(config).to(dtype)
    model.load_state_dict(state)
    return model


@dataclass(frozen=True)
class _Record:
    """What config.json says: class and shape of the model, dtype and hash of its weights."""

    cls: type[Any]
    config: ModelConfig
    dtype: str
    weights_sha256: str | None


def _read_config(folder: Path) -> _Record:
    path = _file(folder, CONFIG)
    raw = _read_json(path)
    if raw.keys() - {"architecture", "dtype", "model", "weights_sha256"} or not isinstance(
        raw.get("model"), dict
    ):
        raise CheckpointError(
            f"{path} must hold the keys 'model' and 'dtype', got {listed(sorted(raw))}"
        )
    if raw.get("dtype") not in _DTYPES:
        raise CheckpointError(
            f"{path}: dtype {shortened(repr(raw.get('dtype')))} is not one of {', '.join(_DTYPES)}"
        )
    try:
        cls = architecture_named(raw.get("architecture", _FIRST_ARCHITECTURE))
        missing = [name for name in cls.config_type.model_fields if name not in raw["model"]]
        if missing:
            raise CheckpointError(
                f"'model' lacks {', '.join(missing)}; a default could be another model: write "
                f"what it was trained with, or save it again"
            )
        config = cls.config_type(**raw["model"])
        config.require_memory(torch.finfo(_DTYPES[raw["dtype"]]).bits // 8)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {shortened(error, _LONGEST)}") from error
    return _Record(cls, config, raw["dtype"], raw.get("weights_sha256"))


def _read_weights(folder: Path, record: _Record) -> dict[str, Tensor]:
    """Weights that fit the config, checked against the file's header first."""
    path = _file(folder, WEIGHTS)
    if not path.is_file():
        pickles = [p.name for p in folder.iterdir() if p.suffix in _PICKLES]
        hint = f" ({', '.join(pickles)} is a pickle and is never opened)" if pickles else ""
        raise CheckpointError(f"{path} is missing{hint}; write the folder with models.save")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            _require_shapes(shapes, record.config.parameter_shapes(), path)
            for name, part in slices.items():
                found = _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                if found != record.dtype:
                    raise CheckpointError(
                        f"{path}: {name} is {found}, {CONFIG} says {record.dtype}; "
                        f"correct the config or save again"
                    )
            state = {name: file.get_tensor(name) for name in slices}
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or is not a safetensors file ({error}); copy it again"
        ) from error
    _require_finite(state, path)
    if record.weights_sha256 not in (None, found):
        raise CheckpointError(
            f"{path} has the SHA-256 {found}, {CONFIG} says "
            f"{shortened(record.weights_sha256)}: they are of different saves, or one was edited; "
            f"copy both again, or save the model again"
        )
    return state


def _require_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: Any
) -> None:
    missing, foreign = sorted(expected.keys() - found), sorted(found.keys() - expected)
    if missing or foreign:
        parts = [
            f"{kind} {listed(names)}"
            for kind, names in (("missing", missing), ("foreign", foreign))
            if names
        ]
        raise CheckpointError(
            f"{where}: {'; '.join(parts)}; the config asks for exactly {listed(expected)}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(found[name])}, the config asks for {list(shape)}"
            )


def _require_finite(state: Mapping[str, Tensor], where: Any) -> None:
    for name, value in state.items():
        if not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise CheckpointError(
                f"{where}: {name} holds {bad} NaN or infinite value(s); "
                f"take a checkpoint from before the divergence"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; write the folder with models.save") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _is_name(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether it could be a shipped name: a word, neither a path object nor a path."""
    if not isinstance(checkpoint, str):
        return False
    return not {os.sep, os.altsep, "/"} & set(checkpoint) and checkpoint not in ("", ".", "..")


def _shipped_names(name: str) -> str:
    names = available()
    return f"{near_matches(name, names)}; shipped: {', '.join(names)}"


def _file(folder: Path, name: str) -> Path:
    """Where a file of a checkpoint stands: with the last save, though it was cut off later."""
    saved = folder / _SAVED / name
    return saved if saved.is_file() else folder / name


def _require_replaceable(folder: Path) -> None:
    """Refuse a folder whose content is not a checkpoint."""
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder} exists and is no folder; choose another name")
        return
    others = [path for path in folder.iterdir() if not path.name.startswith(f"{_SAVING}.")]
    if not others:
        return
    if not _file(folder, CONFIG).is_file():
        raise CheckpointError(
            f"{folder} exists and is not a checkpoint; choose another folder or empty it"
        )
    try:
        _read_config(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} exists and is not a checkpoint that could be replaced ({error}); choose "
            f"another folder"
        ) from error
    for name in (CONFIG, WEIGHTS, TRAINING):
        if (folder / name).is_dir():
            raise CheckpointError(f"{folder / name} is a folder; choose another folder")


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    """Put the files of a checkpoint into a folder, made if needed: all of them or none."""
    is_new = not folder.exists()
    staging = folder / f"{_SAVING}.{secrets.token_hex(6)}"
    is_saved = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _move_into_place(folder)
        _remove_leftovers(folder)
        staging.mkdir()
        for name, data in files.items():
            write_atomically(staging / name, data)
        staging.rename(folder / _SAVED)
        is_saved = True
        _move_into_place(folder)
    except OSError as error:
        outcome = f"it loads from {folder / _SAVED}" if is_saved else "nothing was changed"
        raise CheckpointError(
            f"cannot write {folder}: {error.strerror or error}; {outcome}"
        ) from error
    finally:
        if not is_saved:
            shutil.rmtree(staging, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    folder.rmdir()


def _move_into_place(folder: Path) -> None:
    """Move the files of the last save to their places; nothing to do if it was not cut off.

    Any number of processes may do this at a time.
    """
    saved = folder / _SAVED
    for name in (WEIGHTS, TRAINING, CONFIG):
        with suppress(FileNotFoundError):
            os.replace(saved / name, folder / name)
    with suppress(FileNotFoundError):
        saved.rmdir()


def _remove_leftovers(folder: Path) -> None:
    """Drop what killed saves have left; one that still runs fails and changes nothing."""
    for left in folder.glob(f"{_SAVING}.*"):
        # Renamed first, so that no save can take up a half removed folder.
        aside = folder / f"{_SAVING}.{secrets.token_hex(6)}"
        with suppress(FileNotFoundError):
            left.rename(aside)
            shutil.rmtree(aside)
