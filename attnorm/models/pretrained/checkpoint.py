"""A Hugging Face checkpoint: a folder with config.json and safetensors, here or on the hub."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnorm.extras import install_hint
from attnorm.models.pretrained.tensors import TensorFileError, read_tensors

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TO_DOWNLOAD = (
    "config.json", _WEIGHTS, _INDEX, "model-*.safetensors", "tokenizer.json", "vocab.json", "merges.txt",
)  # fmt: skip

Model = TypeVar("Model", bound=nnx.Module)


class CheckpointError(ValueError):
    """A checkpoint that is not there, not complete, or not of a kind that can be read."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a folder holds; tensors are mapped into memory, not yet read."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint in a folder, or of that id on the Hugging Face hub, from where it is downloaded once.

    Args:
      model: a folder with config.json and model.safetensors, or the parts and their index; or a hub id, such as
        ``"openai-community/gpt2"``.

    Raises:
      CheckpointError: by its message: no such folder; the hub cannot be reached or has no such model; config.json or
        weights are missing, cut off, or only there as a pickle (.bin), which could run code when read.
      ModuleNotFoundError: huggingface_hub is needed and not installed.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _download(str(model))
    config = _read_json(folder / "config.json")
    return Checkpoint(str(model), folder, config, _read_weights(folder))


def fill(abstract: Model, params: Mapping[str, Any], checkpoint: Checkpoint) -> Model:
    """The module with these parameters, in float32.

    Args:
      abstract: the module by ``nnx.eval_shape``.
      params: nested as ``nnx.to_pure_dict`` of its parameters nests them.

    Raises:
      CheckpointError: a shape that config.json contradicts.
    """
    graph, state = nnx.split(abstract)
    wanted = nnx.to_pure_dict(state)

    def filled(wanted: Any, got: Any, path: str) -> Any:
        if isinstance(wanted, Mapping):
            return {key: filled(wanted[key], got[key], f"{path}.{key}") for key in wanted}
        if got.shape != wanted.shape:
            raise CheckpointError(
                f"{checkpoint.name}: {path[1:]} has shape {got.shape}, by config.json it must be {wanted.shape}"
            )
        return jnp.asarray(got, jnp.float32)

    return nnx.merge(graph, nnx.State(filled(wanted, params, "")))


class Names:
    """The tensors of a checkpoint, taken one by one, so that none is missing and none is left over."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, ignored: re.Pattern):
        self._checkpoint = checkpoint
        has_prefix = any(name.startswith(prefix) for name in checkpoint.tensors)
        self._prefix = prefix if has_prefix else ""
        self._left = {name for name in checkpoint.tensors if not ignored.search(name)}

    def take(self, name: str) -> np.ndarray:
        """The tensor of that name, with the prefix where this checkpoint has it."""
        return self.take_exactly(self._prefix + name)

    def take_exactly(self, name: str) -> np.ndarray:
        if name not in self._checkpoint.tensors:
            raise CheckpointError(f"{self._checkpoint.name} has no weight {name!r}")
        self._left.discard(name)
        return self._checkpoint.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def stack(self, template: str, indices: Iterable[int]) -> np.ndarray:
        """The tensors of all layers, with a leading layer axis; ``{}`` stands for the layer."""
        return np.stack([self.take(template.format(index)) for index in indices])

    def require_all_taken(self) -> None:
        if self._left:
            raise CheckpointError(
                f"{self._checkpoint.name} has weights that this architecture does not: "
                f"{', '.join(sorted(self._left)[:5])}{', ...' if len(self._left) > 5 else ''}"
            )


def require_known(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[Any, ...]], defaults: Mapping[str, Any]
) -> None:
    """Raises a CheckpointError where config.json asks for something else than what is wanted here."""
    for key, known in wanted.items():
        value = checkpoint.config.get(key, defaults[key])
        if value not in known:
            raise CheckpointError(
                f"{checkpoint.name}: {key} must be one of {', '.join(map(repr, known))}, got {value!r}"
            )


def whole_numbers(checkpoint: Checkpoint, keys: Iterable[str]) -> Mapping[str, int]:
    """These entries of config.json, or a CheckpointError that names the one that is no whole number."""
    for key in keys:
        if type(checkpoint.config.get(key)) is not int:
            raise CheckpointError(
                f"{checkpoint.name}: config.json must have a whole number {key}, got {checkpoint.config.get(key)!r}"
            )
    return {key: checkpoint.config[key] for key in keys}


def _download(model: str) -> Path:
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise CheckpointError(f"{model} is neither a folder nor the id of a model on the Hugging Face hub")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{model!r} is no folder, and to look for it on the Hugging Face hub huggingface_hub is needed; "
            f"{install_hint('analysis')}",
            name=error.name,
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(_TO_DOWNLOAD)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model}: its owner must grant access; then log in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{model} is neither a folder nor a model on the Hugging Face hub") from error
    except OSError as error:  # no connection, a proxy, a full disk: all of them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model} is no folder here, and could not be downloaded from the Hugging Face hub: {reason}\n"
            "Without a connection, copy config.json, model.safetensors and tokenizer.json into a folder and give its "
            "path."
        ) from error


def _read_weights(folder: Path) -> Mapping[str, np.ndarray]:
    index = folder / _INDEX
    files = [folder / _WEIGHTS]
    listed: Collection[str] = ()
    if index.is_file():
        by_name = _read_json(index).get("weight_map")
        if not isinstance(by_name, Mapping) or not all(isinstance(file, str) for file in by_name.values()):
            raise CheckpointError(f"{index} has no weight_map from names to files")
        files = [folder / file for file in sorted(set(by_name.values()))]
        listed = by_name.keys()
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        if not file.is_file():
            raise _missing(file, folder)
        try:
            tensors |= read_tensors(file)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if missing := sorted(set(listed) - tensors.keys()):
        raise CheckpointError(f"{folder} has no weight {missing[0]!r}, which {_INDEX} lists")
    return tensors


def _missing(file: Path, folder: Path) -> CheckpointError:
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not pickles:
        return CheckpointError(f"{file} is missing")
    return CheckpointError(
        f"{folder} has its weights as {pickles[0]}, a pickle, which can run code when it is read. Convert it where you "
        f"trust it, with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., "
        "safe_serialization=True)"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content
