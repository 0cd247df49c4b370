"""Checkpointing: saves everything that decides the next step, and artifacts.

The loop waits while the state is copied, and for the previous save, of which there is one at a
time. A thread writes the copy to the disk and reports it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from msgspec.structs import replace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.telemetry.events import Checkpoint, CheckpointFile, Event
from trainer.checkpoints import checkpoint, state_files
from trainer.checkpoints.artifacts import save_artifacts
from trainer.checkpoints.background_writer import Writer
from trainer.checkpoints.checkpoint import Progress
from trainer.checkpoints.files import SavedFile
from trainer.checkpoints.snapshot import Snapshot, Staging, room
from trainer.data.batches import Batches
from trainer.distributed.shards import host_copy, host_mesh, is_shard, local
from trainer.prepared_recipe import PreparedRecipe

OTHER_BYTES = 2**20  # rest of a state without weights and optimizers, e.g. random generators
#: Reasons whose sharded saves become one file for users; others are only for resuming.
WHOLE = ("end", "cancel", "request")


Saved: TypeAlias = tuple[str, SavedFile]  # with its kind


class Stateful(Protocol):
    """A part of the loop whose state is checkpointed."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: plain tensors, numbers and containers."""


class Saver:
    """Saves checkpoints for all ranks: rank 0 writes, and others write their shards.

    As a context manager it exits once everything is on the disk. Errors of a write are raised by
    `check`, by the next save, or at the end.
    """

    def __init__(
        self,
        folder: Path | None,
        prepared: PreparedRecipe,
        batches: Batches,
        parts: Mapping[str, Stateful],
        on_event: Callable[[Event], None],
        artifact_folder: Path | None = None,
    ) -> None:
        """Create a saver.

        folder: of the checkpoints; None: save nothing.  artifact_folder: by default `artifacts` in
        it.
        parts: other state that determines the next step, by name.
        on_event: also called from another thread.
        """
        self._folder, self._prepared, self._batches, self._parts = folder, prepared, batches, parts
        self._artifact_folder = artifact_folder or (folder and folder / "artifacts")
        self._on_event, self._ranks = on_event, prepared.ranks
        self._staging, self._writer = Staging(prepared.device), Writer()
        modules = prepared.modules.values()
        parameters = (parameter for module in modules for parameter in module.parameters())
        self._is_sharded = any(is_shard(parameter) for parameter in parameters)
        self._writers: Any = None  # process group of the writer threads
        self._mesh: object = None
        if self._is_sharded:
            self._writers = self._ranks.another_group()
            self._mesh = host_mesh(self._writers)
        self._saves = folder is not None and (self._ranks.rank == 0 or self._is_sharded)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the current save. An error of the training takes precedence."""
        try:
            with suppress(*([Exception] if kind else [])):
                self._writer.wait()
        finally:
            self._writer.close()
            self._staging.close()
        if kind is None and self._folder is not None:
            self._ranks.gather(None)  # on the host, as in `save`

    def prepare(self) -> None:
        """Allocate the memory of the first save in the background, because that is slow.

        Call it after the first step, in which optimizers create their state.
        """
        if self._saves:
            weights = [module.state_dict() for module in self._prepared.modules.values()]
            optimizers = self._prepared.recipe.optimizers.values()
            moments = [optimizer.state_dict() for optimizer in optimizers]
            averages = self._parts["ema"].state_dict() if "ema" in self._parts else None
            leaves = tree_leaves([weights, moments, averages])
            own = [local(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            size_bytes = room(own) + OTHER_BYTES
            self._writer.begin(partial(self._staging.make_room, size_bytes))

    def check(self) -> None:
        """Raise the error of a finished write, such as a full disk. Does not wait."""
        self._writer.check()

    def save(
        self,
        progress: Progress,
        *,
        reason: str,
        request: int | None,
    ) -> None:
        """Copy the current state, and have the thread write and report it.

        The host waits for the device, whose queue is short, because the loop has drained it. The
        copies are queued.  request: id of the user's request, if any.
        """
        if self._folder is None:
            return
        started = time.perf_counter()
        gather = self._ranks.gather
        if self._saves:
            self._writer.wait()  # it reads the memory that this copy will overwrite
        random_states = gather(checkpoint.random_state(self._prepared.device))
        # Before the next batch is drawn.
        recipe_state = deepcopy(self._prepared.recipe.state_dict())
        next_batch = gather(self._batches.fingerprint())
        if self._saves:
            state = checkpoint.capture(
                self._prepared,
                progress,
                random_states,
                {name: part.state_dict() for name, part in self._parts.items()},
                recipe_state,
                self._batches.state,
                next_batch,
            )
            take, write = (self._staging.take, state_files.save)
            if self._is_sharded:
                take, write = self._take_shards, partial(self._write_shards, reason in WHOLE)
            snapshot = take(state)
            event = Checkpoint(
                step=progress.step,
                reason=reason,
                request=request,
                stall_seconds=time.perf_counter() - started,
                files=[],  # known once they are written
            )
            self._writer.begin(partial(self._write, write, self._folder, snapshot, event))
        gather(None)  # ranks wait on the host: a slow disk must not exceed NCCL's timeout

    def finish(self) -> None:
        """Wait until the current save of all ranks is on the disk. Raises its error."""
        self._writer.wait()
        self._ranks.gather(None)

    def save_artifacts(self, step: int, values: Mapping[str, object]) -> None:
        """Save artifacts and report them."""
        if self._artifact_folder is not None and self._ranks.rank == 0:
            for event in save_artifacts(self._artifact_folder, step, values):
                self._on_event(event)

    def _take_shards(self, state: Mapping[str, object]) -> Snapshot:
        """Copy this rank's shards; on rank 0 also the rest of the state."""
        from trainer.checkpoints.shard_files import cut

        rest, shards = cut(state)
        own = {name: local(shard) for name, shard in shards.items()}
        copy = self._staging.take((rest if self._ranks.rank == 0 else None, own))
        rest, own = copy.state
        copies = {name: host_copy(shards[name], own[name], self._mesh) for name in shards}
        return copy._replace(state=(state_files.stem(state), rest, copies))

    def _write_shards(self, is_whole: bool, folder: Path, state: Any) -> list[Saved]:
        """Write with the threads of all ranks; on rank 0, return the files."""
        from trainer.checkpoints import shard_files

        stem, rest, shards = state
        return shard_files.save(folder, stem, rest, shards, self._writers, is_whole=is_whole)

    def _write(
        self,
        write: Callable[[Path, Any], list[Saved]],
        folder: Path,
        snapshot: Snapshot,
        event: Checkpoint,
    ) -> None:
        """Write a checkpoint and report it; runs in the thread."""
        snapshot.wait()
        started = time.perf_counter()
        files = [_file(folder.parent, *entry) for entry in write(folder, snapshot.state)]
        seconds = time.perf_counter() - started
        self._on_event(replace(event, write_seconds=seconds, files=files))


def _file(run_folder: Path, kind: str, saved: SavedFile) -> CheckpointFile:
    return CheckpointFile(
        kind=kind,
        path=saved.path.relative_to(run_folder).as_posix(),
        size_bytes=saved.size_bytes,
        sha256=saved.sha256,
    )
