"""Ring buffer of rows on the device, copied to the host asynchronously.

A loop writes one row per step. Complete rows are copied to pinned memory every DRAIN_ROWS rows or
DRAIN_SECONDS, and the first ones and those after a skip as soon as the copy before has arrived. The
copies run on the stream of the steps; an event, polled at each step's end, signals their arrival.
The host waits for the device only in `drain` and when the ring is full.

The host keeps a step's number and times in a second ring, and on a CPU also the row: then there is
no ring on the device. They are handed over with the rows as records of the spool's format,
converted for many steps at once. This module imports torch.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, SupportsFloat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.clock import clock
from halfstep.telemetry.spool import STEP_DTYPE, UNKNOWN_US, Steps

RING_ROWS = 1024  # must exceed the rows of a drain plus those that may be in flight
DRAIN_ROWS = 512
DRAIN_SECONDS = 0.3
EAGER_ROWS = 100  # of a device, handed over as soon as the copy before has arrived
MOST_EAGER = 2000  # such rows, the first ones aside
POLL_SECONDS = 0.001
LONGEST_US = 2**31 - 1
KNOWN = 5  # host values of a step: step, clock, seconds, learning rate, µs waiting for data

#: Callback for arrived rows: number of the first, the rows in fp32, and their records.
OnArrival = Callable[[int, NDArray[np.float32], Steps], None]


class Ring:
    """Ring of rows with fp32 columns, numbered from 0; one row is open at a time.

    is_on_host: a row's numbers are assigned to `values` instead of written into `row`.
    """

    def __init__(
        self,
        columns: int,
        scalars: int,
        device: torch.device,
        started_at: float,
        on_arrival: OnArrival,
        *,
        sends_first: bool = False,
    ) -> None:
        """Allocate the ring.

        scalars: number of leading columns that the host holds, if it writes the rows.
        started_at: origin of elapsed_ms, by halfstep.clock.
        sends_first: send the first row as soon as it is closed, not with those that follow.
        """
        self.number = 0  # number of the open row
        self._sent = self._read = 0  # total rows: read ≤ sent ≤ number
        self._columns, self._device = columns, device
        self._started_at, self._on_arrival = started_at, on_arrival
        self._drained_at = -math.inf if sends_first else clock()
        #: The newest row is sent only with the next one, because the loop may still add to it.
        self.holds_last = False
        #: The host's ring: the host values of a step, and the row's values on a CPU. Tuples are the
        #: quickest to write in a loop that has emptied the caches.
        self._host_rows: list[tuple[float, ...]] = [()] * RING_ROWS
        self.is_on_host = device.type == "cpu"
        self._eager_until = EAGER_ROWS  # number of a row
        self._eager_left = MOST_EAGER
        self.values: Sequence[SupportsFloat] = (0.0,) * scalars  # values of the open row
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._pinned = torch.empty(RING_ROWS, columns, pin_memory=True, device="cpu")
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def row(self) -> Tensor:
        """The open row, on its device."""
        return self._device_rows[self.number % RING_ROWS]

    def is_here(self, number: int) -> bool:
        """Return True if this row is closed, and not sent yet."""
        return self._sent <= number < self.number

    def close(
        self,
        step: int,
        started: float,
        rate: float,
        waited_seconds: float | None = None,
        ended: float | None = None,
    ) -> float:
        """Close the open row, and hand over arrived rows; return its end, by perf_counter.

        started, ended: the step's times by perf_counter; ended is now by default.
        waited_seconds: the step's time spent waiting for data; None if unknown.

        On CUDA the host runs ahead of the device until the launch queue is full: a single step's
        time is how long queueing took, and the mean of many is the device's time.
        """
        ended, now = time.perf_counter() if ended is None else ended, clock()
        waited_us = UNKNOWN_US if waited_seconds is None else waited_seconds * 1e6
        known = (step, now, ended - started, rate, waited_us)
        self._host_rows[self.number % RING_ROWS] = known + tuple(map(float, self.values))
        self.number += 1
        if self._sent != self._read:
            self._receive(wait=self.number - self._read == RING_ROWS)
        is_eager = self.number < self._eager_until and not self.is_on_host
        if (
            is_eager
            or self.number - self._sent >= DRAIN_ROWS
            or now - self._drained_at >= DRAIN_SECONDS
        ):
            self._send(now, keep=int(self.holds_last or is_eager))
        return ended

    def hurry(self) -> None:
        """Hand the next rows over soon, for what is to be examined after a skip."""
        until = self.number + EAGER_ROWS
        added = until - max(self._eager_until, self.number)
        if 0 < added <= self._eager_left:
            self._eager_left -= added
            self._eager_until = until

    def append(self, known: tuple[float, ...], values: tuple[float, ...]) -> bool:
        """Write the open row on a CPU and close it; return False if a hand-over is due.

        known: step, clock, seconds, learning rate and µs waiting for data.
        """
        number = self.number
        if number - self._sent >= DRAIN_ROWS - 1 or known[1] - self._drained_at >= DRAIN_SECONDS:
            return False
        self._host_rows[number % RING_ROWS] = known + values
        self.number = number + 1
        return True

    def drain(self, patience_seconds: float = math.inf) -> bool:
        """Wait for the device up to a timeout; return True if every closed row is handed over."""
        self._await(patience_seconds)
        self._send(clock())
        self._await(patience_seconds)
        return self._read == self.number

    def _await(self, patience_seconds: float) -> None:
        if patience_seconds == math.inf:
            self._receive(wait=True)
            return
        until = clock() + patience_seconds
        while self._sent != self._read and clock() < until:  # a lost device never responds
            self._receive(wait=False)
            time.sleep(POLL_SECONDS)

    def _send(self, now: float, keep: int = 0) -> None:
        """Start copying the unsent rows, unless the last copy is still under way.

        keep: number of newest rows to leave out.
        """
        if self._pinned is not None and self._sent != self._read:
            return
        until = self.number - keep
        if until < self._sent:
            return
        self._drained_at = now
        if self._pinned is None or self._arrived is None:
            self._sent = until  # includes rows of a send that KeyboardInterrupt aborted
            self._hand_over()
            return
        # The copy runs on the stream of the steps: the rows are complete when it begins, and no
        # later step can overwrite them before it ends.
        for rows in _slices(self._sent, until):
            self._pinned[rows].copy_(self._device_ring[rows], non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._device_ring.device))
        self._sent = until

    def _receive(self, *, wait: bool) -> None:
        if self._sent == self._read or self._pinned is None or self._arrived is None:
            return
        if wait:
            self._arrived.synchronize()
        if self._arrived.query():  # type: ignore[no-untyped-call]
            self._hand_over()

    def _hand_over(self) -> None:
        if self._read == self._sent:
            return
        slices = _slices(self._read, self._sent)
        taken = [row for part in slices for row in self._host_rows[part]]
        host_rows = np.fromiter(chain.from_iterable(taken), np.float64).reshape(len(taken), -1)
        if self.is_on_host:
            with np.errstate(over="ignore"):  # a value may exceed fp32
                rows = host_rows[:, KNOWN:].astype(np.float32)
        else:
            rows = _joined(self._arrivals, slices)
        first, self._read = self._read, self._sent
        self._on_arrival(first, rows, self._records(*host_rows.T[:KNOWN]))

    def _records(self, *known: NDArray[np.float64]) -> Steps:
        step, now, seconds, rate, waited_us = known
        records = np.zeros(len(step), STEP_DTYPE)
        records["step"] = step
        records["elapsed_ms"] = (now - self._started_at) * 1000
        records["step_us"] = step_us = np.minimum(seconds * 1e6, LONGEST_US)
        records["lr"] = rate
        records["data_us"] = np.minimum(waited_us, step_us)
        return records

    @cached_property
    def _device_ring(self) -> Tensor:
        return torch.zeros(RING_ROWS, self._columns, device=self._device)

    @cached_property
    def _device_rows(self) -> tuple[Tensor, ...]:
        return self._device_ring.unbind(0)  # views, made once

    @cached_property
    def _arrivals(self) -> NDArray[Any]:
        """The memory from which the host reads a device's rows."""
        return (self._device_ring if self._pinned is None else self._pinned).numpy()


def _joined(rows: NDArray[Any], slices: list[slice]) -> NDArray[Any]:
    """Concatenate slices of rows; a single slice is returned as a view."""
    parts = [rows[part] for part in slices]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _slices(start: int, stop: int) -> list[slice]:
    """Return the ring's slices of rows start to stop: one, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
