"""Telemetry of each step, written on the device by halfstep.recording, without a wait."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor

from halfstep.clock import clock
from halfstep.config_groups import Diagnosis, Training
from halfstep.recording.reader import Reader
from halfstep.recording.recorder import Recorder
from halfstep.recording.row import Layout, Rows
from halfstep.telemetry.events import Event
from halfstep.telemetry.spool import UNKNOWN_US, Steps
from trainer.layers import layer_interval
from trainer.observers import Observer
from trainer.optimizers import StepResult, WatchedOptimizer
from trainer.schedule import has_tensor_rates


class Telemetry(Observer):
    """Writes a row per step, and passes on records and scaler events that have arrived."""

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
        """on_steps: called with records that have arrived.  started_at: by halfstep.clock."""
        self._started_at, self._optimizers = started_at, list(optimizers.values())
        self._norms_every = diagnosis.norms_every_steps
        self._step, self._step_started, self._rate = 0, 0.0, 0.0
        self._on_steps, self._on_event = on_steps, on_event
        self._layout = Layout(
            {name: watched.names for name, watched in optimizers.items()},
            has_rate=has_tensor_rates(training),
            has_clipped=training.max_grad_value is not None,
            max_grad_norm=training.max_grad_norm,
        )
        self._reader = Reader(self._layout, layers_every=layer_interval(training.steps, diagnosis))
        self.recorder = Recorder(
            self._reader,
            self._layout,
            device,
            started_at,
            self._on_rows,
            sends_first=True,  # a run is seen to have begun
        )
        self._scale = self.recorder.one  # the scaler's tensor, once it has one

    @property
    def skipped(self) -> int:
        """Number of steps in which any optimizer was skipped, as far as drained."""
        return self._reader.skipped

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._reader.skipped = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush the rest. After an error the device may be lost: that error takes precedence."""
        with suppress(*([RuntimeError] if kind else [])):
            self.drain()

    def elapsed_ms(self) -> int:
        """Return milliseconds since the run's first start."""
        return int((clock() - self._started_at) * 1000)

    def state_dict(self) -> dict[str, float | None]:
        """Return the last recorded scale, without one set at the current boundary."""
        return {"last_scale": self._reader.last_scale}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore the scale, so that the next step records a scale set in between."""
        self._reader.last_scale = state["last_scale"]

    def before_step(self, step: int) -> None:
        """Start the step's time, and decide whether its gradient norms are taken."""
        self._step, self._step_started = step, time.perf_counter()
        if self._norms_every > 1:
            is_due = step % self._norms_every == 0
            for watched in self._optimizers:
                watched.takes_norms = is_due

    def after_step(self, result: StepResult) -> None:
        """Write this step's row: one operator, before the scale changes in place."""
        updates, self._scale = result.updates.values(), result.scale
        others: list[Tensor] = []
        self._rate = 0.0
        if self._layout.has_rate:
            others.append(result.rate if isinstance(result.rate, Tensor) else self.recorder.zero)
        elif not isinstance(result.rate, Tensor):
            self._rate = result.rate
        if self._layout.has_clipped:
            others += [update.clipped_norm for update in updates if update.clipped_norm is not None]
        for name, update in result.updates.items():
            if update.counts:
                self._reader.count(self.recorder.ring.number, name, update.counts)
        self.recorder.write(
            result.loss,
            result.scale,
            [update.found_inf for update in updates],
            [update.factor for update in updates],
            [norm for update in updates for norm in update.norms],
            others,
        )

    def tick(self, waited_seconds: float | None = None) -> None:
        """End the step's time, and hand over rows that are due. waited_seconds: for data."""
        seconds = time.perf_counter() - self._step_started
        waited_us = UNKNOWN_US if waited_seconds is None else waited_seconds * 1e6
        until = self.recorder.ring.close(self._step, seconds, self._rate, waited_us)
        if until is not None:
            self.recorder.send(until, self._scale)

    def before_scale_is_set(self) -> None:
        """Record the scale that the last step has left, before it is set by a request."""
        self.recorder.set_scale_after(self._scale)

    def drain(self) -> None:
        """Wait for the device and hand over every row written so far."""
        self.recorder.drain(self._scale)

    def _on_rows(
        self, _recorder: Recorder, _first: int, _rows: Rows, records: Steps, events: list[Event]
    ) -> None:
        self._on_steps(records)
        for event in events:
            self._on_event(event)
