"""When a run saves: a checkpoint of everything that decides the next step, and artifacts."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from halfstep.spool import Event
from trainer import checkpoint
from trainer.artifacts import save_artifacts
from trainer.batches import Batches
from trainer.checkpoint import Progress
from trainer.files import SavedFile
from trainer.ranks import Ranks


class Stateful(Protocol):
    """A part of the loop that counts on after a resume."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: plain tensors, numbers and containers."""


class Saver:
    """Saves for all ranks: rank 0 writes, the others say what is theirs."""

    def __init__(
        self,
        folder: Path | None,
        recipe: Recipe,
        modules: Mapping[str, nn.Module],
        batches: Batches,
        config: RunConfig[Any],
        device: torch.device,
        ranks: Ranks,
        parts: Mapping[str, Stateful],
        on_event: Callable[[Event], None],
    ) -> None:
        """folder: of the checkpoints; None saves nothing.  modules: without wrappers.

        parts: what else decides the next step, by name.
        """
        self._folder, self._recipe, self._modules, self._config = folder, recipe, modules, config
        self._batches = batches
        self._device, self._ranks, self._parts = device, ranks, parts
        self._on_event = on_event

    def save(
        self,
        progress: Progress,
        *,
        reason: str,
        request: int | None,
    ) -> None:
        """Save a checkpoint and tell of it; the host waits for the device, and for the disk.

        request: the wish that this fulfils.
        """
        if self._folder is None:
            return
        gather = self._ranks.gather
        random_states = gather(checkpoint.random_state(self._device))
        recipe_state = deepcopy(self._recipe.state_dict())  # before the next batch is drawn
        next_batch = gather(self._batches.fingerprint())
        if self._ranks.rank == 0:
            state = checkpoint.capture(
                self._recipe,
                self._modules,
                self._config,
                progress,
                self._device,
                random_states,
                {name: part.state_dict() for name, part in self._parts.items()},
                recipe_state,
                next_batch,
            )
            saved = checkpoint.save(self._folder, state, self._modules)
            event = {"event": "checkpoint", "step": progress.step, "reason": reason}
            self._on_event(event | {"request": request, "files": list(map(_file, saved))})
        gather(None)  # the others wait on the host: a slow disk must not outlast NCCL's patience

    def save_artifacts(self, step: int, found: Mapping[str, bytes | str]) -> None:
        """Save what the recipe made to look at, and tell of it."""
        if self._folder is not None and self._ranks.rank == 0:
            for event in save_artifacts(self._folder.parent / "artifacts", step, found):
                self._on_event(event)


def _file(saved: SavedFile) -> dict[str, Any]:
    _step, *module, suffix = saved.path.name.split(".")  # a module's name has no dot in it
    return {
        "kind": ".".join(["weights", *module]) if suffix == "safetensors" else "checkpoint",
        "path": f"{saved.path.parent.name}/{saved.path.name}",
        "size_bytes": saved.size_bytes,
        "sha256": saved.sha256,
    }
