"""Prefetching: worker processes read batches, a thread copies them to the device.

torch's DataLoader manages the processes. Its workers are forked: a dataset need not be picklable,
its memory is shared, and they start within milliseconds; see docs/decisions/0005-data-order.md.
Batches arrive in the requested order, whichever worker reads them.
"""

import atexit
import multiprocessing
import queue
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from halfstep.config_groups import Data
from halfstep.number_formats import duration, number
from trainer.data.examples import DataError, Read, unwrap
from trainer.data.to_device import OnTheWay, ToDevice
from trainer.data.worker_pool import ENDING, WorkerPool

POLL_SECONDS = 0.5  # between checks whether all workers are alive
#: On a busy machine, a killed process closes its sockets a while before it exits.
DEATH_SECONDS = 10.0
AHEAD = 1  # batches on the device, or being copied, besides the one in training


Found = tuple[OnTheWay, Any] | Exception  # a batch and the state after it, or an exception


class Plan(Protocol):
    """Reading strategy of a recipe's dataset."""

    workers: int

    def begin(
        self, start: int, state: object, began: Callable[[int], None]
    ) -> tuple[Dataset[Any], Iterator[object] | None]:
        """Return a dataset of micro-batches from a position on, and its items' keys, if any.

        state: of a stream before this position.  began: called with each example to be read.
        """


class Source:
    """A source of micro-batches."""

    state: Any = None  # of a stream, after the last micro-batch taken

    def take(self, start: int) -> Any:
        """Return the micro-batch at a position in the run, on the device."""

    def load_state(self, state: object) -> None:
        """Continue a stream in this state."""

    def close(self) -> None:
        """Stop prefetching, if any."""


class Loader(Source):
    """Returns micro-batches that workers prefetch, from any start."""

    def __init__(
        self,
        plan: Plan,
        stride: int,
        data: Data,
        device: torch.device,
        on_wait: Callable[[str], None],
    ) -> None:
        """stride: between the starts of micro-batches.

        on_wait: called with a message about a long wait that has the workers' stacks.
        """
        self._plan, self._stride = plan, stride
        self._data, self._device, self._on_wait = data, device, on_wait
        self._reader: _Reader | None = None
        self._comes_next = 0

    def take(self, start: int) -> Any:
        """Return the micro-batch at `start`, on the device. Raises DataError."""
        if self._reader is None or self._comes_next != start:
            self.close()
            worker_pool = WorkerPool(self._plan.workers)
            batches = self._plan.begin(start, self.state, worker_pool.began)
            self._reader = _Reader(*batches, worker_pool, self._data, self._device)
        batch, self.state = self._reader.take(self._data.wait_seconds, self._on_wait)
        self._comes_next = start + self._stride
        return batch

    def load_state(self, state: object) -> None:
        """Restart, with a stream in this state."""
        self.close()
        self.state = state

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Reader:
    """The workers from one position in the stream on, and the thread that receives from them."""

    def __init__(
        self,
        batches: Dataset[Any],
        keys: Iterator[object] | None,
        worker_pool: WorkerPool,
        data: Data,
        device: torch.device,
    ) -> None:
        self._worker_pool = worker_pool
        self._ready: queue.Queue[Found] = queue.Queue(AHEAD)
        self._over = threading.Event()
        begun = threading.Event()
        begin = partial(_begin, batches, keys, worker_pool, data)
        # Not this thread: in the main thread DataLoader raises a worker's death wherever the
        # training currently is. The thread does not refer to this object, so that an abandoned one
        # is closed too.
        self._thread = threading.Thread(
            target=_prefetch,
            args=(begin, worker_pool, device, data.pin, self._ready, begun, self._over),
            name="data",
            daemon=True,
        )
        weakref.finalize(self, self._over.set).atexit = False
        # Runs before multiprocessing's exit handler, which waits for workers that ignore SIGTERM.
        self._at_exit = partial(_end, self._over, self._thread)
        atexit.register(self._at_exit)
        self._thread.start()
        begun.wait()  # while it forks, this thread does nothing else

    def take(self, wait_seconds: float, on_wait: Callable[[str], None]) -> Read:
        """Return the next batch, on the device; report waits longer than wait_seconds."""
        waited, patience = 0.0, wait_seconds
        while (item := self._take(patience)) is None:
            waited, patience = waited + patience, 2 * patience  # with exponential backoff
            on_wait(
                f"training has waited {duration(waited)} for a batch (data.wait_seconds is "
                f"{number(wait_seconds)}), and continues to wait. Stacks of its workers:\n"
                f"{self._worker_pool.stacks()}"
            )
        if isinstance(item, Exception):
            raise item
        batch, state = item
        return batch.take(), state

    def _take(self, patience: float) -> "Found | None":
        with suppress(queue.Empty):
            return self._ready.get(timeout=patience)
        return None

    def close(self) -> None:
        """End the thread and the workers."""
        _end(self._over, self._thread)
        atexit.unregister(self._at_exit)
        self._worker_pool.end()


def _end(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    thread.join()


def _prefetch(
    begin: Callable[[], Iterator[object]],
    worker_pool: WorkerPool,
    device: torch.device,
    pin: bool,
    ready: "queue.Queue[Found]",
    begun: threading.Event,
    over: threading.Event,
) -> None:
    """Take batches from the workers and start copies, until `over` is set or an exception."""
    batches: Iterator[object] | None = None
    try:
        if device.type == "cuda":  # the current device is per thread
            torch.cuda.set_device(device)
        # Not DataLoader's pin thread, which may wait forever for the rest of a killed worker's
        # batch.
        to_device = ToDevice(device, pin=pin)
        others = set(multiprocessing.active_children())
        # In this thread, and in workers until they ignore these signals: the main thread handles
        # them.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        batches = begin()
        worker_pool.remember(sorted(set(multiprocessing.active_children()) - others, key=_pid))
        begun.set()
        while not over.is_set():
            read = _next(batches, worker_pool)
            if read is NOTHING_YET:
                continue
            batch, state = unwrap(read)
            _put((to_device.begin(batch), state), ready, over)
            del read, batch  # otherwise they would live as long as the wait for the next one
    except Exception as error:  # any exception is raised in the training
        is_described = isinstance(error, DataError)  # its cause has the location
        _put(error.with_traceback(None) if is_described else error, ready, over)
    finally:
        begun.set()
        _detach_workers(batches)
        worker_pool.kill()
        batches = None


def _begin(
    batches: Dataset[Any], keys: Iterator[object] | None, worker_pool: WorkerPool, data: Data
) -> Iterator[object]:
    """Fork the workers; return an iterator of their batches."""
    with warnings.catch_warnings():  # about more workers than processors: they may wait for a disk
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return iter(
            DataLoader(
                batches,
                batch_size=None,  # an item is a batch
                collate_fn=_as_it_is,
                sampler=keys,
                num_workers=worker_pool.size,
                prefetch_factor=data.prefetch,
                timeout=POLL_SECONDS,
                worker_init_fn=worker_pool.join,
                multiprocessing_context="fork",
                generator=torch.Generator(),  # otherwise it would use the training's generator
            )
        )


def _detach_workers(batches: Any) -> None:
    """Make DataLoader forget its workers, before they are killed.

    Its own shutdown waits for each of them, 10 seconds for a busy one, and takes a lock that a
    killed worker may hold forever; and a recipe's own DataLoader would raise their deaths.
    """
    if batches is None:
        return
    batches._shutdown = True
    if batches._worker_pids_set:
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
    for index_queue in batches._index_queues:
        index_queue.cancel_join_thread()
        index_queue.close()


NOTHING_YET = object()


def _next(batches: Iterator[object], worker_pool: WorkerPool) -> Any:
    """Return the next batch, or NOTHING_YET after POLL_SECONDS. Raises a dead worker's error."""
    started = time.monotonic()
    try:
        return next(batches)
    except RuntimeError:  # DataLoader's exception for a timeout and for a death
        worker_pool.check()
        if time.monotonic() - started < POLL_SECONDS:
            raise
        return NOTHING_YET
    except (OSError, EOFError):  # a batch's memory is passed by its worker, which is gone
        worker_pool.wait(DEATH_SECONDS)
        worker_pool.check()
        raise


def _put(item: "Found", ready: "queue.Queue[Found]", over: threading.Event) -> None:
    is_put = False
    while not (is_put or over.is_set()):
        with suppress(queue.Full):
            ready.put(item, timeout=POLL_SECONDS)
            is_put = True


def _as_it_is(batch: object) -> object:
    return batch


def _pid(process: Any) -> int:
    return process.pid or 0
