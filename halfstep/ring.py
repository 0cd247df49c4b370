"""A ring of rows on the device, and its way to the host without a wait.

A loop writes one row a step. Now and then the rows that are complete are copied to pinned memory
behind the work already queued; an event, polled at each step's end, says when they have arrived.
The host never waits for the device, except in `drain`. On a CPU the ring is host memory, and is
written and read in place.

What the host knows of a step by itself, its number and its times, stands beside the row in a
record of the spool's format, and is handed over with it. This module imports torch.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.clock import clock
from halfstep.spool import STEP_DTYPE, UNKNOWN_US, Steps

RING_ROWS = 1024  # must exceed what is drained at once plus what may be in flight
DRAIN_ROWS = 256
DRAIN_SECONDS = 0.25
POLL_SECONDS = 0.001

#: What the host knows of a step, in the layout of STEP_DTYPE: step, elapsed_ms, step_us, lr and
#: data_us.
KNOWN = struct.Struct("<qqi16xd4xi")
LONGEST_US = 2**31 - 1

#: What takes rows that have arrived: the first one's number, the rows in fp32, and their records.
OnArrival = Callable[[int, NDArray[np.float32], Steps], None]


class Ring:
    """Rows of fp32 columns, numbered from 0 as they are written. One is open: the next to close."""

    def __init__(
        self, columns: int, device: torch.device, started_at: float, on_arrival: OnArrival
    ) -> None:
        """started_at: from when on elapsed_ms counts, by halfstep.clock."""
        self.number = 0  # of the open row
        self._sent = self._read = 0  # rows, ever: read ≤ sent ≤ number
        self._started_at, self._on_arrival = started_at, on_arrival
        self._drained_at = clock()
        self._device_ring = torch.zeros(RING_ROWS, columns, device=device)
        self._device_rows = self._device_ring.unbind(0)  # views, made once
        # No kernel is as cheap as the host's own writing and reading, where it can.
        self.is_on_host = device.type == "cpu"
        ring = self._device_ring.numpy() if self.is_on_host else np.empty(0, np.float32)
        self._bytes = ring.data.cast("B")  # the same memory, to pack into
        self._row_bytes = columns * 4
        self._records = np.zeros(RING_ROWS, STEP_DTYPE)
        self._known = self._records.data.cast("B")  # the same, to pack into
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._arrivals: NDArray[np.float32] | None = None  # where the host reads: a view of either
        if device.type == "cuda":
            self._pinned = torch.empty(RING_ROWS, columns, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def row(self) -> Tensor:
        """The open row, on its device."""
        return self._device_rows[self.number % RING_ROWS]

    def pack(self, layout: struct.Struct, values: Sequence[Any], first: int = 0) -> None:
        """Write numbers into the open row, from column `first` on, if it is on the host."""
        at = self.number % RING_ROWS * self._row_bytes + 4 * first
        layout.pack_into(self._bytes, at, *values)

    def close(
        self, step: int, started: float, rate: float, waited_seconds: float | None = None
    ) -> None:
        """End the open row, and hand over what is due. started: the step, by perf_counter.

        waited_seconds: of the step, for data; None if nobody knows.

        On CUDA the host runs ahead of the device until the launch queue is full: a single time is
        how long queueing took, and the mean of many is the device's own pace.
        """
        step_us = min(int((time.perf_counter() - started) * 1e6), LONGEST_US)
        data_us = UNKNOWN_US if waited_seconds is None else min(int(waited_seconds * 1e6), step_us)
        now = clock()
        elapsed_ms = int((now - self._started_at) * 1000)
        at = self.number % RING_ROWS * KNOWN.size
        KNOWN.pack_into(self._known, at, step, elapsed_ms, step_us, rate, data_us)
        self.number += 1
        if self._sent != self._read:
            self._receive(wait=self.number - self._read == RING_ROWS)
        if self.number - self._sent >= DRAIN_ROWS or now - self._drained_at >= DRAIN_SECONDS:
            self._send(now)

    def drain(self, patience_seconds: float = math.inf) -> bool:
        """Wait for the device, so long at most; tell whether every closed row is handed over."""
        self._await(patience_seconds)
        self._send(clock())
        self._await(patience_seconds)
        return self._read == self.number

    def _await(self, patience_seconds: float) -> None:
        if patience_seconds == math.inf:
            self._receive(wait=True)
            return
        until = clock() + patience_seconds
        while self._sent != self._read and clock() < until:  # a lost device never answers
            self._receive(wait=False)
            time.sleep(POLL_SECONDS)

    def _send(self, now: float) -> None:
        """Start to copy the rows not sent yet, unless the last copy is still under way."""
        if self._sent != self._read:
            return
        self._drained_at = now
        if self._pinned is None or self._arrived is None:
            self._sent = self.number
            self._hand_over()
            return
        # On the same stream as the steps: the rows are complete when the copy begins, and copied
        # before a later step can write over them.
        for rows in _slices(self._sent, self.number):
            self._pinned[rows].copy_(self._device_ring[rows], non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._device_ring.device))
        self._sent = self.number

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
        if self._arrivals is None:
            self._arrivals = (self._device_ring if self._pinned is None else self._pinned).numpy()
        rows, records = _copied(self._arrivals, slices), _copied(self._records, slices)
        first, self._read = self._read, self._sent
        self._on_arrival(first, rows, records)


def _copied(ring: NDArray[Any], slices: list[slice]) -> NDArray[Any]:
    """Return these rows of a ring in a row of their own."""
    return ring[slices[0]].copy() if len(slices) == 1 else np.concatenate([ring[s] for s in slices])


def _slices(start: int, stop: int) -> list[slice]:
    """Return where in the ring the rows start…stop are: one slice, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
