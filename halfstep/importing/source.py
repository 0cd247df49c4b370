"""What every source of runs comes to: runs, and the numbers that each of them logged."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A number. time: seconds since 1970, None if the source does not say."""

    name: str
    step: int
    time: float | None
    value: float


class Media(NamedTuple):
    """A file that was logged. suffix: what a source knows that it is; None: a picture or a sound,
    if its content says so.
    """

    name: str
    step: int
    time: float | None
    content: bytes
    suffix: str | None = None


class Damaged(Exception):
    """A file that cannot be read, or not to its end; the message names it."""


@dataclass(frozen=True)
class Found:
    """A run of a source.

    identity: the source's own name for it, the same at every look.  fingerprint: changes when there
    is more of it.  status: finished, failed or terminated.  points: call it for another pass; each
    raises Damaged where it cannot go on.  left_out: kinds of what is neither number nor media,
    counted by a pass.
    """

    identity: str
    fingerprint: str
    name: str
    points: Callable[[], Iterator[Point | Media]]
    project: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    started: float | None = None
    host: str = ""
    status: str = "finished"
    left_out: "Counter[str]" = field(default_factory=Counter)


def literal(text: str) -> Any:
    """Return the number or truth value that a text is, else the text itself."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | bool) else text


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return "a/b" as b within a; a name that is a value and a group both stays as it is."""
    tree: dict[str, Any] = {}
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
