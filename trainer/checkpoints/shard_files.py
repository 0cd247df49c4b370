"""Sharded checkpoints by torch.distributed.checkpoint: each rank writes its shards.

A folder has a file per rank and `.metadata`, the index; torch's own tools read it. The rest is in a
.pt next to the folder, in which names replace the tensors. A reader loads the needed part of each
tensor, so the number of ranks may change.
"""

import mmap
import os
import pickle
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from trainer.checkpoints import state_files
from trainer.checkpoints.files import (
    PIECE_BYTES,
    HashingFile,
    SavedFile,
    disk_full,
    publish,
    sync_folder,
    write_whole,
)
from trainer.checkpoints.state_files import Make
from trainer.distributed.shards import is_shard, local

#: Placeholder of a sharded tensor in a state: {STANDS_FOR: its name}.
STANDS_FOR = "tensor in shards"
ALIGNMENT = 64  # bytes: a cache line, and enough for every type
#: Classes allowed in `.metadata`, a pickle, which could otherwise run code.
PLAIN = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata "
        "_MEM_FORMAT_ENCODING"
    ),
}


def save(
    folder: Path,
    stem: str,
    state: dict[str, object],
    shards: Mapping[str, Tensor],
    group: ProcessGroup,
    *,
    is_whole: bool,
) -> list[tuple[str, SavedFile]]:
    """Save a cut state, sharded or whole; rank 0 returns the files with their kinds.

    All ranks call it.  stem: prefix of the file names.  state: only on rank 0.
    Weights are saved whole in either case.
    """
    parts = folder / f".{stem}.partial"
    try:
        files = write(parts, shards, group)
        if group.rank() > 0:
            return []
        scratch = Scratch(folder)
        if is_whole:
            return state_files.save(folder, fill(state, parts, scratch.make))
        _publish(parts, folder / stem)
    finally:
        if group.rank() == 0:
            shutil.rmtree(parts, ignore_errors=True)
    files = [file._replace(path=folder / stem / file.path.name) for file in files]
    names = {"shards": {file.path.name: file.sha256 for file in files}}
    saved = state_files.save_state(folder, state | names)
    weights = fill(state_files.weights_alone(state), folder / stem, scratch.make)
    kinds = [(_kind(file), file) for file in files]
    return [saved, *kinds, *state_files.save_weights(folder, weights)]


def cut(state: object) -> tuple[object, dict[str, Tensor]]:
    """Return a state with placeholders instead of shards, and the shards by name.

    Tied shards have one name. Only containers are copied.
    """
    names: dict[int, str] = {}  # by storage
    shards: dict[str, Tensor] = {}
    places: dict[int, object] = {}
    for path, leaf in tree_flatten_with_path(state)[0]:
        if is_shard(leaf):
            own = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            name = names.setdefault(local(leaf).untyped_storage()._cdata, own)
            shards.setdefault(name, leaf)
            places[id(leaf)] = {STANDS_FOR: name}
        elif isinstance(leaf, Tensor):
            places[id(leaf)] = leaf
    return deepcopy(state, places), shards


def fill(state: object, folder: Path, make: Make) -> Any:
    """Return a state with the placeholders replaced by tensors from a folder.

    make: creates an empty tensor; of a shard only this rank's part is read.
    Raises KeyError, OSError or UnpicklingError if the folder does not match the state.
    """
    stand_ins = [leaf for leaf in tree_leaves(state, is_leaf=_stands_for) if _stands_for(leaf)]
    reader = _Reader(folder)
    metadata: Any = reader.read_metadata()
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(stand_in[STANDS_FOR] for stand_in in stand_ins):
        stored = metadata.state_dict_metadata[name]
        tensors[name] = make(stored.size, dtype=stored.properties.dtype)
    # Same as torch.distributed.checkpoint.load, without communication between ranks.
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(_with_elements(tensors)), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    places = {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}
    return deepcopy(
        state, places | {id(stand_in): tensors[stand_in[STANDS_FOR]] for stand_in in stand_ins}
    )


class Scratch:
    """Whole tensors in an unnamed file in a folder, instead of a rank's memory."""

    def __init__(self, folder: Path) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 (deleted with the last tensor)
        self._end = 0

    def make(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor. Raises OSError if the disk has no space for it."""
        size_bytes = size.numel() * dtype.itemsize
        if not size_bytes:
            return torch.empty(size, dtype=dtype)
        start = self._end
        self._end += -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # Writing to a page without disk space would kill the process with SIGBUS.
        os.posix_fallocate(self._file.fileno(), start, self._end - start)
        memory = mmap.mmap(self._file.fileno(), size_bytes, offset=start)
        return torch.frombuffer(memory, dtype=dtype).view(size)


def write(folder: Path, shards: Mapping[str, Tensor], group: ProcessGroup) -> list[SavedFile]:
    """Write this rank's part of shards in host memory; return all ranks' files.

    All ranks call it; afterwards rank 0's folder has all files. A rank on another machine writes to
    its own disk, and sends its file.  group: of the writer threads, one per rank.
    """
    rank = group.rank()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    # Also waits until rank 0's folder exists.
    places = _gather((socket.gethostname(), str(folder)), group)
    writer = _Writer(folder)
    save_shards(dict(_with_elements(shards)), storage_writer=writer, process_group=group)
    files = _gather(writer.list_saved(), group)
    for other, place in enumerate(places):
        if place == places[0]:
            continue
        if rank == 0:
            for file in files[other]:
                write_whole(folder / file.path.name, partial(_receive, file, other, group))
        elif rank == other:
            for file in files[other]:
                _send(file.path, group)
            shutil.rmtree(folder)
    return [file._replace(path=folder / file.path.name) for of_rank in files for file in of_rank]


def _publish(partial_folder: Path, folder: Path) -> None:
    """Rename a folder with synced files to its final name; replaces an existing one."""
    sync_folder(partial_folder)
    shutil.rmtree(folder, ignore_errors=True)
    publish(partial_folder, folder)


def _kind(file: SavedFile) -> str:
    """Return shard.0 for __0_0.distcp, shard.metadata for .metadata."""
    return f"shard.{file.path.name.strip('_.').partition('_')[0]}"


class _Writer(FileSystemWriter):
    """Writer that hashes its files, and stores no local paths in the metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._files = _HashingFiles()

    def storage_meta(self) -> StorageMeta | None:
        return None

    def list_saved(self) -> list[SavedFile]:
        """Return the files that this rank has written."""
        files = []
        for path, file in self._files.written.items():
            # torch.distributed.checkpoint renames `.metadata.tmp` at the end.
            final = path.with_name(path.name.removesuffix(".tmp"))
            files.append(SavedFile(final, final.stat().st_size, file.sha256.hexdigest()))
        return files


class _HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[Path, HashingFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            self.written[Path(path)] = hashing = HashingFile(file)
            yield hashing
            try:
                hashing.check()
            except OSError as error:
                raise disk_full(Path(path), hashing.size_bytes) from error


class _Reader(FileSystemReader):
    """Reader of `.metadata` that cannot run code."""

    def read_metadata(self) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _PlainUnpickler(file).load()
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in PLAIN.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in the metadata of shards")


def _stands_for(leaf: object) -> bool:
    return isinstance(leaf, dict) and leaf.keys() == {STANDS_FOR}


def _with_elements(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of which this rank has elements: a weight may have fewer rows than ranks."""
    return ((name, tensor) for name, tensor in tensors.items() if local(tensor).numel())


def _gather(value: object, group: ProcessGroup) -> list[Any]:
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _send(path: Path, group: ProcessGroup) -> None:
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), dst=0, group=group)


def _receive(saved: SavedFile, rank: int, group: ProcessGroup, file: BinaryIO) -> None:
    left = saved.size_bytes
    while left:
        chunk = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
        dist.recv(chunk, src=rank, group=group)
        file.write(chunk.numpy().data)
        left -= chunk.numel()
