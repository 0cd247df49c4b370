"""All numbers of a run, from a server's exports: streamed, whatever their length."""

import csv
from collections.abc import Iterator
from typing import Any, NamedTuple

from halfstep.api_client.series import lines_of
from halfstep.client import Client

#: The columns of a step that others have a use for.
COLUMNS = ("loss", "scale", "grad_norm", "grad_norm_clipped", "lr")
SKIPPED = 1  # of a step's flags


class Point(NamedTuple):
    """A number. time: seconds since 1970."""

    name: str
    step: int
    time: float
    value: float


def points_of(client: Client, run: dict[str, Any]) -> Iterator[Point]:
    """Yield the steps' numbers, `skipped` among them as 0 and 1, then those that were logged."""
    started = run["started_at"] or run["created_at"]
    with client.export(run["id"], "steps") as text:
        for row in csv.DictReader(lines_of(text)):
            step, time = int(row["step"]), started + int(row["elapsed_ms"]) / 1000
            for name in COLUMNS:
                if name != "lr" or row[name] != "NaN":  # not known
                    yield Point(name, step, time, float(row[name]))
            yield Point("skipped", step, time, float(int(row["flags"]) & SKIPPED))
    with client.export(run["id"], "metrics") as text:
        for row in csv.DictReader(lines_of(text)):
            time = started + int(row["elapsed_ms"]) / 1000
            yield Point(_apart(row["name"]), int(row["step"]), time, float(row["value"]))


def _apart(name: str) -> str:
    """Return a logged number's name, which may be a column's too."""
    return f"logged/{name}" if name in (*COLUMNS, "skipped") else name
