"""Output of commands: lines, JSON, warnings. What needs rich is in halfstep.cli.tables."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print a line, by default to stdout. No full disk or closed pipe ends the process."""
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # later lines, and Python's own flush at the end, go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:
        return


def print_result(result: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command, as a JSON object or as text; nothing if the text is empty."""
    if as_json or text:
        print(json.dumps(result) if as_json else text, flush=True)  # noqa: T201 - a command prints


def print_json(results: Iterable[object]) -> None:
    """Print results as JSON, one object per line."""
    for result in results:
        print(json.dumps(result), flush=True)  # noqa: T201 - a command prints


def print_list(
    results: Iterable[object],
    columns: Sequence[str],
    row_of: Callable[[Any], Sequence[str]],
    *,
    as_json: bool,
) -> None:
    """Print results as JSON, or as a table. row_of: returns the cells of a result."""
    if as_json:
        print_json(results)
        return
    from halfstep.cli.tables import print_table

    print_table(columns, [row_of(result) for result in results])


def warn(text: str) -> None:
    """Print a line on stderr that is no result and does not end the command."""
    print(f"halfstep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command prints


def print_notes(notes: list[str], *, as_json: bool) -> None:
    """Print notes about a result on stderr."""
    if as_json and notes:
        print(json.dumps({"notes": notes}), file=sys.stderr)  # noqa: T201 - a command prints
    elif not as_json:
        for text in notes:
            warn(text)
