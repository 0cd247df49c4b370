"""Reads the examples of a micro-batch, in a worker or in the training process.

Each example is read with the global random generators seeded by its position in the run. So it
depends neither on the process that reads it nor on earlier examples.
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
        """Return the traceback, set off from the name of this class."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """An error instead of a batch: any error of a worker must be sent through a pipe."""

    sentence: str
    trace: str

    def error(self) -> DataError:
        """Return the error with the traceback as its cause."""
        error = DataError(self.sentence)
        error.__cause__ = RemoteTraceback(self.trace)
        return error


@dataclass(frozen=True)
class Packed:
    """A batch serialized by a worker; it is unpickled when it is received."""

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self.content,)


NOTHING = -1  # no example
Share = tuple[int, list[int]]  # start of a micro-batch in the stream, and its examples
Read = tuple[Any, Any]  # a batch, and the state of a stream after it


class Examples(Dataset[Any]):
    """A recipe's dataset as micro-batches: each item is a batch, or a Failure."""

    def __init__(self, recipe: Recipe, seed: int, began: Callable[[int], None]) -> None:
        """began: called with each example's index before it is read, and NOTHING after a batch."""
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
            return failure_of(
                f"example {indices[len(examples)]} cannot be read", self._dataset, error
            )
        batch = collate_examples(self._collate, examples, indices, self._seed, start)
        self._began(NOTHING)
        return pack(batch, indices)


def failure_of(what: str, dataset: object, error: BaseException) -> Failure:
    """Return the Failure of a batch for the exception being handled."""
    of_dataset = f" ({type(dataset).__name__})"
    return Failure(f"{what}{of_dataset}: {said(error)}", traceback.format_exc())


def collate_examples(
    collate: Callable[[list[object]], object],
    examples: list[object],
    names: list[int],
    seed: int,
    start: int,
) -> Read | Failure:
    """Return a batch of examples, or a Failure.

    names: their indices.  start: position of the first one.
    """
    try:
        seed_by_place(seed, start, b"collate")
        return collate(examples), None
    except (Exception, SystemExit) as error:
        sentence = f"examples {_list_names(names)} cannot be collated into a batch: {said(error)}"
        if differing := _differing_shapes(examples, names):
            sentence = f"{differing}; collate cannot make a batch of them: {said(error)}"
        return Failure(sentence, traceback.format_exc())


def pack(read: Read | Failure, names: list[int]) -> Read | Failure:
    """Pickle a worker's batch of these examples, or return a Failure.

    DataLoader's queue pickles in a thread whose errors are lost: a batch that cannot be pickled, or
    for which /dev/shm has no space, would never arrive.
    """
    if get_worker_info() is None or isinstance(read, Failure):
        return read
    content = io.BytesIO()
    try:
        ForkingPickler(content, pickle.HIGHEST_PROTOCOL).dump(read)
    except Exception as error:
        sentence = f"the batch of examples {_list_names(names)} cannot be sent to the training"
        return Failure(f"{sentence}: {said(error)}", traceback.format_exc())
    return cast("Read", Packed(content.getvalue()))  # the type after unpickling


def unwrap(read: Read | Failure) -> Read:
    """Return a batch with its state. Raises DataError for a Failure."""
    if isinstance(read, Failure):
        raise read.error()
    return read


def seed_by_place(seed: int, place: int, purpose: bytes = b"example") -> None:
    """Seed the host's global generators for a position in the run.

    Each generator gets its own seed: torch's and numpy's use the same algorithm, and would draw the
    same bits.
    """
    # Not torch.manual_seed, which would also seed the device's generators, used by the training.
    torch.default_generator.manual_seed(seed_of_place(purpose, seed, place))
    np.random.seed(seed_of_place(b"numpy" + purpose, seed, place))
    random.seed(seed_of_place(b"python" + purpose, seed, place))


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Read examples like a worker: in one thread, preserving the training's random state."""
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
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _list_names(names: list[int]) -> str:
    return ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")


def _differing_shapes(examples: list[object], names: list[int]) -> str | None:
    """Return a message about two examples whose tensors have different shapes, if any."""
    leaves = [tree_leaves(example) for example in examples]
    shapes = [[tuple(x.shape) for x in example if hasattr(x, "shape")] for example in leaves]
    for name, shape in zip(names, shapes, strict=True):
        if shape != shapes[0]:
            described = [", ".join(map(str, sizes)) or "no tensor" for sizes in (shapes[0], shape)]
            return f"example {names[0]} has the shape {described[0]}, example {name} {described[1]}"
    return None
