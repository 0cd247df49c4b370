"""A line to somebody whose script we are a guest in."""

import sys
from contextlib import suppress

from halfstep.telemetry.events import shown


def say(text: str) -> None:
    """Write a line on stderr. Closed, broken off, or none from the start: then nobody is told."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"halfstep: {text}\n")


def in_a_line(value: object) -> str:
    """Return a value as a line may hold it: a module's repr has several."""
    return " ".join(shown(value).split())
