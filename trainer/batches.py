"""The micro-batches of each step, and the evidence that a resumed run sees the same ones.

A recipe that follows the indices that it is given goes on with the same examples wherever it is
resumed. Whether it does cannot be read off it: a loader of its own with its own order looks the
same. So a checkpoint holds a fingerprint of the batch that came next, and a resumed run compares.
That batch is drawn once: the step that follows the checkpoint takes it.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves

from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from trainer.examples import Examples, Failure, as_in_a_worker
from trainer.loader import Loader
from trainer.sampler import Sampler
from trainer.to_device import ToDevice

ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")


class Source(Protocol):
    """Where micro-batches come from."""

    def take(self, start: int) -> Any:
        """Return the micro-batch that begins at this place in the stream, on the device."""

    def close(self) -> None:
        """End what reads ahead, if anything does."""


class Batches:
    """Draws what the sampler says, at most one micro-batch before it is wanted."""

    def __init__(self, sampler: Sampler, source: Source, again: Source) -> None:
        """again: draws what was drawn before, and does not disturb the source."""
        self._sampler, self._source, self._again = sampler, source, again
        self._ahead: tuple[Any, Iterator[Any], int] | None = None
        self.waited_seconds = 0.0  # of the step that was drawn last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @property
    def position(self) -> int:
        """Where the next step begins, in examples of the sampler's stream."""
        return self._sampler.position if self._ahead is None else self._ahead[2]

    @property
    def examples_in_a_step(self) -> int:
        """How far a step moves it."""
        return self._sampler.examples_in_a_step

    def go_on_at(self, position: int) -> None:
        """Begin the next step here."""
        self._sampler.position, self._ahead = position, None

    def step(self) -> Iterator[Any]:
        """Yield the micro-batches of the next step, each drawn when it is asked for."""
        if self._ahead is None:
            yield from self._drawn()
            return
        first, others, _position = self._ahead
        self._ahead = None
        yield first
        del first  # one micro-batch at a time is in memory
        yield from others

    def again(self, position: int) -> Iterator[Any]:
        """Yield those of the step that begins there, and stay where we are."""
        return map(self._again.take, self._sampler.starts_in(position))

    def fingerprint(self) -> str:
        """Draw the next step's first micro-batch; return 16 hexadecimal digits of its content.

        The host waits for the device, if the batch lies there.
        """
        if self._ahead is None:
            position, drawn = self._sampler.position, self._drawn()
            self._ahead = next(drawn), drawn, position
        return fingerprint(self._ahead[0])

    def _drawn(self) -> Iterator[Any]:
        self.waited_seconds = 0.0
        for start in self._sampler.starts():
            started = time.perf_counter()
            batch = self._source.take(start)
            self.waited_seconds += time.perf_counter() - started
            yield batch
            del batch


def make_batches(
    recipe: Recipe,
    sampler: Sampler,
    config: RunConfig[Any],
    device: torch.device,
    on_wait: Callable[[str], None],
) -> Batches:
    """Return what draws a recipe's batches: by itself, or what workers have read ahead.

    on_wait: is told of a wait for workers that is too long, and where they stand.
    """
    if recipe.dataset is None:
        drawn = Drawn(recipe, sampler)
        return Batches(sampler, drawn, drawn)
    seed, data = config.training.seed, config.data
    here = ReadHere(recipe, sampler, seed, device, pin=data.pin)
    if data.workers == 0:
        return Batches(sampler, here, here)
    return Batches(sampler, Loader(recipe, sampler, seed, data, device, on_wait), here)


class Drawn:
    """Batches that the recipe draws, of data that lie on the device."""

    def __init__(self, recipe: Recipe, sampler: Sampler) -> None:
        self._recipe, self._sampler = recipe, sampler

    def take(self, start: int) -> Any:
        """Have the recipe draw it."""
        return self._recipe.batch(self._sampler.indices(start), self._sampler.generator(start))

    def close(self) -> None:
        """Nothing reads ahead."""


class ReadHere:
    """Batches of a dataset that are read by the training itself."""

    def __init__(
        self, recipe: Recipe, sampler: Sampler, seed: int, device: torch.device, *, pin: bool
    ) -> None:
        self._examples, self._sampler = Examples(recipe, seed), sampler
        self._to_device = ToDevice(device, pin=pin)

    def take(self, start: int) -> Any:
        """Read it and copy it to the device. Raises DataError."""
        with as_in_a_worker():
            batch = self._examples.read(start, self._sampler.indices(start).tolist())
        if isinstance(batch, Failure):
            raise batch.error()
        return self._to_device.begin(batch).take()

    def close(self) -> None:
        """Nothing reads ahead."""


def fingerprint(batch: Any) -> str:
    """Return a 64-bit hash of a batch: of its tensors' bytes, types and shapes, and of the rest."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            content = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
        else:
            told = ADDRESS.sub("", repr(leaf))  # another one each time
            digest.update(f"{type(leaf).__name__} {told} ".encode())
    return digest.hexdigest()
