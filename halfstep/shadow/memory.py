"""Shadow values, by storage. This module imports torch."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.shadow.operations import OUTSIDE, Operation

#: The dtype of a shadow, by that of its tensor; other dtypes have shadows of their own dtype.
SHADOW_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
WRITERS_KEPT = 16
MOST_STORAGES = 1000  # of which something is kept
T = TypeVar("T")


class ByStorage(Generic[T]):
    """What is kept of storages, as long as they exist."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: int) -> T | None:
        """Return what is kept of a storage, by its `_cdata`."""
        found = self._kept.get(key)
        return None if found is None or found[0].expired() else found[1]  # type: ignore[no-untyped-call]

    def add(self, storage: StorageWeakRef, kept: T) -> None:
        """Keep something of a storage, unless there are too many."""
        if len(self._kept) >= MOST_STORAGES:
            self._kept = {
                key: each
                for key, each in self._kept.items()
                if not each[0].expired()  # type: ignore[no-untyped-call]
            }
        if len(self._kept) < MOST_STORAGES:
            self._kept[storage.cdata] = storage, kept

    def drop(self, key: int) -> None:
        """Forget a storage."""
        self._kept.pop(key, None)


class OutOfMemory(RuntimeError):
    """The shadows of a step need more than their budget."""


@dataclass(slots=True)
class Entry:
    """Facts about a storage in this step."""

    storage: StorageWeakRef
    dtype: torch.dtype
    values: Tensor | None = None  # (elements of the storage,); None: they equal the actual ones
    writers: list[Operation] = field(default_factory=list)
    is_suspect: bool = False  # some element is nonfinite: look again at each use
    is_unread: bool = False  # older than the step, and so large that only parts were read
    power: float | None = 0  # of the loss scale; see scale.py
    is_of_scale: bool = False  # a value that depends on the scale has led to it

    def has_expired(self) -> bool:
        """Return whether the storage no longer exists."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def distance(self) -> tuple[float, float]:
        """Return the distance of a tensor from its shadow, and the shadow's norm."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None or self.values is None:
            return 0.0, 0.0
        actual = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage)
        if actual.shape != self.values.shape:  # resized
            return 0.0, 0.0
        shadow = self.values.double()
        return float((actual.double() - shadow).norm()), float(shadow.norm())

    def is_unread_bytes(self) -> bool:
        """Return whether it was only seen as bytes or integers, as by a copy of a storage."""
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        return not is_number and [writer.name for writer in self.writers] == [OUTSIDE]

    def record_write(self, operation: Operation) -> None:
        """Record a change in place; of many the ones that wrote something wrong are kept."""
        kept = self.writers
        if len(kept) >= WRITERS_KEPT:
            oldest = next((i for i, writer in enumerate(kept) if writer.result is None), 0)
            kept = [*kept[:oldest], *kept[oldest + 1 :]]
        self.writers = [*kept, operation]


class ShadowMemory:
    """The shadows of one step.

    A storage without a shadow equals its actual values, so the weights and everything in an fp32
    loop need none. Views share the shadow of their storage.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.entries: dict[int, Entry] = {}
        self.budget, self._allocated = budget_bytes, 0

    def find(self, tensor: Tensor) -> Entry | None:
        """Return what is known of a tensor's storage; None if it is new in this step."""
        entry = self.entries.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry.has_expired() else entry

    def add(self, tensor: Tensor) -> Entry:
        """Return a new entry for a tensor's storage."""
        storage = tensor.untyped_storage()
        entry = Entry(StorageWeakRef(storage), tensor.dtype)  # type: ignore[no-untyped-call]
        self.entries[storage._cdata] = entry
        return entry

    def shadow(self, tensor: Tensor, entry: Entry) -> Tensor:
        """Return a tensor's shadow: the tensor itself, in fp32, where it has none."""
        values = entry.values
        if values is not None:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            if entry.dtype == tensor.dtype and values.numel() == elements:
                return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            self._drop(entry)  # viewed as another dtype, or resized
        dtype = SHADOW_DTYPES.get(tensor.dtype)
        return tensor if dtype is None else tensor.to(dtype)

    def has_shadow(self, tensor: Tensor) -> bool:
        """Return whether a tensor may differ from its shadow."""
        entry = self.find(tensor)
        return entry is not None and entry.values is not None

    def materialize(self, tensor: Tensor, entry: Entry) -> None:
        """Give a storage a shadow of its own, before an operator changes a part of it."""
        self.shadow(tensor, entry)
        if entry.values is None:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            dtype = SHADOW_DTYPES.get(tensor.dtype, tensor.dtype)
            self._keep(entry, tensor.dtype, whole.to(dtype, copy=True))

    def assign(self, tensor: Tensor, entry: Entry, shadow: Tensor) -> None:
        """Set the shadow of a tensor that an operator has just made."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        is_alike = (
            shadow.stride() == tensor.stride()
            and shadow.storage_offset() == tensor.storage_offset() == 0
            and shadow.untyped_storage().nbytes() == elements * shadow.element_size()
        )
        if is_alike:
            values = shadow.as_strided((elements,), (1,), 0)
        else:
            values = torch.zeros(elements, dtype=shadow.dtype, device=shadow.device)
            values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(shadow)
        self._keep(entry, tensor.dtype, values)

    def forget(self, tensor: Tensor) -> None:
        """Let a tensor's storage equal its actual values from now on."""
        if (entry := self.find(tensor)) is not None:
            self._drop(entry)

    def restore(self, entry: Entry) -> None:
        """Keep an entry of the step before."""
        self.entries[entry.storage.cdata] = entry
        self._allocated += 0 if entry.values is None else entry.values.nbytes

    def purge(self) -> None:
        """Drop the shadows of storages that no longer exist."""
        for key in [key for key, entry in self.entries.items() if entry.has_expired()]:
            self._drop(self.entries.pop(key))

    def clear(self) -> None:
        """Drop everything."""
        self.entries.clear()
        self._allocated = 0

    def _keep(self, entry: Entry, dtype: torch.dtype, values: Tensor) -> None:
        self._drop(entry)
        self._allocated += values.nbytes
        if self._allocated > self.budget:
            self.purge()
        if self._allocated > self.budget:
            raise OutOfMemory(f"shadow values need more than {self.budget:,} bytes")
        entry.dtype, entry.values = dtype, values

    def _drop(self, entry: Entry) -> None:
        if entry.values is not None:
            self._allocated -= entry.values.nbytes
            entry.values = None
