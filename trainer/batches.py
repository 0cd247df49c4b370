"""The micro-batches of each step, and the evidence that a resumed run sees the same ones.

A recipe that follows the indices that it is given goes on with the same examples wherever it is
resumed. Whether it does cannot be read off it: a loader of its own with its own order looks the
same. So a checkpoint holds a fingerprint of the batch that came next, and a resumed run compares.
That batch is drawn once: the step that follows the checkpoint takes it.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.recipe import Recipe
from trainer.sampler import Sampler

ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")


class Batches:
    """Draws what the sampler says, at most one micro-batch before it is wanted."""

    def __init__(self, recipe: Recipe, sampler: Sampler) -> None:
        self._recipe, self._sampler = recipe, sampler
        self._ahead: tuple[Any, Iterator[Any], int] | None = None
        self.waited_seconds = 0.0  # for the data of the step drawn last

    @property
    def position(self) -> int:
        """Where the next step begins, in examples of the sampler's stream."""
        return self._sampler.position if self._ahead is None else self._ahead[2]

    def go_on_at(self, position: int) -> None:
        """Begin the next step here."""
        self._sampler.position, self._ahead = position, None

    def step(self) -> Iterator[Any]:
        """Yield the micro-batches of the next step, each drawn when it is asked for."""
        self.waited_seconds = 0.0
        if self._ahead is None:
            yield from self._drawn()
            return
        first, others, _position = self._ahead
        self._ahead = None
        yield first
        del first  # one micro-batch at a time is in memory
        yield from others

    def fingerprint(self) -> str:
        """Draw the next step's first micro-batch; return 16 hexadecimal digits of its content.

        The host waits for the device, if the batch lies there.
        """
        if self._ahead is None:
            position, drawn = self._sampler.position, self._drawn()
            self._ahead = next(drawn), drawn, position
        return fingerprint(self._ahead[0])

    def _drawn(self) -> Iterator[Any]:
        for indices, generator in self._sampler.step():
            yield self._timed(indices, generator)

    def _timed(self, indices: Tensor, generator: torch.Generator) -> Any:
        started = time.perf_counter()
        batch = self._recipe.batch(indices, generator)
        self.waited_seconds += time.perf_counter() - started
        return batch


def fingerprint(batch: Any) -> str:
    """Return a 64-bit hash of a batch: of its tensors' bytes, types and shapes, and of the rest."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            content = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
        else:
            told = ADDRESS.sub("", repr(leaf))  # another one each time
            digest.update(f"{type(leaf).__name__} {told} ".encode())
    return digest.hexdigest()
