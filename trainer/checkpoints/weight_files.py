"""Reads weights from .safetensors, torch.save files and Hugging Face folders.

Nothing that is read can run code: pickles with other content than tensors are rejected.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

SAFETENSORS = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
#: Files in a folder, in order of preference.
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
#: Keys under which files of torch.save hold the weights: ours, Lightning's, and common ones.
PLACES = ("modules", "state_dict", "model_state_dict", "model")


class WeightsError(Exception):
    """Weights that cannot be loaded; the message names the file and the problem."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a file or folder by name, on the CPU. Raises WeightsError."""
    if not path.is_dir():
        return _read_file(path)
    weights: dict[str, Tensor] = {}
    for file in _files(path):
        weights |= _read_file(file)
    return weights


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that contain its weights."""
    for name in INDICES:
        if (index := folder / name).is_file():
            return [folder / shard for shard in _shards(index)]
    for name in WHOLE:
        if (folder / name).is_file():
            return [folder / name]
    files = sorted(folder.glob(f"*{SAFETENSORS}"))
    if len(files) != 1:
        raise WeightsError(
            f"{folder} has {len(files)} files {SAFETENSORS} and no {INDICES[0]} that says how they "
            f"belong together; allowed: {WHOLE[0]}, shards with their index, or one such file"
        )
    return files


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of shards: {error!r}") from error
    for name in shards:
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"{index} names {name!r}; allowed: files beside it")
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise WeightsError(f"{path} does not exist")
    try:
        if path.suffix == SAFETENSORS:
            return safetensors.torch.load_file(path)
        if path.suffix in PICKLES:
            return _find_weights(path, _load(path))
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{path} is cut short or not a {SAFETENSORS} file: {error}") from error
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} is no file of torch.save, or holds more than tensors, which could run code: "
            f"it is refused; allowed: a state_dict, or {SAFETENSORS}"
        ) from error
    except WeightsError:
        raise
    except Exception as error:  # any error of torch's unpickler on invalid bytes
        raise WeightsError(f"{path} cannot be read: {error!r}") from error
    kinds = ", ".join((SAFETENSORS, *PICKLES))
    raise WeightsError(f"{path} is no file of weights; allowed: {kinds}, or a folder of them")


def _load(path: Path) -> object:
    """Load a file of torch.save, memory-mapped if possible."""
    is_mapped = zipfile.is_zipfile(path)  # false for torch before 1.6
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


def _find_weights(path: Path, content: object) -> dict[str, Tensor]:
    """Extract the weights from a file that may hold a whole training state."""
    place = content
    while isinstance(place, Mapping):
        if weights := _tensors(place):
            return weights
        place = next((place[name] for name in PLACES if name in place), None)
    raise WeightsError(f"{path} holds no weights by their names; allowed: a state_dict")


def _tensors(place: Mapping[object, object]) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, or of several by module name."""
    if any(name in place for name in PLACES) and not _is_flat(place):
        return {}
    if _is_flat(place):
        return {str(name): weight for name, weight in place.items() if isinstance(weight, Tensor)}
    return {
        f"{module}.{name}": weight
        for module, state in place.items()
        if isinstance(state, Mapping)
        for name, weight in state.items()
        if isinstance(weight, Tensor)
    }


def _is_flat(place: Mapping[object, object]) -> bool:
    return any(isinstance(value, Tensor) for value in place.values())
