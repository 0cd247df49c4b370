"""Checkpoints: all state that determines the next step, in an atomically written file.

A checkpoint contains plain tensors and containers, so it loads with `weights_only=True`, and cannot
run code. Without any one of its parts a resumed run differs: without the scaler's growth tracker,
at the next growth; without the rest, at the next step.
"""

import pickle
import random
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_map_only

from halfstep.recipe import RecipeError
from halfstep.run_config import RunConfig
from trainer import machine
from trainer.checkpoints.files import checksum
from trainer.checkpoints.formats import FORMAT, FormatError, convert
from trainer.checkpoints.state_files import Make
from trainer.distributed.shards import parts_of_module, parts_of_optimizer
from trainer.precision.memory_format import lay_out_as_weights
from trainer.prepared_recipe import PreparedRecipe

_NumpyState: TypeAlias = tuple[str, NDArray[np.uint32], int, int, float]


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message names the file and the problem."""


class Progress(NamedTuple):
    """Progress of a run."""

    step: int = 0  # attempted; the learning-rate schedule counts these too
    skipped: int = 0  # attempted minus applied
    position: int = 0  # training examples used, see trainer/data/sampler.py
    retried: int = 0  # skipped steps whose second attempt, in fp32, was applied


def load(
    path: Path,
    sha256: str | None = None,
    *,
    is_checked: bool = False,
    make: Make = torch.empty,
) -> dict[str, Any]:
    """Load a checkpoint after verifying its checksums.

    Its tensors are mapped from the file to avoid a copy in memory: keep none of them (`in_memory`).
    is_checked: the bytes are already verified.  make: creates the tensors that shards are read
    into.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if not is_checked:
        _check(path, sha256)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        state = convert(state)
    except FormatError as error:
        raise CheckpointError(f"{path} {error}") from error
    if "shards" in state:
        return _with_shards(state, path.with_suffix(""), make, is_checked=is_checked)
    return state


def _with_shards(
    state: dict[str, Any], folder: Path, make: Make, *, is_checked: bool
) -> dict[str, object]:
    """Return a state with its sharded tensors loaded. Raises CheckpointError."""
    from trainer.checkpoints.shard_files import fill

    for name, sha256 in {} if is_checked else state["shards"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} does not exist")
        if sha256 != (actual := checksum(folder / name)):
            text = f"its SHA-256 is {actual}, not {sha256}"
            raise CheckpointError(f"{folder / name} is altered: {text}")
    try:
        whole: dict[str, object] = fill(state, folder, make)
    except (KeyError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return whole


def _check(path: Path, sha256: str | None) -> None:
    """Verify the SHA-256, and the archive's CRCs, which torch.load ignores.

    Raises CheckpointError.
    """
    if sha256 is not None and sha256 != (actual := checksum(path)):
        raise CheckpointError(f"{path} is altered: its SHA-256 is {actual}, not {sha256}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is cut short or not a checkpoint: {error}") from error
    if damaged:
        raise CheckpointError(f"{path} is altered: the checksum of its part {damaged} is wrong")


def capture(
    prepared: PreparedRecipe,
    progress: Progress,
    random_states: Sequence[Mapping[str, object]],
    parts: Mapping[str, Any],
    recipe_state: dict[str, object],
    data_state: object,
    next_batch: list[str],
) -> dict[str, object]:
    """Return all state that determines the next step; it is not a copy.

    The host waits for the device here, for the scale.

    random_states: one per rank.  parts: other state that determines the next step, by name.
    recipe_state: the recipe's own.  data_state: position of a streaming dataset.  next_batch:
    fingerprint per rank.
    """
    recipe, config = prepared.recipe, prepared.config
    return {
        "format": FORMAT,
        "recipe": recipe.name,
        "config": config.model_dump(mode="json"),
        "progress": progress._asdict()
        | {"applied": progress.step - progress.skipped + progress.retried},
        "parts": dict(parts),
        "modules": {name: module.state_dict() for name, module in prepared.modules.items()},
        "optimizers": {
            name: optimizer.state_dict() for name, optimizer in recipe.optimizers.items()
        },
        "recipe_state": _check_state(recipe_state),
        "data": _check_state(data_state, "Recipe.dataset.state_dict()"),
        "scaler": recipe.scaler.state_dict(),
        "random": random_states,
        "next_batch": next_batch,
        "environment": _environment(config, prepared.device),
    }


def restore(state: dict[str, Any], prepared: PreparedRecipe) -> tuple[Progress, list[str]]:
    """Restore a state; return its progress, and reasons why it may not continue bit-exactly.

    Raises CheckpointError if the state does not fit this recipe or configuration.
    """
    recipe, config, device = prepared.recipe, prepared.config, prepared.device
    rank, world_size = prepared.ranks.rank, prepared.ranks.world_size
    saved_config = _with_defaults(state["config"], config)
    if saved_config["training"]["fused"] != config.training.fused:
        # Accordingly, an optimizer's step counter is on the host or on the device.
        raise CheckpointError(
            f"the checkpoint was saved with training.fused {saved_config['training']['fused']}; "
            "set training.fused to the same value to resume"
        )
    try:
        for name, module in prepared.modules.items():
            module.load_state_dict(parts_of_module(state["modules"][name], module))
        for name, optimizer in recipe.optimizers.items():
            # Settings are taken from the configuration, which a fork may have changed.
            settings = [_settings(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(parts_of_optimizer(state["optimizers"][name], optimizer))
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update(own)
            for parameter, values in optimizer.state.items():
                optimizer.state[parameter] = in_memory(values)
            lay_out_as_weights(optimizer)
        if state.get("recipe_state"):
            recipe.load_state_dict(in_memory(state["recipe_state"]))
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint, of recipe {state['recipe']}, does not fit recipe {recipe.name} "
            f"as it is configured: {error}"
        ) from error
    _restore_scaler(recipe.scaler, state["scaler"])
    if len(state["random"]) == world_size:
        restore_random_state(state["random"][rank], device)

    now = _environment(config, device) | {"devices": world_size}
    before = state["environment"] | {"devices": len(state["random"])}
    notes = [
        f"{key} was {before.get(key)}, is {now[key]}" for key in now if before.get(key) != now[key]
    ]
    # Data-loading settings do not affect results, and initial weights no longer matter.
    both = saved_config, config.model_dump(mode="json")
    settled = ("data", "weights")
    then, today = ({k: v for k, v in group.items() if k not in settled} for group in both)
    notes += _differences(then, today)
    if not config.training.deterministic:
        notes.append("training.deterministic is off, so results may differ in the last bits")
    saved = state["progress"]
    return Progress(**{name: saved[name] for name in Progress._fields if name in saved}), notes


def in_memory(state: Any) -> Any:
    """Return a state independent of the checkpoint's file: host tensors are copied."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if tensor.is_cpu else tensor, state
    )


def random_state(device: torch.device) -> dict[str, object]:
    """Return the state of every global random generator that a recipe may use."""
    name, keys, position, has_gauss, cached = cast(_NumpyState, np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every global random generator to what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _check_state(state: object, place: str = "Recipe.state_dict()") -> object:
    """Return a recipe's state. Raises RecipeError for values that `weights_only=True` rejects."""
    if isinstance(state, dict):
        return {key: _check_state(value, f"{place}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_check_state(item, f"{place}[{i}]") for i, item in enumerate(state))
    if isinstance(state, torch.Tensor | bool | int | float | str | None):
        return state
    raise RecipeError(
        f"{place} is a {type(state).__name__}: keep tensors, numbers, strings, and lists and "
        "dicts of them, so that a checkpoint loads without running code"
    )


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    """Return a parameter group's settings, except the learning rate, which the schedule sets."""
    return {name: v for name, v in group.items() if name not in ("params", "lr", "initial_lr")}


def _restore_scaler(scaler: GradScaler, saved: dict[str, object]) -> None:
    """Restore scale and growth tracker; factors and interval come from the configuration."""
    own = scaler.state_dict()
    if not (own and saved):  # either is disabled, and its state is empty
        return
    # A tracker at or beyond the interval would never grow again: the kernel tests for equality.
    tracker = min(saved["_growth_tracker"], own["growth_interval"] - 1)
    scaler.load_state_dict(own | {"scale": saved["scale"], "_growth_tracker": tracker})


def _environment(config: RunConfig, device: torch.device) -> dict[str, object]:
    versions = machine.versions()
    if config.precision != "fp8" and config.training.rounding == "nearest":
        del versions["torchao"]  # installed but unused
    # str, because torch.__version__ is a class of its own that weights_only would refuse
    return {f"{name} version": version for name, version in versions.items()} | {
        "device": machine.device_name(device),
        "thread count": torch.get_num_threads(),
    }


def _with_defaults(saved: dict[str, object], config: RunConfig) -> dict[str, Any]:
    """Return a saved configuration with defaults for settings that are newer."""
    try:
        return type(config).model_validate(saved).model_dump(mode="json")
    except ValidationError:  # of another recipe, or with a removed setting
        return saved


def _differences(before: dict[str, object], now: dict[str, object], prefix: str = "") -> list[str]:
    notes = []
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            notes += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            notes.append(f"{prefix}{key} was {old}, is {new}")
    return sorted(notes)
