"""Rows of a watched loop that have arrived on the host. This module imports torch."""

from collections.abc import Callable

from halfstep.evidence.collector import skips_of
from halfstep.recording.recorder import Recorder
from halfstep.recording.row import Rows
from halfstep.telemetry.events import Event, NonfiniteGradients
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.state import LoopState

STEPS_OF_OPTIMIZERS = 100  # after which every optimizer has stepped in most loops


class Arrivals:
    """Passes on records and events, and reads evidence from them."""

    def __init__(
        self,
        state: LoopState,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self._state = state
        self._on_steps, self._on_event = on_steps, on_event
        self.is_last = False  # the rows are the loop's last
        self._has_looked = False  # for parameters that no optimizer has

    def receive(
        self, recorder: Recorder, first: int, rows: Rows, records: Steps, events: list[Event]
    ) -> None:
        """Process rows, their records and the scaler's events. first: number of the first row."""
        state = self._state
        if state.closed_steps >= STEPS_OF_OPTIMIZERS and not self._has_looked:
            self.look_outside_optimizers()
        count, count_of_events = recorder.written
        if count < len(records):
            self._on_steps(records[count:])
        if (records["flags"] & (SKIPPED | NONFINITE_LOSS)).any():
            recorder.ring.hurry()
        self.write_events(events[count_of_events:])
        norms = None if recorder.ring.readable is not None else rows[:, recorder.layout.norms]
        state.best_effort("evidence", self._read_evidence, first, norms, records, events)
        if state.diagnoses:
            state.diagnoses.report()

    def write_events(self, events: list[Event]) -> None:
        """Pass on the scaler's events."""
        for event in events:
            if not isinstance(event, NonfiniteGradients):
                self._on_event(event)

    def _read_evidence(
        self, first: int, norms: Rows | None, records: Steps, events: list[Event]
    ) -> None:
        """Pass rows on to the evidence. norms: of a device, whose skips are known only now."""
        state = self._state
        names = [gradients.name for gradients in state.known.values()]
        examined = range(first, first + len(records))
        if not state.taking_part and not (records["flags"] & SKIPPED).any():
            # Usually; the newest row is examined, because a schedule may still step after it.
            state.evidence.schedule.count_applied(examined[:-1], len(names))
            examined = examined[-1:]
        taking_part = [state.taking_part.pop(number, None) for number in examined]
        latest = records[len(records) - len(examined) :]
        skips = skips_of(latest, names, taking_part)
        state.evidence.receive(
            list(zip(examined, latest["step"].tolist(), skips, strict=True)),
            records,
            events,
            norms,
            is_scaled=bool(state.row_of),
            may_see_rates=len(names) == 1 and state.scalers == 1,
            is_last=self.is_last,
        )

    def look_outside_optimizers(self) -> None:
        """Find parameters with gradients that no optimizer has."""
        state = self._state
        self._has_looked = True
        if state.wanted is None:
            state.best_effort(
                "parameters without an optimizer",
                state.evidence.checks.outside_optimizers,
                state.closed_steps,
                state.names,
                list(state.known.values()),
            )
