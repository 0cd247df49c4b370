"""All numbers of a run, streamed from the server's exports."""

import csv
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from halfstep.api_client.series import lines_of
from halfstep.client import Client
from halfstep.telemetry.flags import SKIPPED

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunDetail

#: Step columns that are exported.
COLUMNS = ("loss", "scale", "grad_norm", "grad_norm_clipped", "lr")


class Point(NamedTuple):
    """A logged number."""

    name: str
    step: int
    time: float  # seconds since 1970
    value: float


def points_of(client: Client, run: "RunDetail") -> Iterator[Point]:
    """Yield the step columns, `skipped` as 0 or 1, then the logged numbers."""
    started = run["started_at"] or run["created_at"]
    with client.export(run["id"], "steps") as text:
        for row in csv.DictReader(lines_of(text)):
            step, time = int(row["step"]), started + int(row["elapsed_ms"]) / 1000
            for name in COLUMNS:
                if row[name] and (name, row[name]) != ("lr", "NaN"):  # unknown
                    yield Point(name, step, time, float(row[name]))
            yield Point("skipped", step, time, float(int(row["flags"]) & SKIPPED))
    with client.export(run["id"], "metrics") as text:
        for row in csv.DictReader(lines_of(text)):
            time = started + int(row["elapsed_ms"]) / 1000
            yield Point(_apart(row["name"]), int(row["step"]), time, float(row["value"]))


def _apart(name: str) -> str:
    """Return a logged number's name, prefixed if it collides with a column."""
    return f"logged/{name}" if name in (*COLUMNS, "skipped") else name
