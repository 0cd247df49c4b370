"""A copy of a run's state at a step boundary, in host memory, while training continues.

Everything mutable is copied. Of tensors the copies are by storage, so that what shares memory, tied
weights say, shares it in the copy too, and a file made of it is the same to the last byte. On CUDA
the copies are queued behind the work before them and ahead of what changes the weights next: the
host waits for neither. On a CPU the next step writes in place, so the copy is made at once.

torch.distributed.checkpoint has stagers: docs/decisions/0011 says why this is not one of them.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Key: TypeAlias = tuple[torch.device, int, int]  # of a storage: where it lies, and its bytes
ALIGNMENT = 64  # bytes: a cache line, and enough for every type


class Snapshot(NamedTuple):
    """A copy of a state, once `wait` has returned. It is good until the next one is taken."""

    state: Any
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the copies that are queued on the device: for the thread that writes."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Staging:
    """The memory that snapshots are made in, one at a time: as much as the state, and kept.

    Copying to memory that has been used is several times as fast as to new memory, and pinning
    takes longer than copying. On CUDA it is pinned by cudaHostRegister, because torch's own pinned
    memory comes in powers of two: up to twice the state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, device.type == "cuda"
        self._is_registered = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def make_room(self, size_bytes: int) -> None:
        """Have this much memory at least, touched and pinned."""
        if self._memory.numel() >= size_bytes:
            return
        self.close()  # first, so that there are never two of them
        self._memory = torch.empty(size_bytes, dtype=torch.uint8).zero_()
        if self._is_pinned:
            # Refused, in a container say: the copies then hold the loop up, and are as good.
            self._is_registered = self._call_cuda(
                "cudaHostRegister", self._memory.data_ptr(), size_bytes, 0
            )

    def take(self, state: Any) -> Snapshot:
        """Copy a state of containers, numbers and tensors, over the snapshot before."""
        tensors = [leaf for leaf in tree_leaves(state) if _is_plain(leaf)]
        sources = list(_storages(tensors))
        self.make_room(_room_of(sources))
        memory, start = self._memory.numpy(), 0
        places: dict[Key, Tensor] = {}
        for source in sources:
            size = source.numel()
            # A tensor of its own over this part: as a view it would be saved with all the rest.
            place = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            place.copy_(source, non_blocking=True)
            places[_key(source)] = place
            start += _aligned(size)
        copies = {id(tensor): _like(tensor, places.get(_key(tensor))) for tensor in tensors}
        copied = deepcopy(state, copies)  # which has them already
        arrived = None
        if self._is_pinned:
            # blocking: who waits for it sleeps, instead of spinning on a core.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
        return Snapshot(copied, arrived)

    def close(self) -> None:
        """Give the memory back."""
        if self._is_registered:
            self._call_cuda("cudaHostUnregister", self._memory.data_ptr())
            self._is_registered = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _call_cuda(self, name: str, *arguments: int) -> bool:
        """Call the runtime, and tell whether it did."""
        with torch.cuda.device(self._device):  # each thread has a current one of its own
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(getattr(runtime, name)(*arguments)) == 0


def room(state: Any) -> int:
    """Return how many bytes a snapshot of this state takes."""
    return _room_of(_storages([leaf for leaf in tree_leaves(state) if _is_plain(leaf)]))


def _room_of(sources: Iterable[Tensor]) -> int:
    return sum(_aligned(source.numel()) for source in sources)


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is memory and strides; what else there is, sparse ones say, copies itself."""
    return (
        type(leaf) is Tensor
        and leaf.layout == torch.strided
        and not (leaf.requires_grad or leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)
    )


def _storages(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each storage once, where it lies."""
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
    """Return the tensor as it is, but in this place; without memory it needs none."""
    if place is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype).set_(
        place.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
