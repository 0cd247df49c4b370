"""Messages to the script's user, one line each, on stderr."""

import sys
from contextlib import suppress

from halfstep.telemetry.plain_json import shown


def say(text: str) -> None:
    """Write a line on stderr; do nothing if stderr is closed, broken or None."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"halfstep: {text}\n")


def in_a_line(value: object) -> str:
    """Return a value's short text on one line, because a module's repr has several."""
    return " ".join(shown(value).split())
