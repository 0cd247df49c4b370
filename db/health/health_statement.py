"""The statement on a run's loss scale: its health, by the scaler's events and the first finding."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from halfstep.diagnosis.finding import EXPLAINING
from halfstep.run_labels import HEALTHS

TONES = {
    "calibrating": "quiet",
    "healthy": "good",
    "oscillating": "warn",
    "collapsing": "bad",
    "dead": "bad",
}
#: Words that a certain fault replaces as the headline.
WELL = ("calibrating", "healthy")


class HealthStatement(NamedTuple):
    """A headline and a text that agree with the findings."""

    tone: str  # quiet, good, warn or bad
    title: str
    text: str


class _Health(Protocol):
    @property
    def word(self) -> str: ...

    @property
    def reason(self) -> str: ...


class _Finding(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def cause(self) -> str: ...

    @property
    def is_certain(self) -> bool: ...

    @property
    def is_certain_fault(self) -> bool: ...


def health_statement(
    health: _Health, findings: Sequence[_Finding], *, is_over: bool = False
) -> HealthStatement:
    """Return the statement on a run's health. findings: of the run, the first one first.

    The scaler's events say what happened, and only the first finding says why.
    """
    first, text = findings[0] if findings else None, health.reason
    if first and first.is_certain_fault and health.word in WELL:
        return HealthStatement("warn", first.title, text)
    title = HEALTHS[health.word]
    if health.word == "healthy":
        title = "Loss scale healthy"
    elif health.word == "calibrating" and is_over:
        title = "Calibration not finished"
    elif first and first.cause in EXPLAINING and health.word not in WELL:
        text += f" {'Cause' if first.is_certain else 'Likely cause'}: {first.title}."
    return HealthStatement(TONES[health.word], title, text)
