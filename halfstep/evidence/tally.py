"""Repeated events, reported at counts of 1, 2, 4, 8 and so on, and at the end."""

from collections.abc import Callable
from typing import Any, TypeAlias

from halfstep.telemetry.events import (
    DirectStep,
    Event,
    MixedScales,
    NotStepped,
    ScaledClip,
    Uncleared,
    UnscaledLoss,
)

Counted: TypeAlias = DirectStep | MixedScales | NotStepped | ScaledClip | Uncleared | UnscaledLoss


class Tally:
    """Counter of one kind of event that emits the count whenever it has doubled.

    The last event of a kind counts, so a run of any length has few of them.
    """

    def __init__(
        self, kind: type[Counted], on_event: Callable[[Event], None], least: int = 1
    ) -> None:
        """least: first count that is emitted."""
        self.count = 0
        self._kind, self._on_event, self._due_at = kind, on_event, least
        self._last: Counted | None = None

    def add(self, step: int, by: int = 1, **fields: Any) -> None:
        """Increase the count. fields: other fields of the event."""
        self.count += by
        self._last = self._kind(step=step, count=self.count, **fields)
        if self.count >= self._due_at:
            self._due_at = 2 * self.count
            self.flush()

    def flush(self) -> None:
        """Emit the last count, if it is unreported and large enough."""
        if self._last is not None and self._last.count * 2 >= self._due_at:
            self._on_event(self._last)
        self._last = None
