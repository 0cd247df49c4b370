"""Changes of half-precision tensors that are rounded away. This module imports torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.diagnosis.defect import Defect
from halfstep.shadow.classify import site_of
from halfstep.shadow.memory import ByStorage, Entry, ShadowMemory
from halfstep.shadow.operations import OUTSIDE, Operation, Place
from halfstep.shadow.operators import is_half, is_readable, tensors_in
from halfstep.shadow.walk import find_emptying_overflow

#: A change in place is rounded away if in fp32 it moves at least the first share of elements, and
#: at most the second share of it is left, as the part of the change in its own direction.
MOVED, LEFT = 0.5, 0.5
SMALLEST_UPDATE = 1e-5  # of a weight, relative to it
SMALLEST_DECAY = 1e-4  # of a step, relative to the weight
REST_DIFFERS = 0.1  # relative distance of a kept rest that is rounded itself


@dataclass(slots=True)
class Lasting:
    """A half-precision tensor before and after the changes of a step."""

    tensor: Tensor
    entry: Entry
    before: Tensor
    shadow_before: Tensor
    source: StorageWeakRef | None  # of which the first change is a copy
    lost_write: Operation | None = None  # the first change, if nothing of it has arrived

    def is_lost(self, memory: ShadowMemory) -> bool:
        """Return whether the changes were rounded away, and nothing else holds the result."""
        is_copy = self.source is not None and not self.source.expired()  # type: ignore[no-untyped-call]
        if is_copy or not self._can_be_compared():
            return False
        expected = self._compute_expected(memory)
        if int(torch.count_nonzero(expected)) <= MOVED * self.tensor.numel():
            return False
        return float((self._change() * expected).sum()) <= LEFT * float(expected.square().sum())

    def record_write(self, written: Operation, memory: ShadowMemory) -> None:
        """Keep the first change if it leaves the tensor as it was, unlike in fp32.

        What is copied to it has all of it.
        """
        is_kept = self.source is not None or not self._can_be_compared()
        if not is_kept and torch.equal(self.tensor, self.before):
            lost = float(self._compute_expected(memory).norm())
            if lost > SMALLEST_DECAY * float(self.shadow_before.norm()):
                self.lost_write = written

    def keeps_rest_of(self, other: "Lasting", memory: ShadowMemory) -> bool:
        """Return whether this tensor is what the change of another has lost, as in Kahan's sum."""
        is_alike = other is not self and self.tensor.shape == other.tensor.shape
        if not (is_alike and self._can_be_compared() and other._can_be_compared()):
            return False
        rest, kept = other._compute_expected(memory) - other._change(), self.tensor.double()
        error = min(float((kept - sign * rest).norm()) for sign in (1, -1))
        return error < REST_DIFFERS * float(rest.norm())

    def _can_be_compared(self) -> bool:
        return self.entry.values is not None and is_readable(self.tensor)

    def _change(self) -> Tensor:
        return self.tensor.double() - self.before.double()

    def _compute_expected(self, memory: ShadowMemory) -> Tensor:
        """Return the change in fp32."""
        return (memory.shadow(self.tensor, self.entry) - self.shadow_before).double()


def keep_lasting(
    lasting: dict[int, Lasting],
    memory: ShadowMemory,
    written: Iterable[tuple[Tensor, Entry]],
    copied: object,
) -> list[Lasting]:
    """Copy half-precision tensors that are older than the step, before their first change.

    lasting: gets them, by the id of the entry.  copied: what is copied to them, if that is the
    change.  Returns the new ones.
    """
    kept = []
    for tensor, entry in written:
        is_new = entry.writers[0].name != OUTSIDE or id(entry) in lasting
        if is_half(tensor) and tensor.numel() and not is_new:
            shadow = memory.shadow(tensor, entry).clone()
            sources = [part.untyped_storage() for part in tensors_in(copied) if is_readable(part)]
            source = StorageWeakRef(sources[0]) if sources else None  # type: ignore[no-untyped-call]
            lasting[id(entry)] = Lasting(tensor, entry, tensor.clone(), shadow, source)
            kept.append(lasting[id(entry)])
    return kept


def find_lost_updates(
    changed: Sequence[Lasting], memory: ShadowMemory, halved: ByStorage[Place], step: int
) -> Iterator[Defect]:
    """Yield the tensors whose changes in a step were rounded away, and kept nowhere else.

    halved: where tensors were cast to half precision.
    """
    for lasting in changed:
        written = lasting.entry.writers[-1] if lasting.is_lost(memory) else lasting.lost_write
        if written is not None and not any(
            other.keeps_rest_of(lasting, memory) or lasting.keeps_rest_of(other, memory)
            for other in changed
        ):
            cast = halved.find(lasting.entry.storage.cdata)
            yield Defect(
                step=step,
                kind="update_lost",
                symptom="weight",
                site=site_of(written),
                origin=None if cast is None else site_of(Operation(0, "", place=cast)),
                dtype=str(lasting.tensor.dtype).removeprefix("torch."),
                elements=lasting.tensor.numel(),
                helps=("fp32",),
            )


def find_emptied_update(
    weights: Iterable[Tensor], memory: ShadowMemory
) -> tuple[Operation, Operation] | None:
    """Return an overflow by which the update of a weight is 0, and is not in fp32.

    With the operation whose result it makes 0.
    """
    for weight in weights:
        entry = memory.find(weight)
        found = None if entry is None else find_emptying_overflow(entry.writers[-1])
        if entry is not None and found is not None:  # only then the host reads the weight
            distance, size = entry.distance()
            if distance > SMALLEST_UPDATE * size:
                return found
    return None
