"""Ring buffer of rows on the device, copied to the host asynchronously.

A loop writes one row per step. Complete rows are copied to pinned memory every DRAIN_ROWS rows or
DRAIN_SECONDS, and the first ones and those after a skip as soon as the copy before has arrived. The
copies run on the stream of the steps; an event, polled at each step's end, signals their arrival.
The host waits for the device only in `drain` and when the ring is full. The rows of a CPU are in
host memory: they need no copy. A device other than CUDA is waited for at each hand-over.

Another thread may read rows early (`read_early`), which the loop's next hand-over passes on again.
Both hold `lock`; a step takes it only when rows are handed over.

The host keeps a step's number and times in a second ring. They are handed over with the rows as
records of the spool's format, converted for many steps at once. This module imports torch.
"""

import math
import threading
import time
from collections.abc import Callable
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.clock import clock
from halfstep.recording.row import Rows
from halfstep.telemetry.spool import STEP_DTYPE, UNKNOWN_US, Steps

RING_ROWS = 1024  # must exceed the rows of a drain plus those that may be in flight
DRAIN_ROWS = 512
DRAIN_SECONDS = 0.3
EAGER_ROWS = 100  # of a device, handed over as soon as the copy before has arrived
EAGER_SHARE = 0.1  # of the time, at most spent on that
MOST_EAGER = 2000  # such rows, the first ones aside
EARLY_SECONDS = 0.4  # age of a row that another thread reads
POLL_SECONDS = 0.001
LONGEST_US = 2**31 - 1

#: Callback for arrived rows: number of the first, the rows, and their records.
OnArrival = Callable[[int, Rows, Steps], None]


class Ring:
    """Ring of rows with fp32 columns, numbered from 0; one row is open at a time."""

    def __init__(
        self,
        columns: int,
        device: torch.device,
        started_at: float,
        on_arrival: OnArrival,
        *,
        sends_first: bool = False,
    ) -> None:
        """Allocate the ring.

        started_at: origin of elapsed_ms, by halfstep.clock.
        sends_first: send the first row as soon as it is closed, not with those that follow.
        """
        self.number = 0  # number of the open row
        self.sent = self._read = 0  # total rows: read ≤ sent ≤ number
        self._early = 0  # total rows that `read_early` has returned
        self.lock = threading.RLock()  # of a hand-over; it may call a handler that drains
        self._started_at, self._on_arrival = started_at, on_arrival
        self._drained_at = -math.inf if sends_first else clock()
        #: The newest row is sent only with the next one, because the loop may still add to it.
        self.holds_last = False
        self._known: list[tuple[float, ...]] = [()] * RING_ROWS  # the host's values of a step
        self._ring = torch.zeros(RING_ROWS, columns, dtype=torch.float32, device=device)
        self.rows = self._ring.unbind(0)  # views, made once
        self._pinned: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._pinned = torch.empty(
                RING_ROWS, columns, dtype=torch.float32, pin_memory=True, device="cpu"
            )
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        #: The rows where the host can read them without a wait; None if they are on a device.
        self.readable: Rows | None = self._ring.numpy() if device.type == "cpu" else None
        self._eager_until = EAGER_ROWS  # number of a row
        self._eager_left = MOST_EAGER
        self._eager_seconds, self._opened_at = 0.0, clock()

    @property
    def row(self) -> torch.Tensor:
        """The open row, on its device."""
        return self.rows[self.number % RING_ROWS]

    def is_here(self, number: int) -> bool:
        """Return True if this row is closed, and not sent yet."""
        return self.sent <= number < self.number

    def step_of(self, number: int) -> float:
        """Return the step of a closed row that the ring still has."""
        return self._known[number % RING_ROWS][0]

    def close(
        self, step: int, seconds: float, rate: float, waited_us: float = UNKNOWN_US
    ) -> int | None:
        """Close the open row; return the number of rows to send now, None if none are due.

        seconds: the step's time.  waited_us: of it, waiting for data.

        On CUDA the host runs ahead of the device until the launch queue is full: a single step's
        time is how long queueing took, and the mean of many is the device's time.
        """
        number, now = self.number, clock()
        self._known[number % RING_ROWS] = (step, now, seconds, rate, waited_us)
        self.number = number = number + 1
        if self.sent != self._read:
            self._receive(wait=number - self._read == RING_ROWS)
        is_eager = (
            number < self._eager_until
            and self.readable is None
            and self._eager_seconds <= EAGER_SHARE * (now - self._opened_at)
        )
        is_due = number - self.sent >= DRAIN_ROWS or now - self._drained_at >= DRAIN_SECONDS
        if not (is_eager or is_due) or (self._pinned is not None and self.sent != self._read):
            return None
        until = number - (self.holds_last or is_eager)
        return until if until > self.sent else None

    def hurry(self) -> None:
        """Hand the next rows over soon, for what is to be examined after a skip."""
        until = self.number + EAGER_ROWS
        added = until - max(self._eager_until, self.number)
        if 0 < added <= self._eager_left:
            self._eager_left -= added
            self._eager_until = until

    def send(self, until: int) -> None:
        """Start copying the unsent rows up to this number, and hand over what is on the host."""
        if self._pinned is not None and self.sent != self._read:
            return
        self._drained_at = clock()
        if self._pinned is None or self._arrived is None:
            self.sent = until  # includes rows of a send that KeyboardInterrupt aborted
            self._hand_over()
            return
        # The copy runs on the stream of the steps: the rows are complete when it begins, and no
        # later step can overwrite them before it ends.
        for rows in _slices(self.sent, until):
            self._pinned[rows].copy_(self._ring[rows], non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._ring.device))
        self.sent = until

    def read_early(self, until: int, *, has_arrived: bool) -> tuple[int, Rows, Steps] | None:
        """Return a copy of the rows up to this number that the host has, and their records.

        Returns the first one's number, too; None if no row has waited for long. Each row is
        returned once. The caller holds the lock.  has_arrived: the rows in flight from a device are
        complete.
        """
        first = max(self._read, self._early)
        if self.readable is None:
            until = min(until, self.sent if has_arrived else self._read)
        if first >= until or clock() - self._known[first % RING_ROWS][1] < EARLY_SECONDS:
            return None
        self._early = until
        rows, records = self._take(first, until)
        return first, rows.copy(), records

    @property
    def in_flight(self) -> "torch.cuda.Event | None":
        """The event of rows that are being copied from a device, if there are any."""
        return self._arrived if self.sent != self._read else None

    def wait(self, patience_seconds: float = math.inf) -> bool:
        """Wait for rows in flight up to a timeout; return True if all have arrived."""
        if patience_seconds == math.inf:
            self._receive(wait=True)
        until = clock() + patience_seconds
        while self.sent != self._read and clock() < until:  # a lost device never responds
            self._receive(wait=False)
            time.sleep(POLL_SECONDS)
        return self.sent == self._read

    def _receive(self, *, wait: bool) -> None:
        if self.sent == self._read:
            return
        if self._arrived is not None:
            if wait:
                self._arrived.synchronize()
            if not self._arrived.query():  # type: ignore[no-untyped-call]
                return
        self._hand_over()

    def _hand_over(self) -> None:
        if self._read == self.sent:
            return
        started = clock()
        with self.lock:
            rows, records = self._take(self._read, self.sent)
            first, self._read = self._read, self.sent
            self._on_arrival(first, rows, records)
        if self._read <= self._eager_until:
            self._eager_seconds += clock() - started

    def _take(self, first: int, until: int) -> tuple[Rows, Steps]:
        """Return rows on the host, and records with what the host knows of their steps."""
        slices = _slices(first, until)
        known = [row for part in slices for row in self._known[part]]
        columns = np.fromiter(chain.from_iterable(known), np.float64).reshape(len(known), -1).T
        ring = self._ring.cpu() if self._pinned is None else self._pinned
        return _join(ring.numpy(), slices), self._records(*columns)

    def _records(self, *known: NDArray[np.float64]) -> Steps:
        step, now, seconds, rate, waited_us = known
        records = np.zeros(len(step), STEP_DTYPE)
        records["step"] = step
        records["elapsed_ms"] = (now - self._started_at) * 1000
        records["step_us"] = step_us = np.minimum(seconds * 1e6, LONGEST_US)
        records["lr"] = rate
        records["data_us"] = np.minimum(waited_us, step_us)
        return records


def _join(rows: Rows, slices: list[slice]) -> Rows:
    """Concatenate slices of rows; a single slice is returned as a view."""
    parts = [rows[part] for part in slices]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _slices(start: int, stop: int) -> list[slice]:
    """Return the ring's slices of rows start to stop: one, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
