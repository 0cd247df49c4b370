"""Detects a learning-rate schedule that advances in steps that the scaler skipped.

Steps of torch's schedulers are attributed to the preceding attempt of their optimizer. Other
schedules are detected by their rates only, and only with a single optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halfstep.telemetry.events import Event, Schedule
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps

LEAST, LEAST_BY_RATE = 3, 10  # an epoch may end with a skip and a new rate by chance
PER_ATTEMPT = 0.5  # scheduler steps per attempt: per-epoch schedules make fewer, and are fine


class ScheduleEvidence:
    """Counts advances over rows in order, and reports each doubling of the count."""

    def __init__(self) -> None:
        self._advanced = self._skipped = self._steps = self._attempts = 0
        self._due_at = LEAST
        self._stepped: dict[int, set[str]] = {}  # by row, optimizers whose schedule advanced
        self._last: Steps | None = None  # the previous record
        self._changed = self._lost = 0  # rates that changed after a skip, and skips
        self._rate_due_at = LEAST_BY_RATE
        self._waiting: list[tuple[int, int, Mapping[str, bool]]] = []
        self.is_heard = False  # a torch scheduler has stepped
        self.name = ""

    def record_step(self, row: int, optimizer: str, scheduler: str) -> None:
        """Record a scheduler's step after an optimizer's attempt in this row."""
        self.is_heard, self.name = True, scheduler
        self._stepped.setdefault(row, set()).add(optimizer)

    def count_applied(self, rows: range, optimizers: int) -> None:
        """Process rows in which every optimizer was applied. optimizers: their number."""
        self._attempts += len(rows) * optimizers
        if self._stepped:
            self._steps += sum(len(self._stepped.pop(row, ())) for row in rows)

    def read(
        self,
        rows: Sequence[tuple[int, int, Mapping[str, bool]]],
        records: Steps,
        *,
        may_see_rates: bool,
        is_last: bool,
    ) -> list[Event]:
        """Process rows; return events.

        rows: number, step, and whether each optimizer was skipped.

        The newest row waits for the next call, because its schedulers step after it.
        """
        self._waiting += rows
        keep = 0 if is_last else 1
        ready = self._waiting[: len(self._waiting) - keep]
        self._waiting = self._waiting[len(ready) :]
        step = ready[-1][1] if ready else 0
        for number, _step, skips in ready:
            stepped = self._stepped.pop(number, ())
            for optimizer, was_skipped in skips.items():
                self._attempts += 1
                self._skipped += was_skipped
                self._steps += optimizer in stepped
                self._advanced += was_skipped and optimizer in stepped
        events = []
        if self._advanced >= self._due_at and self._steps >= PER_ATTEMPT * self._attempts:
            self._due_at = 2 * self._advanced
            events.append(self._event(step, self._advanced, self._skipped, self.name))
        if may_see_rates and not self.is_heard:
            events += self._by_rates(records)
        else:
            self._last = None
        return events

    def forget_rows(self) -> None:
        """Forget the stored rows, because row numbers restart."""
        self._stepped.clear()
        self._waiting.clear()

    def _by_rates(self, records: Steps) -> list[Event]:
        rows = records if self._last is None else np.concatenate([self._last, records])
        self._last = rows[-1:].copy()
        lost = (rows["flags"][:-1] & SKIPPED) != 0
        if not lost.any():
            return []
        rates = rows["lr"]
        is_changed = (np.diff(rates) != 0) & np.isfinite(rates[:-1]) & np.isfinite(rates[1:])
        self._lost += int(np.count_nonzero(lost))
        self._changed += int(np.count_nonzero(lost & is_changed))
        if self._changed < self._rate_due_at or 2 * self._changed <= self._lost:
            return []
        self._rate_due_at = 2 * self._changed
        return [self._event(int(rows["step"][-1]), self._changed, self._lost, None)]

    def _event(self, step: int, advanced: int, skipped: int, scheduler: str | None) -> Any:
        counts = {"advanced": advanced, "skipped": skipped}
        return Schedule(step=step, **counts, scheduler=scheduler)
