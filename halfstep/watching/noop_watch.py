"""Replacement for the loop and hooks without torch: a run that only logs values."""

from typing import Any

from halfstep.clock import clock


class NoopWatch:
    """Stand-in for Loop and Hooks with the methods that a logging run calls."""

    has_optimizers = False

    def __init__(self, step: int, started_at: float) -> None:
        """started_at: start of elapsed_ms, by halfstep.clock."""
        self.step, self._started_at = step, started_at

    def elapsed_ms(self) -> int:
        """Return milliseconds since the run began."""
        return int((clock() - self._started_at) * 1000)

    def add(self, modules: Any) -> None:
        """Do nothing: there are no parameters."""

    def add_loss(self, loss: object) -> None:
        """Do nothing: there are no steps."""

    def write_early(self, on_steps: object) -> None:
        """Do nothing: there are no rows."""

    def drain(self, patience_seconds: float) -> bool:
        """Return True: nothing is in flight on a device."""
        return True

    def arm(self, guard: object) -> None:
        """Do nothing."""

    def disarm(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""
