"""Reading ahead: worker processes read batches, a thread brings them to the device.

torch's DataLoader does the work between processes. Its workers are forked: a dataset need not be
pickled, the memory that it lies in is shared, and they are there in milliseconds; see decision 12.
Batches come in the order in which they are asked for, whoever reads them.
"""

import multiprocessing
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from halfstep.recipe import Recipe
from halfstep.run_config import Data
from trainer.crew import Crew
from trainer.examples import Examples, Failure
from trainer.sampler import Sampler
from trainer.to_device import OnTheWay, ToDevice

LOOK_SECONDS = 0.5  # between looks at whether all workers live
AHEAD = 1  # batches that lie on the device, or are on their way to it, besides the one in training

Share = tuple[int, list[int]]  # where in the stream a micro-batch begins, and its examples


class Loader:
    """Hands out micro-batches that workers read ahead, beginning wherever it is asked to."""

    def __init__(
        self,
        recipe: Recipe,
        sampler: Sampler,
        seed: int,
        data: Data,
        device: torch.device,
        on_wait: Callable[[str], None],
    ) -> None:
        """on_wait: is told of a wait that is too long, and where the workers stand."""
        self._recipe, self._sampler, self._seed = recipe, sampler, seed
        self._data, self._device, self._on_wait = data, device, on_wait
        self._reader: _Reader | None = None
        self._comes_next = 0

    def take(self, start: int) -> Any:
        """Return the micro-batch that begins there, on the device. Raises DataError."""
        if self._reader is None or self._comes_next != start:
            self.close()
            crew = Crew(self._data.workers)
            shares = _Shares(Examples(self._recipe, self._seed, crew.began))
            wanted = self._sampler.shares_from(start)
            self._reader = _Reader(shares, wanted, crew, self._data, self._device)
        batch = self._reader.take(self._data.wait_seconds, self._on_wait)
        self._comes_next = start + self._sampler.examples_in_a_pass
        return batch

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Shares(Dataset[Any]):
    """A dataset whose items are whole micro-batches."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __getitem__(self, share: Share) -> Any:
        return self._examples.read(*share)


class _Reader:
    """The workers from one place in the stream on, and the thread that hears them."""

    def __init__(
        self,
        shares: Dataset[Any],
        wanted: Iterator[Share],
        crew: Crew,
        data: Data,
        device: torch.device,
    ) -> None:
        self._crew = crew
        self._ready: queue.Queue[OnTheWay | Exception] = queue.Queue(AHEAD)
        self._over = threading.Event()
        begun = threading.Event()
        begin = partial(_begin, shares, wanted, crew, data, pin=data.pin and device.type == "cuda")
        # Not this thread: in the main one DataLoader raises a worker's death wherever the training
        # is just then. Nor does it hold this object, so that one forgotten is closed all the same.
        self._thread = threading.Thread(
            target=_bring,
            args=(begin, crew, ToDevice(device), self._ready, begun, self._over),
            name="data",
            daemon=True,
        )
        self._closing = weakref.finalize(self, self._over.set)
        self._thread.start()
        begun.wait()  # so that while it forks, this thread is in the middle of nothing

    def take(self, wait_seconds: float, on_wait: Callable[[str], None]) -> Any:
        """Return the next batch, on the device; say so if it does not come for so long."""
        try:
            found = self._ready.get(timeout=wait_seconds)
        except queue.Empty:
            on_wait(self._crew.stacks())
            found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found.take()

    def close(self) -> None:
        """End the thread, and with it the workers."""
        self._over.set()
        self._thread.join()
        self._crew.close()


def _bring(
    begin: Callable[[], Iterator[Any]],
    crew: Crew,
    to_device: ToDevice,
    ready: "queue.Queue[OnTheWay | Exception]",
    begun: threading.Event,
    over: threading.Event,
) -> None:
    """Take batches from the workers and begin to copy them, until it is over or one raises."""
    try:
        others = set(multiprocessing.active_children())
        batches = begin()
        crew.watch(sorted(set(multiprocessing.active_children()) - others, key=_pid))
        begun.set()
        while not over.is_set():
            batch = _next(batches, crew)
            if batch is NOTHING_YET:
                continue
            if isinstance(batch, Failure):
                raise batch.error()
            _put(to_device.begin(batch), ready, over)
            del batch  # or it would live as long as the wait for the next one
    except Exception as error:  # whatever it is, it is the training's to raise
        _put(error, ready, over)
    finally:
        begun.set()


def _begin(
    shares: Dataset[Any], wanted: Iterator[Share], crew: Crew, data: Data, *, pin: bool
) -> Iterator[Any]:
    """Fork the workers; return what they read."""
    with warnings.catch_warnings():  # of more workers than processors: they may wait for a disk
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return iter(
            DataLoader(
                shares,
                batch_size=None,  # an item is a batch
                collate_fn=_as_it_is,
                sampler=wanted,
                num_workers=data.workers,
                prefetch_factor=data.prefetch,
                pin_memory=pin,
                timeout=LOOK_SECONDS,
                worker_init_fn=crew.join,
                multiprocessing_context="fork",
                generator=torch.Generator(),  # or it would draw from the training's
            )
        )


NOTHING_YET = object()


def _next(batches: Iterator[Any], crew: Crew) -> Any:
    """Return the next batch, or NOTHING_YET after LOOK_SECONDS. Raises what a worker died of."""
    started = time.monotonic()
    try:
        return next(batches)
    except RuntimeError:  # DataLoader's word for a wait that is over, and for a death
        crew.check()
        if time.monotonic() - started < LOOK_SECONDS:
            raise
        return NOTHING_YET


def _put(found: "OnTheWay | Exception", ready: "queue.Queue[Any]", over: threading.Event) -> None:
    is_put = False
    while not (is_put or over.is_set()):
        with suppress(queue.Full):
            ready.put(found, timeout=LOOK_SECONDS)
            is_put = True


def _as_it_is(batch: Any) -> Any:
    return batch


def _pid(process: Any) -> int:
    return process.pid or 0
