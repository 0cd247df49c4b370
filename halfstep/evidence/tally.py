"""Events that repeat, reported at counts of 1, 2, 4, 8 and so on, and at the end."""

from collections.abc import Callable
from typing import Any

from halfstep.telemetry.spool import Event


class Tally:
    """Counts one kind of event, and emits the count when it has doubled.

    Of several events of a kind the last one counts, so that a run of any length has few of them.
    """

    def __init__(self, kind: str, on_event: Callable[[Event], None], least: int = 1) -> None:
        """least: the count of the first one that is emitted."""
        self.count = 0
        self._kind, self._on_event, self._due_at = kind, on_event, least
        self._last: Event | None = None

    def add(self, step: int, by: int = 1, **fields: Any) -> None:
        """Count some more. fields: the event's others."""
        self.count += by
        self._last = {"event": self._kind, "step": step, "count": self.count, **fields}
        if self.count >= self._due_at:
            self._due_at = 2 * self.count
            self.flush()

    def flush(self) -> None:
        """Emit the last count, if it was not yet and is large enough."""
        if self._last is not None and self._last["count"] * 2 >= self._due_at:
            self._on_event(self._last)
        self._last = None
