"""Checkpoints: a folder with config.json, model.safetensors and training.json.

`config.json` holds the model's shape and dtype, `training.json` where the model
came from (prompt distribution, seed, loss curve). Nothing here ever unpickles.
Sizes and names are checked against the header of the weights file before any
memory is taken, and a folder is put in place in one step or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig, PromptConfig
from models.hooks import near_matches
from models.transformer import LinearAttentionTransformer

CONFIG, WEIGHTS, TRAINING = "config.json", "model.safetensors", "training.json"
SHIPPED = Path(__file__).parent / "checkpoints"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_SAFETENSORS_DTYPES = {"F32": "float32", "F64": "float64"}
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}


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
        model: what to save.
        folder: where; an earlier checkpoint there is replaced, anything else is refused.
        **provenance: JSON values for training.json. The key ``prompts`` should hold the
            `PromptConfig` the model was trained on: analyses probe on it by default.

    Returns:
        The folder.

    Raises:
        CheckpointError: on non-finite weights, another dtype than float32 or float64,
            provenance that is not JSON, or a folder that cannot be written.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    dtypes = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise CheckpointError(
            f"weights have dtype {', '.join(sorted(dtypes))}; a checkpoint holds one of "
            f"{', '.join(_DTYPES)}: convert with model.float() or model.double()"
        )
    _require_finite(state, folder)
    config = {"model": model.cfg.model_dump(), "dtype": dtypes.pop()}
    provenance = {
        key: value.model_dump() if hasattr(value, "model_dump") else value
        for key, value in provenance.items()
    }
    try:
        texts = {CONFIG: to_json(config), TRAINING: to_json(provenance)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"provenance must be finite JSON values (numbers, strings, lists, dicts): {error}"
        ) from error

    target = Path(os.path.abspath(folder))
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free and not (target / CONFIG).is_file():
        raise CheckpointError(
            f"{target} exists and is not a checkpoint; choose another folder or empty it"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        save_file(state, staging / WEIGHTS)
        for name, text in texts.items():
            (staging / name).write_text(text)
        for written in staging.iterdir():
            with written.open("rb") as handle:
                os.fsync(handle.fileno())
        staging.chmod(0o755)
        _replace_folder(staging, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}; nothing was changed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def load(
    name_or_folder: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> LinearAttentionTransformer:
    """Load a model by shipped name or from a checkpoint folder.

    Args:
        name_or_folder: one of `available()`, or a folder that `save` wrote.
        dtype: float dtype of the result; the recorded one by default.

    Raises:
        CheckpointError: on anything that is not a complete, finite checkpoint whose
            tensors fit its config.
    """
    folder = checkpoint_folder(name_or_folder)
    config, recorded = _read_config(folder)
    state = _read_weights(folder / WEIGHTS, config, recorded)
    try:
        model = LinearAttentionTransformer(config).to(dtype or _DTYPES[recorded])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model.load_state_dict(state)
    return model


def checkpoint_folder(name_or_folder: str | os.PathLike[str]) -> Path:
    """Folder of a shipped name or of a path; raises CheckpointError if there is none."""
    text = os.fspath(name_or_folder)
    path = Path(text)
    if path.is_file() or path.suffix in _PICKLES:
        pickled = path.suffix in _PICKLES
        why = "a pickle can run code and is never opened" if pickled else "it is a file"
        raise CheckpointError(
            f"{text!r} cannot be loaded: {why}. Give a folder with {CONFIG} and {WEIGHTS}, or one "
            f"of {', '.join(available())}; models.from_paper_weights takes tensors, "
            f"models.save writes a folder"
        )
    is_name = not {os.sep, os.altsep, "/"} & set(text) and text not in ("", ".", "..")
    if is_name and (SHIPPED / text / CONFIG).is_file():
        return SHIPPED / text
    if path.is_dir() and text:
        return path
    reason = "is neither a shipped name nor a folder" if is_name else "is not a folder"
    raise CheckpointError(
        f"{text!r} {reason}{near_matches(text, available())}; shipped: {', '.join(available())}"
    )


def provenance(name_or_folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of training.json; empty if the folder has none."""
    path = checkpoint_folder(name_or_folder) / TRAINING
    return _read_json(path) if path.is_file() else {}


def training_prompts(name_or_folder: str | os.PathLike[str]) -> PromptConfig:
    """Prompt distribution a checkpoint was trained on.

    Without one on record: standard normal prompts of the model's own size.
    """
    config, _ = _read_config(checkpoint_folder(name_or_folder))
    recorded = provenance(name_or_folder).get("prompts")
    if recorded is None:
        return PromptConfig(n_context=config.n_context, n_covariates=config.n_covariates)
    try:
        return PromptConfig(**recorded)
    except (ValidationError, TypeError) as error:
        raise CheckpointError(
            f"{name_or_folder}: 'prompts' in {TRAINING} is not a PromptConfig: {error}"
        ) from error


def checkpoint_hash(name_or_folder: str | os.PathLike[str]) -> str:
    """SHA-256 over config.json and model.safetensors."""
    folder = checkpoint_folder(name_or_folder)
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update((folder / name).read_bytes())
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


def _read_config(folder: Path) -> tuple[ModelConfig, str]:
    """Model config and name of the recorded dtype."""
    raw = _read_json(folder / CONFIG)
    foreign = set(raw) - {"model", "dtype"}
    if foreign or not isinstance(raw.get("model"), dict):
        raise CheckpointError(
            f"{folder / CONFIG} must hold the keys 'model' and 'dtype', got {sorted(raw)}"
        )
    if raw.get("dtype") not in _DTYPES:
        raise CheckpointError(
            f"{folder / CONFIG}: dtype {raw.get('dtype')!r} is not one of {', '.join(_DTYPES)}"
        )
    try:
        config = ModelConfig(**raw["model"])
    except (ValidationError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    try:
        config.require_memory(torch.finfo(_DTYPES[raw["dtype"]]).bits // 8)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    return config, raw["dtype"]


def _read_weights(path: Path, config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    """Weights that fit `config`, checked against the file's header first."""
    if not path.is_file():
        pickles = [p.name for p in path.parent.iterdir() if p.suffix in _PICKLES]
        hint = f" ({', '.join(pickles)} is a pickle and is never opened)" if pickles else ""
        raise CheckpointError(f"{path} is missing{hint}; write the folder with models.save")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            _require_shapes(shapes, config.parameter_shapes(), path)
            for name, part in slices.items():
                found = _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                if found != dtype:
                    raise CheckpointError(
                        f"{path}: {name} is {found}, {CONFIG} says {dtype}; "
                        f"correct the config or save again"
                    )
            state = {name: file.get_tensor(name) for name in slices}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or is not a safetensors file ({error}); copy it again"
        ) from error
    _require_finite(state, path)
    return state


def _require_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: Any
) -> None:
    missing, foreign = sorted(expected.keys() - found), sorted(found.keys() - expected)
    if missing or foreign:
        parts = [
            f"{kind} {', '.join(names)}"
            for kind, names in (("missing", missing), ("foreign", foreign))
            if names
        ]
        raise CheckpointError(
            f"{where}: {'; '.join(parts)}; the config asks for exactly {', '.join(expected)}"
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


def to_json(value: Any) -> str:
    """Stable JSON text; NaN and infinity raise ValueError."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _replace_folder(staging: Path, target: Path) -> None:
    """Put `staging` at `target`; an earlier folder is moved aside first, then removed."""
    if not target.exists():
        staging.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
