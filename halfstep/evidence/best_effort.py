"""Measurements of a watched loop that fail independently."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from halfstep.telemetry.events import Event, FailedDiagnosis

ERROR_CHARACTERS = 1000
P = ParamSpec("P")
T = TypeVar("T")


class BestEffort:
    """Calls measurements; one that raises is disabled without affecting the others."""

    def __init__(
        self,
        on_event: Callable[[Event], None],
        say: Callable[[str], None],
        step: Callable[[], int],
    ) -> None:
        """say: prints a message to the user.  step: returns the last completed step."""
        self._on_event, self._say, self._step = on_event, say, step
        self.lost: set[str] = set()

    def __call__(
        self, figure: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Return the result of a call; None if this measurement is disabled."""
        if figure in self.lost:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.lose(figure, error)
            return None

    def lose(self, figure: str, error: Exception) -> None:
        """Disable a measurement after an error."""
        self.lost.add(figure)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
        self._say(f"{figure}: no longer recorded: {text}")
        self._on_event(FailedDiagnosis(step=self._step(), diagnosis=figure, error=text))
