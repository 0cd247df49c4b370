"""Telemetry of each step, measured on the device and copied to the host asynchronously.

The row of a step goes through halfstep.monitor.ring, and is read by
halfstep.monitor.telemetry_rows, which has its layout.

Cost, in addition to the norms that clipping needs: two kernels a step for the row and one for each
optimizer's flag, for any number of parameters; on a CPU no kernel, since values are read directly.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.clock import clock
from halfstep.config_groups import Diagnosis, Training
from halfstep.monitor.ring import Ring
from halfstep.monitor.telemetry_rows import Rows
from halfstep.telemetry.events import Event
from halfstep.telemetry.spool import Steps
from trainer.layers import layer_interval
from trainer.observers import Observer
from trainer.optimizers import StepResult, WatchedOptimizer


class Telemetry(Observer):
    """Writes a row per step, and turns arrived rows into records and scaler events."""

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
        self._started_at = started_at
        self._step, self._step_started, self._rate = 0, 0.0, 0.0
        self._on_steps, self._on_event = on_steps, on_event
        is_clipped_only_by_norm = training.max_grad_value is None
        self._rows = Rows(
            {name: watched.names for name, watched in optimizers.items()},
            max_grad_norm=training.max_grad_norm if is_clipped_only_by_norm else None,
            layers_every=layer_interval(training.steps, diagnosis),
            has_rates=training.schedule_counts == "applied",
        )
        self.ring = Ring(
            self._rows.columns,
            self._rows.scalars,
            device,
            started_at,
            self._hand_over,
            sends_first=True,  # a run is seen to have begun
        )
        self._zero = torch.zeros((), device=device)

    @property
    def skipped(self) -> int:
        """Number of steps in which any optimizer was skipped, as far as drained."""
        return self._rows.skipped

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._rows.skipped = count

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
        return {"last_scale": self._rows.last_scale}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore the scale, so that the next step records a scale set in between."""
        self._rows.last_scale = state["last_scale"]

    def before_step(self, step: int) -> None:
        """Start the step's time."""
        self._step, self._step_started = step, time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """Queue this step's row on the device: two kernels, no wait; on a CPU read it at once."""
        self._rate = 0.0 if isinstance(result.rate, Tensor) else result.rate
        if self.ring.is_on_host:
            self._read(result)
            return
        norms = [update.norms for update in result.updates.values()]
        torch.cat([torch.stack(self._scalars(result)), *norms], out=self.ring.row)

    def tick(self, waited_seconds: float | None = None) -> None:
        """End the step's time, and hand over rows that are due. waited_seconds: for data."""
        self.ring.close(self._step, self._step_started, self._rate, waited_seconds)

    def drain(self) -> None:
        """Wait for the device and hand over every row written so far."""
        self.ring.drain()

    def _scalars(self, result: StepResult) -> list[Tensor]:
        updates = result.updates.values()
        return [
            result.loss,
            result.scale,
            result.scale_after,
            result.rate if isinstance(result.rate, Tensor) else self._zero,
            *[update.found_inf for update in updates],
            *[update.total_norm for update in updates],
            *[update.clipped_norm for update in updates],
        ]

    def _read(self, result: StepResult) -> None:
        """Read the same values from host memory, without a wait."""
        number = self.ring.number
        found_inf, totals, clipped = [], [], []
        for name, update in result.updates.items():
            found_inf.append(update.found_inf.item())
            totals.append(total := update.total_norm.item())
            is_clipped = update.clipped_norm is not update.total_norm
            clipped.append(update.clipped_norm.item() if is_clipped else total)
            if update.counts:
                self._rows.count(number, name, update.counts)
        rate = result.rate.item() if isinstance(result.rate, Tensor) else 0.0
        scale = result.scale.item()
        is_scaled = result.scale_after is not result.scale
        after = result.scale_after.item() if is_scaled else scale
        self.ring.values = result.loss.item(), scale, after, rate, *found_inf, *totals, *clipped
        if self._rows.is_for_layers(self._step):
            norms = [update.norms.tolist() for update in result.updates.values()]
            self._rows.hold(number, [norm for each in norms for norm in each])

    def _hand_over(self, first: int, rows: NDArray[np.float32], records: Steps) -> None:
        events = self._rows.read(first, rows, records)
        self._on_steps(records)
        for event in events:
            self._on_event(event)
