"""Spikes of the loss, detected in records on the host, without synchronisation.

A spike is a loss above every one of the window before it, and so many robust standard deviations
above their median: z = (loss - median) / (1.4826 · median absolute deviation). What comes later has
no say, and how records were handed over has none either, so that a run repeated finds the same. Of
an excursion the first step is told: for as long as a window no other is.

A loss that is not finite in a step that was applied is a spike too, of infinite z.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.config_groups import Spike
from halfstep.telemetry.spool import SKIPPED, Event, Steps
from trainer.observers import Observer

#: The median absolute deviation of a normal distribution, times this, is its standard deviation.
CONSISTENCY = 1.4826
#: A loss that hardly varies is not left to deviations of its last bits: a share of its median.
LEAST_SPREAD = 1e-3

Floats = NDArray[np.float64]


class Spikes(Observer):
    """Reports spikes, and holds the first that needs a rollback."""

    is_diagnosis = True

    def __init__(self, settings: Spike, on_event: Callable[[Event], None]) -> None:
        self._threshold, self._window = settings.threshold, settings.window_steps
        self._rollbacks = settings.rollback
        self._on_event = on_event
        self._losses: Floats = np.zeros(0)  # the last finite ones, a window at most
        self._quiet_until = 0  # the step after which another is told
        self.pending: Event | None = None
        self.rollbacks = 0  # how often the run went back
        #: Of each time that counts still: after which step, and how many examples are left out.
        self.left_out: list[tuple[int, int]] = []

    def arrived(self, records: Steps) -> None:
        """Check steps, in order."""
        if self._threshold is None:
            return
        steps, losses = records["step"], records["loss"].astype(np.float64)
        is_finite = np.isfinite(losses)
        found = {} if is_finite.all() else self._lost(records, is_finite)
        for index, z in self._risen(losses[is_finite]):
            found[int(steps[is_finite][index])] = (float(losses[is_finite][index]), z)
        for step in sorted(found):
            if step > self._quiet_until:
                self._tell(step, *found[step])

    def state_dict(self) -> dict[str, Any]:
        """Return what decides whether the next step is one."""
        return {
            "losses": torch.from_numpy(self._losses.copy()),
            "quiet_until": self._quiet_until,
            "pending": self.pending,
            "rollbacks": self.rollbacks,
            "left_out": list(self.left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        self._losses = state["losses"].numpy().copy()[-self._window :]
        self._quiet_until, self.pending = state["quiet_until"], state["pending"]
        self.rollbacks = state["rollbacks"]
        self.left_out[:] = state["left_out"]  # others look at this very list

    def _lost(self, records: Steps, is_finite: NDArray[np.bool_]) -> dict[int, tuple[float, float]]:
        """Return the applied steps whose loss is not finite."""
        lost = records[~is_finite & (records["flags"] & SKIPPED == 0)]
        return {int(each["step"]): (float(each["loss"]), math.inf) for each in lost}

    def _risen(self, losses: Floats) -> list[tuple[int, float]]:
        """Return which of some losses are spikes, each with its z; remember them all."""
        window, before = self._window, len(self._losses)
        joined = np.concatenate([self._losses, losses])
        self._losses = joined[-window:]
        if len(joined) <= window:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(joined[:-1], window)
        judged = joined[window:]  # each after its window
        # Nearly always none is above its whole window, which is cheap to know.
        above = np.flatnonzero(judged > windows.max(axis=1))
        found = []
        for index in above.tolist():
            z = robust_z(float(judged[index]), windows[index])
            if self._threshold is not None and z >= self._threshold:
                found.append((index + window - before, z))
        return found

    def _tell(self, step: int, loss: float, z: float) -> None:
        self._quiet_until = step + self._window
        event: Event = {"event": "spike", "step": step, "loss": loss, "z": z}
        if self._rollbacks:
            self.pending = self.pending or event
        self._on_event(event)


def robust_z(loss: float, window: Floats) -> float:
    """Return the robust z-score of a loss against a window."""
    median = float(np.median(window))
    spread = CONSISTENCY * float(np.median(np.abs(window - median)))
    return (loss - median) / max(spread, LEAST_SPREAD * abs(median), sys.float_info.min)
