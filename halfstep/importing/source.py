"""Common types of all import sources: runs and their logged points."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep.telemetry.attempt_messages import WatchedStatus
from halfstep.telemetry.plain_json import JsonObject


class Point(NamedTuple):
    """A logged number."""

    name: str
    step: int
    time: float | None  # seconds since 1970, None if unknown
    value: float


class Media(NamedTuple):
    """A logged file."""

    name: str
    step: int
    time: float | None
    content: bytes
    # If the source knows the format; None: detect an image or audio by content.
    suffix: str | None = None


class Damaged(Exception):
    """A file that is unreadable, or only partially readable; the message names it."""


@dataclass(frozen=True)
class SourceRun:
    """A run of a source."""

    identity: str  # stable id within the source
    fingerprint: str  # changes when the run has more data
    name: str
    # Starts another pass; raises Damaged where it cannot continue.
    points: Callable[[], Iterator[Point | Media]]
    project: str | None = None
    config: JsonObject = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    started: float | None = None
    host: str = ""
    status: WatchedStatus = "finished"  # finished, failed or terminated
    # Kinds of unsupported values, counted by a pass.
    left_out: "Counter[str]" = field(default_factory=Counter)


def literal(text: str) -> object:
    """Return the number or bool that a text represents, else the text."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | bool) else text


def nest(flat: dict[str, object]) -> dict[str, object]:
    """Expand "a/b" to b within a; a name that is both value and group stays flat."""
    tree: dict[str, object] = {}
    for path, value in sorted(flat.items()):
        *groups, name = path.split("/")
        inner = tree
        for group in groups:
            below = inner.setdefault(group, {})
            if not isinstance(below, dict):
                inner, name = tree, path
                break
            inner = below
        inner[name] = value
    return tree
