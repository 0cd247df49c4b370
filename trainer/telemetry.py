"""What each step was like, measured on the device and brought to the host without a wait.

The loop writes one row a step into a ring on the device. Now and then the rows that are complete
are copied to pinned memory behind the work already queued; an event, polled at step boundaries,
says when they have arrived. The host never waits for the device, except before a checkpoint and
at the end, where it waits anyway. On a CPU the ring is host memory, and is read directly.

    row, fp32:  [loss, scale before, scale after, learning rate, found_inf ×O, total norm ×O,
                 clipped norm ×O, norm of each gradient ×P]
                O optimizers, P parameters in the order of the optimizers, then of the modules

What it costs: beside what the clip needs anyway, two kernels a step for the row and one for each
optimizer's flag, however many parameters there are; on a CPU no kernel, for there the values are
read where they lie.
"""

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.clock import clock
from halfstep.config import Diagnosis, Training
from halfstep.spool import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    SKIPPED,
    STEP_DTYPE,
    Event,
    Steps,
    optimizer_skipped,
)
from trainer.layers import Layers, layer_interval
from trainer.observers import Observer
from trainer.watched import StepResult, WatchedOptimizer

RING_ROWS = 1024  # must exceed what is drained at once plus what may be in flight
DRAIN_ROWS = 256
DRAIN_SECONDS = 0.2
LOSS, SCALE, SCALE_AFTER, RATE, FOUND_INF = 0, 1, 2, 3, 4  # columns; the others follow
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_

#: What the host knows of a step, in the layout of STEP_DTYPE: step, elapsed_ms, step_us and lr.
KNOWN = struct.Struct("<qqi16xd4x")


class Telemetry(Observer):
    """The ring, its way to the host, and what the host makes of it: records and scaler events."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        device: torch.device,
        training: Training,
        diagnosis: Diagnosis,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
        started_at: float,
    ) -> None:
        """on_steps: what to do with records that have arrived.  started_at: by halfstep.clock."""
        self._optimizers = optimizers
        self._training = training
        self._started_at = started_at
        self._step, self._step_started, self._rate = 0, 0.0, 0.0
        self._on_steps, self._on_event = on_steps, on_event
        self.skipped = 0  # steps in which any optimizer was skipped, as far as drained
        columns = FOUND_INF + sum(3 + len(each.names) for each in optimizers.values())
        self._zero = torch.zeros((), device=device)
        self._ring = torch.zeros(RING_ROWS, columns, device=device)
        self._rows = self._ring.unbind(0)  # views, made once
        # On a CPU the same memory, for the host to write: no kernel is as cheap as reading there.
        self._host_rows = list(self._ring.numpy()) if device.type == "cpu" else None
        self._host_ring = self._ring.numpy().data.cast("B") if device.type == "cpu" else None
        self._scalars = struct.Struct(f"<{FOUND_INF + 3 * len(optimizers)}f")
        self._layers = Layers(optimizers)
        self._layers_every = layer_interval(training.steps, diagnosis)
        self._counts: dict[int, dict[str, Mapping[int, tuple[int, int]]]] = {}  # by row
        self._records = np.zeros(RING_ROWS, STEP_DTYPE)  # beside the ring: what the host knows
        self._known = self._records.data.cast("B")  # the same, to pack into
        self._last_scale: np.float32 | None = None  # after the last row handed over
        self._skip_flags = [SKIPPED | optimizer_skipped(i) for i in range(len(optimizers))]
        self._written = self._sent = self._read = 0  # rows, ever: read ≤ sent ≤ written
        self._drained_at = time.monotonic()
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._arrivals: NDArray[np.float32] | None = None  # where the host reads: a view of either
        if device.type == "cuda":
            self._pinned = torch.empty(RING_ROWS, columns, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Hand over what is left. After an error the device may be lost: that error goes first."""
        with suppress(*([RuntimeError] if kind else [])):
            self.drain()

    def elapsed_ms(self) -> int:
        """Return milliseconds since the run's first start."""
        return int((clock() - self._started_at) * 1000)

    def state_dict(self) -> dict[str, float | None]:
        """Return the last scale told of: one set at this very boundary is not, as yet."""
        return {"last_scale": None if self._last_scale is None else float(self._last_scale)}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Put it back, so that the next step tells of a scale that was set."""
        scale = state["last_scale"]
        self._last_scale = None if scale is None else np.float32(scale)

    def before_step(self, step: int) -> None:
        """Start the step's time."""
        self._step, self._step_started = step, time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """Queue this step's row on the device: two kernels, and no wait."""
        self._rate = 0.0 if isinstance(result.rate, Tensor) else result.rate
        updates = result.updates.values()
        scalars = [
            result.loss,
            result.scale,
            result.scale_after,
            result.rate if isinstance(result.rate, Tensor) else self._zero,
            *[update.found_inf for update in updates],
            *[update.total_norm for update in updates],
            *[update.clipped_norm for update in updates],
        ]
        at = self._written % RING_ROWS
        if self._host_rows is None or self._host_ring is None:
            norms = [update.norms for update in updates]
            torch.cat([torch.stack(scalars), *norms], out=self._rows[at])
            return
        values = [scalar.item() for scalar in scalars]  # in host memory: nobody waits
        self._scalars.pack_into(self._host_ring, at * self._host_rows[at].nbytes, *values)
        for name, update in result.updates.items():
            if update.counts:
                self._counts.setdefault(self._written, {})[name] = update.counts
        if self._layers_every and self._step % self._layers_every == 0:
            norms = [update.norms for update in updates]
            self._host_rows[at][len(scalars) :] = torch.cat(norms).numpy()

    def tick(self) -> None:
        """End the step's time, and hand over what is due.

        On CUDA the host runs ahead of the device until the launch queue is full: a single time is
        how long queueing took, and the mean of many is the device's own pace.
        """
        step_us = min(int((time.perf_counter() - self._step_started) * 1e6), 2**31 - 1)
        at = self._written % RING_ROWS * KNOWN.size
        KNOWN.pack_into(self._known, at, self._step, self.elapsed_ms(), step_us, self._rate)
        self._written += 1
        due = time.monotonic() - self._drained_at >= DRAIN_SECONDS
        self._receive(wait=self._written - self._read == RING_ROWS)
        if due or self._written - self._sent >= DRAIN_ROWS:
            self._send()

    def drain(self) -> None:
        """Wait for the device and hand over every row written so far."""
        self._receive(wait=True)
        self._send()
        self._receive(wait=True)

    def _send(self) -> None:
        """Start to copy the rows not sent yet, unless the last copy is still under way."""
        if self._sent != self._read:
            return
        self._drained_at = time.monotonic()
        if self._pinned is None or self._arrived is None:
            self._sent = self._written
            self._hand_over()
            return
        # On the same stream as the steps: the rows are complete when the copy begins, and copied
        # before a later step can write over them.
        for rows in _slices(self._sent, self._written):
            self._pinned[rows].copy_(self._ring[rows], non_blocking=True)
        self._arrived.record()
        self._sent = self._written

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
            self._arrivals = (self._ring if self._pinned is None else self._pinned).numpy()
        rows, records = _copied(self._arrivals, slices), _copied(self._records, slices)
        first, self._read = self._read, self._sent
        events = self._interpret(first, rows, records)
        self._counts = {row: each for row, each in self._counts.items() if row >= self._read}
        self._on_steps(records)
        for event in events:
            self._on_event(event)

    def _interpret(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Fill the records in from the rows, and say what the scaler did. first: a row's number."""
        count = len(self._optimizers)
        is_uneventful = self._is_uneventful(rows)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]  # (steps, O)
        clipped = rows[:, FOUND_INF + 2 * count : FOUND_INF + 3 * count]  # (steps, O)
        if self._training.max_grad_norm is not None and self._training.max_grad_value is None:
            # inf × 0 is NaN here as it is on the device.
            with nullcontext() if is_uneventful else np.errstate(all="ignore"):
                clipped = _clip(totals, self._training.max_grad_norm)
        records["loss"], records["scale"] = rows[:, LOSS], rows[:, SCALE]
        records["grad_norm"], records["grad_norm_clipped"] = _joint(totals), _joint(clipped)
        if self._training.schedule_counts == "applied":
            records["lr"] = rows[:, RATE]
        events = self._layer_norms(rows, records)
        return events if is_uneventful else events + self._events(first, rows, records)

    def _layer_norms(self, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Tell the norm of each layer's gradients, in the steps that are due."""
        if not self._layers_every:
            return []
        norms = rows[:, FOUND_INF + 3 * len(self._optimizers) :]
        return [
            {
                "event": "layer_norms",
                "step": int(records["step"][i]),
                "layers": self._layers.names,
                "norms": self._layers.norms(norms[i]),
            }
            for i in np.flatnonzero(records["step"] % self._layers_every == 0)
        ]

    def _is_uneventful(self, rows: NDArray[np.float32]) -> bool:
        """Whether all is finite and the scale as it was: nearly always, so it has to be cheap."""
        count = len(self._optimizers)
        scales = rows[:, SCALE : SCALE_AFTER + 1]
        found_inf = rows[:, FOUND_INF : FOUND_INF + count]
        return bool(
            (scales == self._last_scale).all()
            and not found_inf.any()
            and np.isfinite(rows[:, : FOUND_INF + 2 * count]).all()
        )

    def _events(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Flag the records, and list the scaler's events."""
        count = len(self._optimizers)
        found_inf = rows[:, FOUND_INF : FOUND_INF + count] != 0  # (steps, O)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]
        norms = rows[:, FOUND_INF + 3 * count :]  # (steps, P)

        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        overflows = (np.isinf(totals) & ~found_inf).any(axis=1)
        flags = np.bitwise_or.reduce(np.where(found_inf, self._skip_flags, 0), axis=1)
        flags |= np.where(np.isfinite(rows[:, LOSS]), 0, NONFINITE_LOSS)
        records["flags"] = flags | np.where(overflows, NORM_OVERFLOW, 0)
        self.skipped += int(np.count_nonzero(flags & SKIPPED))

        before, after = rows[:, SCALE], rows[:, SCALE_AFTER]
        # A scale that is not the one which the step before left was set by hand in between.
        left = np.roll(after, 1)
        left[0] = before[0] if self._last_scale is None else self._last_scale
        self._last_scale = after[-1]
        events: list[Event] = []
        for i in np.flatnonzero(found_inf.any(axis=1) | (left != before) | (before != after)):
            if left[i] != before[i]:
                events.append(_event("set", records[i], float(left[i]), float(before[i])))
            counts = self._counts.get(first + int(i), {})
            events += self._scaler_events(records[i], rows[i], found_inf[i], norms[i], counts)
        return events

    def _scaler_events(
        self,
        record: np.void,
        row: NDArray[np.float32],
        found_inf: NDArray[np.bool_],
        norms: NDArray[np.float32],
        counts: Mapping[str, Mapping[int, tuple[int, int]]],
    ) -> list[Event]:
        before, after = float(row[SCALE]), float(row[SCALE_AFTER])
        events, first = [], 0
        for (name, watched), was_skipped in zip(self._optimizers.items(), found_inf, strict=True):
            own = slice(first, first + len(watched.names))
            first = own.stop
            if was_skipped:
                culprits = _culprits(watched.names, norms[own], counts.get(name))
                skip = {"optimizer": name, "culprits": culprits}
                events.append(_event("skip", record, before, after) | skip)
        if after != before:
            kind = "growth" if after > before else "backoff"
            events.append(_event(kind, record, before, after))
        return events


def _culprits(
    names: list[str], norms: NDArray[np.float32], counts: Mapping[int, tuple[int, int]] | None
) -> list[dict[str, Any]]:
    """Name the parameters whose gradients are not finite, counted where that was for free."""
    if counts is None:
        return [{"name": names[i]} for i in np.flatnonzero(~np.isfinite(norms))]
    # One without inf or NaN is finite, though too large for its norm to be.
    return [
        {"name": names[position], "inf": inf, "nan": nan}
        for position, (inf, nan) in counts.items()
        if inf or nan
    ]


def _event(kind: str, record: np.void, before: float, after: float) -> Event:
    return {
        "event": "scaler",
        "kind": kind,
        "step": int(record["step"]),
        "optimizer": None,
        "scale_before": before,
        "scale_after": after,
        "culprits": [],
        "loss_nonfinite": bool(record["flags"] & NONFINITE_LOSS),
    }


def _clip(totals: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Return what clip_grads_with_norm_ leaves of the norms, as it reckons."""
    coefficient = np.float32(limit) / (totals + np.float32(CLIP_EPSILON))
    clipped: NDArray[np.float32] = totals * np.minimum(coefficient, np.float32(1))
    return clipped


def _joint(norms: NDArray[np.float32]) -> NDArray[Any]:
    """Return one L2 norm over all optimizers, (steps,), of each one's, (steps, O)."""
    if norms.shape[1] == 1:
        return norms[:, 0]
    joint: NDArray[Any] = np.sqrt(np.square(norms, dtype=np.float64).sum(axis=1))
    return joint


def _copied(ring: NDArray[Any], slices: list[slice]) -> NDArray[Any]:
    """Return these rows of a ring in a row of their own."""
    return ring[slices[0]].copy() if len(slices) == 1 else np.concatenate([ring[s] for s in slices])


def _slices(start: int, stop: int) -> list[slice]:
    """Return where in the ring the rows start…stop are: one slice, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
