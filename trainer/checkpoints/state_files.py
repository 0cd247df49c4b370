"""Files of a checkpoint: its state as .pt, and the weights of each module as .safetensors."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainer.checkpoints.files import SavedFile, write_whole
from trainer.checkpoints.weights import write_weights

Make: TypeAlias = Callable[..., torch.Tensor]  # called with size and dtype


def save(folder: Path, state: dict[str, object]) -> list[tuple[str, SavedFile]]:
    """Save a state as .pt, and each module's weights as .safetensors.

    Returns the files with their kinds; names have the step.  state: in host memory.
    """
    return [save_state(folder, state), *save_weights(folder, state)]


def save_state(folder: Path, state: dict[str, object]) -> tuple[str, SavedFile]:
    """Save a state as .pt."""
    folder.mkdir(parents=True, exist_ok=True)
    return "checkpoint", write_whole(folder / f"{stem(state)}.pt", partial(torch.save, state))


def save_weights(folder: Path, state: Mapping[str, Any]) -> list[tuple[str, SavedFile]]:
    """Save each module's weights.

    Names are those in the module itself, and tied weights are stored twice, so that any loader
    finds them all. With several modules there is a file for each:
    step-00000400.generator.safetensors. Averaged weights are in files of their own, with the
    module's buffers: step-00000400.ema.safetensors.
    """
    saved = []
    averages = state["parts"].get("ema", {}).get("weights", {})
    for name, weights in state["modules"].items():
        suffix = f".{name}" if len(state["modules"]) > 1 else ""
        of_kinds = {"weights": weights}
        if name in averages:
            of_kinds["ema"] = weights | averages[name]
        for kind, values in of_kinds.items():
            ending = ".ema" if kind == "ema" else ""
            path = folder / f"{stem(state)}{suffix}{ending}.safetensors"
            saved.append((f"{kind}{suffix}", write_whole(path, partial(write_weights, values))))
    return saved


def weights_alone(state: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of a state that `save_weights` reads."""
    averages = {name: part for name, part in state["parts"].items() if name == "ema"}
    return {"progress": state["progress"], "modules": state["modules"], "parts": averages}


def stem(state: Mapping[str, Any]) -> str:
    """Return the prefix of a state's file names, also the name of its folder of shards."""
    return f"step-{state['progress']['step']:08d}"
