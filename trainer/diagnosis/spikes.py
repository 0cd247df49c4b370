"""Spikes of the loss, detected in records on the host, without synchronisation.

A spike is a loss above every one in the window before it, and a number of robust standard
deviations above their median: z = (loss - median)
(1.4826 · median absolute deviation). Later losses do not matter, nor does the grouping of records,
so a repeated run finds the same spikes. Only the first step of an excursion is reported: for the
length of a window no other is.

A nonfinite loss in an applied step is a spike too, with infinite z.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec import convert, to_builtins
from numpy.typing import NDArray

from halfstep.config_groups import Spike
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from trainer.observers import Observer

#: Ratio of standard deviation to median absolute deviation of a normal distribution.
CONSISTENCY = 1.4826
#: Minimum spread as a share of the median, for losses that hardly vary.
LEAST_SPREAD = 1e-3

Floats = NDArray[np.float64]


class Spikes(Observer):
    """Reports spikes, and stores the first that needs a rollback."""

    is_diagnosis = True

    def __init__(self, settings: Spike, on_event: Callable[[Event], None]) -> None:
        self._threshold, self._window = settings.threshold, settings.window_steps
        self._rollbacks = settings.rollback
        self._on_event = on_event
        self._losses: Floats = np.zeros(0)  # latest finite ones, at most a window
        self._quiet_until = 0  # spikes up to this step are not reported
        self.pending: events.Spike | None = None
        self.rollbacks = 0  # number of rollbacks
        #: For each rollback that still counts: its step, and the number of examples left out.
        self.left_out: list[tuple[int, int]] = []

    def receive(self, records: Steps) -> None:
        """Check steps, in order."""
        if self._threshold is None:
            return
        steps, losses = records["step"], records["loss"].astype(np.float64)
        is_finite = np.isfinite(losses)
        spikes = {} if is_finite.all() else self._lost(records, is_finite)
        for index, z in self._risen(losses[is_finite]):
            spikes[int(steps[is_finite][index])] = (float(losses[is_finite][index]), z)
        for step in sorted(spikes):
            if step > self._quiet_until:
                self._report(step, *spikes[step])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the detection in later steps."""
        return {
            "losses": torch.from_numpy(self._losses.copy()),
            "quiet_until": self._quiet_until,
            # Plain values: a checkpoint is loaded without code.
            "pending": to_builtins(self.pending),
            "rollbacks": self.rollbacks,
            "left_out": list(self.left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._losses = state["losses"].numpy().copy()[-self._window :]
        self._quiet_until = state["quiet_until"]
        self.pending = convert(state["pending"], events.Spike | None)
        self.rollbacks = state["rollbacks"]
        self.left_out[:] = state["left_out"]  # in place, because other objects refer to this list

    def _lost(self, records: Steps, is_finite: NDArray[np.bool_]) -> dict[int, tuple[float, float]]:
        """Return the applied steps with a nonfinite loss."""
        lost = records[~is_finite & (records["flags"] & SKIPPED == 0)]
        return {int(record["step"]): (float(record["loss"]), math.inf) for record in lost}

    def _risen(self, losses: Floats) -> list[tuple[int, float]]:
        """Return the indices of spikes among losses with their z, and update the window."""
        window, before = self._window, len(self._losses)
        joined = np.concatenate([self._losses, losses])
        self._losses = joined[-window:]
        if len(joined) <= window:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(joined[:-1], window)
        judged = joined[window:]  # each after its window
        # A cheap test: nearly always no loss is above its whole window.
        above = np.flatnonzero(judged > windows.max(axis=1))
        spikes = []
        for index in above.tolist():
            z = robust_z(float(judged[index]), windows[index])
            if self._threshold is not None and z >= self._threshold:
                spikes.append((index + window - before, z))
        return spikes

    def _report(self, step: int, loss: float, z: float) -> None:
        self._quiet_until = step + self._window
        event = events.Spike(step=step, loss=loss, z=z)
        if self._rollbacks:
            self.pending = self.pending or event
        self._on_event(event)


def robust_z(loss: float, window: Floats) -> float:
    """Return the robust z-score of a loss against a window."""
    median = float(np.median(window))
    spread = CONSISTENCY * float(np.median(np.abs(window - median)))
    return (loss - median) / max(spread, LEAST_SPREAD * abs(median), sys.float_info.min)
