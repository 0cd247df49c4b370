"""Recorder of a loop's steps: one row each, written on the device by one operator.

This module imports torch.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep.recording.reader import Reader
from halfstep.recording.ring import RING_ROWS, Ring
from halfstep.recording.row import SCALE, SCALE_AFTER, Layout, Rows
from halfstep.telemetry.events import Event
from halfstep.telemetry.spool import Steps

#: Receives arrived steps: recorder, number of the first row, rows, records, and scaler events.
OnSteps = Callable[["Recorder", int, Rows, Steps, list[Event]], None]


class Recorder:
    """Writes rows of one layout, and reads those that have arrived on the host."""

    def __init__(
        self,
        reader: Reader,
        layout: Layout,
        device: torch.device,
        started_at: float,
        on_steps: OnSteps,
        *,
        sends_first: bool = False,
    ) -> None:
        """started_at, sends_first: see Ring."""
        self.reader, self.layout, self._on_steps = reader, layout, on_steps
        self.ring = Ring(layout.columns, device, started_at, self._receive, sends_first=sends_first)
        self.device = device
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones_like(self.zero)
        self.unknown = torch.full_like(self.zero, math.nan)
        self._knows_after = [True] * RING_ROWS  # by row: its scale after is written
        self._is_mixed = False  # values are on several devices
        #: Records and events that `write_early` has written, of the rows to be handed over next.
        self._early: list[tuple[Steps, list[Event]]] = []
        #: Of the rows being handed over: how many records and events are written already.
        self.written = (0, 0)

    def write(
        self,
        loss: Tensor,
        scale: Tensor,
        found_inf: Sequence[Tensor],
        factors: Sequence[Tensor],
        norms: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        scale_after: Tensor | None = None,
    ) -> None:
        """Write the open row, as Layout has it: one operator, and no wait. All are 0-dim.

        scale_after: None if it is the next row's scale.  others: rate, own losses, clipped norms.
        """
        place = self.ring.number % RING_ROWS
        self._knows_after[place] = scale_after is not None
        after = self.unknown if scale_after is None else scale_after
        values = [loss, scale, after, *found_inf, *factors, *norms, *others]
        if len(values) != self.layout.columns:  # stack would resize the row
            raise ValueError(f"a row of {len(values)} values; it has {self.layout.columns}")
        if not self._is_mixed:
            try:
                torch.stack(values, out=self.ring.rows[place])
                return
            except RuntimeError:
                self._is_mixed = True
        device = self.device
        values = [value.detach().reshape(()).to(device, non_blocking=True) for value in values]
        torch.stack(values, out=self.ring.rows[place])

    def mean(self, losses: Sequence[Tensor | float]) -> Tensor:
        """Return the mean of losses, 0-dim; NaN if there are none."""
        if len(losses) == 1 and isinstance(losses[0], Tensor):
            return losses[0]
        if not losses:
            return self.unknown
        device = self.device
        tensors = [
            loss.to(device, non_blocking=True)
            if isinstance(loss, Tensor)
            else torch.full((), loss, dtype=torch.float64, device=device)
            for loss in losses
        ]
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which that one lacks
        return torch.stack(tensors).mean(dtype=dtype)

    def set_open_scale_after(self, scale: Tensor) -> None:
        """Record the scale that the open row, which is written, has left."""
        place = self.ring.number % RING_ROWS
        self._knows_after[place] = True
        self.ring.rows[place][SCALE_AFTER].copy_(scale, non_blocking=True)

    @property
    def knows_scale_after(self) -> bool:
        """Whether the scale that the newest closed row has left is recorded."""
        return self._knows_after[(self.ring.number - 1) % RING_ROWS]

    def set_scale_after(self, scale: Tensor) -> None:
        """Record the scale that the newest closed row has left, before it is changed by hand."""
        self._set_after(self.ring.number - 1, scale)

    def drain(self, scale: Tensor, patience_seconds: float = math.inf) -> bool:
        """Wait for the device up to a timeout; return True if every closed row is handed over.

        scale: the one that the newest row has left.
        """
        ring = self.ring
        ring.wait(patience_seconds)
        if ring.sent < ring.number:
            self.send(ring.number, scale)
        return ring.wait(patience_seconds) and ring.sent == ring.number

    def write_early(
        self,
        write: Callable[[Steps, list[Event]], None],
        left: Callable[[int], float | None],
        has_arrived: Callable[[torch.cuda.Event], bool],
    ) -> None:
        """Write rows that the host has, in another thread, while the loop takes no step.

        The loop's next hand-over passes them on, with their number in `written`. Nothing waits, not
        even for a hand-over under way.  left: returns the scale that the newest of so many closed
        rows has left; None if that is uncertain.  has_arrived: see HostCopy.
        """
        ring = self.ring
        if not ring.lock.acquire(blocking=False):
            return
        try:
            in_flight, number = ring.in_flight, ring.number
            scale, is_last_known = None, self._knows_after[(number - 1) % RING_ROWS]
            if not is_last_known and ring.readable is not None:
                scale = left(number)
            until = number - (ring.holds_last or (scale is None and not is_last_known))
            early = ring.read_early(
                until, has_arrived=in_flight is not None and has_arrived(in_flight)
            )
            if early is None:
                return
            first, rows, records = early
            if ring.readable is not None and math.isnan(rows[-1, SCALE_AFTER]):
                following = ring.readable.item(until % RING_ROWS, SCALE)
                rows[-1, SCALE_AFTER] = following if until < number else scale or math.nan
            events = self.reader.read(first, rows, records)
            self._early.append((records, events))
            write(records, events)
        finally:
            ring.lock.release()

    def send(self, until: int, scale: Tensor) -> None:
        """Send rows that are due, see Ring.close. scale: the one that the newest row has left."""
        ring = self.ring
        is_newest = until == ring.number
        self._set_after(until - 1, scale if is_newest else ring.rows[until % RING_ROWS][SCALE])
        ring.send(until)

    def _set_after(self, row: int, scale: Tensor) -> None:
        place = row % RING_ROWS
        if not self._knows_after[place] and self.ring.is_here(row):
            self._knows_after[place] = True
            self.ring.rows[place][SCALE_AFTER].copy_(scale, non_blocking=True)

    def _receive(self, first: int, rows: Rows, records: Steps) -> None:
        early, self._early = self._early, []
        events: list[Event] = []
        count = 0
        for written, their_events in early:
            records[count : count + len(written)] = written
            count += len(written)
            events += their_events
        self.written = count, len(events)
        if count < len(records):
            events += self.reader.read(first + count, rows[count:], records[count:])
        self._on_steps(self, first, rows, records, events)
