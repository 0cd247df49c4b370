"""Copies a run's state at a step boundary to host memory while training continues.

Everything mutable is copied. Tensors are copied by storage, so tensors that share memory, such as
tied weights, share it in the copy, and a file made of it is identical. On CUDA the copies are
queued after earlier work and before the next change of the weights: the host waits for neither. On
a CPU the next step writes in place, so the copy is made at once.

docs/decisions/0004-background-saves.md has the reasons against torch's own stagers.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Key: TypeAlias = tuple[torch.device, int, int]  # of a storage: device, address and size
ALIGNMENT = 64  # bytes: a cache line, and enough for every type


class Snapshot(NamedTuple):
    """A copy of a state, complete once `wait` has returned. Valid until the next snapshot."""

    state: Any
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the copies queued on the device; called by the writer thread."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Staging:
    """Reusable host memory for snapshots, one at a time, as large as the state.

    Copying to used memory is several times as fast as to new memory, and pinning takes longer than
    copying. On CUDA the memory is pinned by cudaHostRegister, because torch's own pinned memory
    comes in powers of two: up to twice the state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, device.type == "cuda"
        self._is_registered = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def make_room(self, size_bytes: int) -> None:
        """Ensure that at least this much memory is allocated, touched and pinned."""
        if self._memory.numel() >= size_bytes:
            return
        self.close()  # first, so that there are never two
        self._memory = torch.empty(size_bytes, dtype=torch.uint8).zero_()
        if self._is_pinned:
            # May be refused, e.g. in a container: then the copies block the loop, but are as good.
            self._is_registered = self._call_cuda(
                "cudaHostRegister", self._memory.data_ptr(), size_bytes, 0
            )

    def take(self, state: Any) -> Snapshot:
        """Copy a state of containers, numbers and tensors; overwrites the previous snapshot."""
        tensors = [leaf for leaf in tree_leaves(state) if _is_plain(leaf)]
        sources = list(_storages(tensors))
        self.make_room(_room_of(sources))
        memory, start = self._memory.numpy(), 0
        places: dict[Key, Tensor] = {}
        for source in sources:
            size = source.numel()
            # A tensor of its own for this part: a view would be saved with the whole buffer.
            place = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            place.copy_(source, non_blocking=True)
            places[_key(source)] = place
            start += _align(size)
        copies = {id(tensor): _like(tensor, places.get(_key(tensor))) for tensor in tensors}
        copied = deepcopy(state, copies)  # reuses these copies
        arrived = None
        if self._is_pinned:
            # blocking: a waiting thread sleeps instead of spinning.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
        return Snapshot(copied, arrived)

    def close(self) -> None:
        """Free the memory."""
        if self._is_registered:
            self._call_cuda("cudaHostUnregister", self._memory.data_ptr())
            self._is_registered = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _call_cuda(self, name: str, *arguments: int) -> bool:
        """Call a function of the CUDA runtime; return whether it succeeded."""
        with torch.cuda.device(self._device):  # the current device is per thread
            runtime: object = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(getattr(runtime, name)(*arguments)) == 0


def room(state: object) -> int:
    """Return the size of a snapshot of this state, in bytes."""
    return _room_of(_storages([leaf for leaf in tree_leaves(state) if _is_plain(leaf)]))


def _room_of(sources: Iterable[Tensor]) -> int:
    return sum(_align(source.numel()) for source in sources)


def _is_plain(leaf: object) -> bool:
    """Return whether a leaf is strided memory; others, e.g. sparse ones, are deep-copied."""
    return (
        type(leaf) is Tensor
        and leaf.layout == torch.strided
        and not (leaf.requires_grad or leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)
    )


def _storages(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each storage once, on its device."""
    seen: set[Key] = set()
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() and _key(tensor) not in seen:
            seen.add(_key(tensor))
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                tensor.untyped_storage()
            )


def _key(tensor: Tensor) -> Key:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _like(tensor: Tensor, place: Tensor | None) -> Tensor:
    """Return a tensor with the same layout in other memory; without memory an empty one."""
    if place is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype).set_(
        place.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
