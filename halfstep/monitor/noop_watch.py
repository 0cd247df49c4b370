"""Where there is no torch: a watched run whose steps nobody hears, which can log all the same."""

from typing import Any

from halfstep.clock import clock


class NoopWatch:
    """In place of Loop and of Taps, as far as a run that only logs meets them."""

    def __init__(self, step: int, started_at: float) -> None:
        """started_at: from when on elapsed_ms counts, by halfstep.clock."""
        self.step, self._started_at = step, started_at

    def elapsed_ms(self) -> int:
        """Return milliseconds since the run began."""
        return int((clock() - self._started_at) * 1000)

    def add(self, modules: Any) -> None:
        """Know no parameter."""

    def add_loss(self, loss: Any) -> None:
        """Have no step that it would be of."""

    def drain(self, patience_seconds: float) -> bool:
        """Have nothing on any device."""
        return True

    def arm(self) -> None:
        """Wrap nothing."""

    def disarm(self) -> None:
        """Undo nothing."""

    def close(self) -> None:
        """Close no step."""

    def end(self) -> None:
        """Likewise."""
