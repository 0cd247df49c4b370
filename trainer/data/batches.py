"""Micro-batches of each step, and the check that a resumed run sees the same ones.

A recipe that uses the given indices continues with the same examples wherever it is resumed.
Whether it does is not visible: a recipe with its own loader and order looks the same. So a
checkpoint contains a fingerprint of the next batch, which a resumed run compares. That batch is
drawn once: the step after the checkpoint uses it.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from trainer.data.loader import Source
from trainer.data.sampler import Sampler

ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")


@dataclass(frozen=True)
class _Ahead:
    """A step with its first micro-batch already drawn."""

    first: Any
    others: Iterator[Any]
    position: int  # start of the step
    state: Any  # of a stream, before the step


class Batches:
    """Draws the sampler's batches, at most one micro-batch ahead."""

    def __init__(self, sampler: Sampler, source: Source, again: Source | None) -> None:
        """again: draws past batches again, without affecting the source."""
        self._sampler, self._source, self._again = sampler, source, again
        self._ahead: _Ahead | None = None
        self.waited_seconds = 0.0  # for the step drawn last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @property
    def position(self) -> int:
        """Start of the next step, in examples of the sampler's stream."""
        return self._sampler.position if self._ahead is None else self._ahead.position

    @property
    def state(self) -> Any:
        """State of a streaming dataset before the next step, for a checkpoint."""
        return self._source.state if self._ahead is None else self._ahead.state

    @property
    def examples_in_a_step(self) -> int:
        """Number of examples per step, over all ranks."""
        return self._sampler.examples_in_a_step

    def seek(self, position: int, state: Any = None) -> None:
        """Set the start of the next step, and the state of a stream."""
        self._sampler.position, self._ahead = position, None
        self._source.load_state(state)

    def step(self) -> Iterator[Any]:
        """Yield the micro-batches of the next step, each drawn on demand."""
        self.waited_seconds = 0.0
        if self._ahead is None:
            yield from self._drawn()
            return
        first, others = self._ahead.first, self._ahead.others
        self._ahead = None
        yield first
        del first  # one micro-batch at a time is in memory
        yield from others

    @property
    def can_be_repeated(self) -> bool:
        """Whether a step's micro-batches can be drawn again: not those of a stream."""
        return self._again is not None

    def again(self, position: int) -> Iterator[object]:
        """Yield the micro-batches of the step that begins at a position, without moving."""
        if self._again is None:
            raise ValueError("batches of a stream cannot be drawn again")
        return map(self._again.take, self._sampler.starts_in(position))

    def fingerprint(self) -> str:
        """Draw the next step's first micro-batch; return 16 hexadecimal digits of its content.

        The host waits for the device if the batch is there.
        """
        if self._ahead is None:
            position, state, drawn = self._sampler.position, self._source.state, self._drawn()
            self._ahead = _Ahead(next(drawn), drawn, position, state)
        return fingerprint(self._ahead.first)

    def _drawn(self) -> Iterator[object]:
        for start in self._sampler.starts():
            started = time.perf_counter()
            batch = self._source.take(start)
            self.waited_seconds += time.perf_counter() - started
            yield batch
            del batch


def fingerprint(batch: Any) -> str:
    """Return a 64-bit hash of a batch: tensors by bytes, dtype and shape, other leaves by repr."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            content = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
        else:
            text = ADDRESS.sub("", repr(leaf))  # addresses differ between processes
            digest.update(f"{type(leaf).__name__} {text} ".encode())
    return digest.hexdigest()
