"""Messages to the script's user, one line each, on stderr."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from halfstep.telemetry.plain_json import safe_repr

MOST_OF_A_KIND = 5  # texts of one kind that are printed
#: Values in a message, which do not distinguish its kind.
VALUE = re.compile(r"""'[^']*'|"[^"]*"|\b0x[0-9a-f]+|\d[\d,.]*""")
NOT_LOGGED = " is not logged"


class Messages:
    """Messages that are printed once, and only a few of each kind: the others are counted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._printed: dict[str, list[str]] = {}  # texts by kind
        self._more: Counter[str] = Counter()  # by kind

    def say_once(self, text: str) -> None:
        """Print a text, unless it or enough of its kind have been printed."""
        kind = kind_of(text)
        printed = self._printed.setdefault(kind, [])
        if text in printed:
            return
        if len(printed) == MOST_OF_A_KIND:
            self._more[kind] += 1
            return
        printed.append(text)
        rest = "; more of this kind are only counted" if len(printed) == MOST_OF_A_KIND else ""
        self._say(f"{text}{rest}")

    def end(self) -> None:
        """Print how many more there were of each kind."""
        for kind, count in self._more.items():
            self._say(f"{count:,} more like: {self._printed[kind][0]}")
        self._more.clear()


def kind_of(text: str) -> str:
    """Return the kind of a message: its words without values, and without a logged value's name."""
    head, _, reason = text.partition(": ")
    if NOT_LOGGED in text:
        _name, head, reason = text.partition(NOT_LOGGED)
    reason = reason.partition("; allowed: ")[2] or reason
    return VALUE.sub("…", f"{head}: {reason}")


def say(text: str) -> None:
    """Write a line on stderr; do nothing if stderr is closed, broken or None."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"halfstep: {text}\n")


def in_a_line(value: object) -> str:
    """Return a value's short text on one line, because a module's repr has several."""
    return " ".join(safe_repr(value).split())
