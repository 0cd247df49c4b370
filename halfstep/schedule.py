"""Whether a learning-rate schedule advances in steps that the scaler skipped.

A schedule that is stepped after each attempt runs ahead of the weights. It is seen by the rate: a
step was skipped, and the next one has another.
"""

import numpy as np

from halfstep.spool import SKIPPED, Event, Steps

LEAST = 3  # by chance an epoch ends with a skip, and a rate for the next one is no fault


class ScheduleWatch:
    """Counts such steps over records in their order, and tells at 3, 6, 12 … of them."""

    def __init__(self) -> None:
        self._advanced = self._skipped = 0
        self._tell_at = LEAST
        self._last: Steps | None = None  # the record before

    def read(self, records: Steps) -> list[Event]:
        """Look at records; return an event if there is more to tell."""
        rows = records if self._last is None else np.concatenate([self._last, records])
        self._last = rows[-1:].copy()
        lost = (rows["flags"][:-1] & SKIPPED) != 0
        if not lost.any():
            return []
        self._skipped += int(np.count_nonzero(lost))
        self._advanced += int(np.count_nonzero(lost & (np.diff(rows["lr"]) != 0)))
        if self._advanced < self._tell_at or 2 * self._advanced <= self._skipped:
            return []
        self._tell_at = 2 * self._advanced
        step = int(rows["step"][-1])
        counts = {"advanced": self._advanced, "skipped": self._skipped}
        return [{"event": "schedule", "step": step, **counts}]
