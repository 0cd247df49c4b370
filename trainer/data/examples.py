"""Reading the examples of a micro-batch, in a worker process or in the training itself.

Each example is read with the global random generators seeded by its place in the run. So what it
is like depends on nothing else: not on who reads it, nor on what was read before.
"""

import io
import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, get_worker_info

from halfstep.recipe import Recipe
from trainer.repeatability import seed_of_place


class DataError(Exception):
    """Training data that cannot be read; the message names the example."""


class RemoteTraceback(Exception):
    """The traceback of an error in a data-loader worker."""

    def __str__(self) -> str:
        """Stand by itself below the name of this class."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """What comes in a batch's place: a worker's error has to go through a pipe, whatever it is."""

    sentence: str
    trace: str

    def error(self) -> DataError:
        """Return it as an error, the traceback as its cause."""
        error = DataError(self.sentence)
        error.__cause__ = RemoteTraceback(self.trace)
        return error


@dataclass(frozen=True)
class Packed:
    """What a worker read, ready for its way: unpacked wherever it is received."""

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.content,)


NOTHING = -1  # no example
Share = tuple[int, list[int]]  # where in the stream a micro-batch begins, and its examples
Read = tuple[Any, Any]  # a batch, and the state of a stream after it


class Examples(Dataset[Any]):
    """A recipe's dataset as one whose items are micro-batches: what is read, or a Failure."""

    def __init__(self, recipe: Recipe, seed: int, began: Callable[[int], None]) -> None:
        """began: is told the index of each example before it is read, and NOTHING after a batch."""
        self._dataset, self._collate, self._seed = recipe.dataset, recipe.collate, seed
        self._began = began

    def __getitem__(self, share: Share) -> Read | Failure:
        start, indices = share
        examples: list[Any] = []
        try:
            for place, index in enumerate(indices, start):
                self._began(index)
                seed_by_place(self._seed, place)
                examples.append(self._dataset[index])  # type: ignore[index]
        except (Exception, SystemExit) as error:
            return failed(f"example {indices[len(examples)]} cannot be read", self._dataset, error)
        batch = collated(self._collate, examples, indices, self._seed, start)
        self._began(NOTHING)
        return packed(batch, indices)


def failed(what: str, dataset: Any, error: BaseException) -> Failure:
    """Return the Failure that the error now caught makes of a batch."""
    of_dataset = f" ({type(dataset).__name__})"
    return Failure(f"{what}{of_dataset}: {said(error)}", traceback.format_exc())


def collated(
    collate: Callable[[list[Any]], Any],
    examples: list[Any],
    names: list[int],
    seed: int,
    start: int,
) -> Read | Failure:
    """Return a batch of examples, or the Failure to make one.

    names: their indices.  start: the place of the first one.
    """
    try:
        seed_by_place(seed, start, b"collate")
        return collate(examples), None
    except (Exception, SystemExit) as error:
        sentence = f"examples {_listed(names)} make no batch: {said(error)}"
        if differing := _differing_shapes(examples, names):
            sentence = f"{differing}; collate cannot make a batch of them: {said(error)}"
        return Failure(sentence, traceback.format_exc())


def packed(read: Read | Failure, names: list[int]) -> Read | Failure:
    """Make a worker's batch of these examples one that is sure to be sent, or a Failure.

    Left to its queue, which does this in a thread that nobody hears, one that cannot be pickled,
    or for which /dev/shm has no room, would be lost, and waited for without an end.
    """
    if get_worker_info() is None or isinstance(read, Failure):
        return read
    content = io.BytesIO()
    try:
        ForkingPickler(content, pickle.HIGHEST_PROTOCOL).dump(read)
    except Exception as error:
        sentence = f"the batch of examples {_listed(names)} cannot be sent to the training"
        return Failure(f"{sentence}: {said(error)}", traceback.format_exc())
    return cast("Read", Packed(content.getvalue()))  # as which it is received


def taken(read: Read | Failure) -> Read:
    """Return what was read. Raises DataError if nothing was."""
    if isinstance(read, Failure):
        raise read.error()
    return read


def seed_by_place(seed: int, place: int, purpose: bytes = b"example") -> None:
    """Seed the host's global generators for what is at this place in the run.

    Each in a way of its own: torch's and numpy's are the same one, and would draw the same bits.
    """
    # Not torch.manual_seed, which seeds the device's generators too: they are the training's.
    torch.default_generator.manual_seed(seed_of_place(purpose, seed, place))
    np.random.seed(seed_of_place(b"numpy" + purpose, seed, place))
    random.seed(seed_of_place(b"python" + purpose, seed, place))


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Read here as a worker would, in one thread, and leave the training's random state alone."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def said(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _listed(names: list[int]) -> str:
    return ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")


def _differing_shapes(examples: list[Any], names: list[int]) -> str | None:
    """Name two examples whose tensors have different shapes, if there are any."""
    leaves = [tree_leaves(example) for example in examples]
    shapes = [[tuple(x.shape) for x in each if hasattr(x, "shape")] for each in leaves]
    for name, shape in zip(names, shapes, strict=True):
        if shape != shapes[0]:
            told = [", ".join(map(str, each)) or "no tensor" for each in (shapes[0], shape)]
            return f"example {names[0]} has the shape {told[0]}, example {name} {told[1]}"
    return None
