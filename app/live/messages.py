"""Messages of the live streams, one class per stream; the browser reads them with these names.

A field that is UNSET is left out. `encode` writes one as the data of a server-sent event.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from halfstep.telemetry.plain_json import JsonObject


class Message(Struct, frozen=True, kw_only=True):
    """Base class of all messages."""


class TableRows(Message, frozen=True, kw_only=True):
    """Changed rows of a table of the page."""

    html: str  # a table of these rows only
    # Of all rows, in order; UNSET: rows stay, and new ones come first.
    keys: list[str] | UnsetType = UNSET
    most: int | UnsetType = UNSET  # number of rows that stay


class RunMessage(Message, frozen=True, kw_only=True):
    """Changes of one run; the parts that the stream's reader requested."""

    run: JsonObject  # app.runs.summary.RunSummary
    is_over: bool  # the last message
    resumptions: dict[int, int]  # by attempt, the last step before its own
    labels: int  # mark of name, tags and note: another one if they have changed
    diagnosed: list[str]  # kinds of the new diagnoses
    spikes: list[JsonObject] | UnsetType = UNSET  # the latest of the run, if there are new ones
    steps: dict[str, list[Any]] | UnsetType | None = (
        UNSET  # columns of new steps; None: no new ones
    )
    # New rows: app.telemetry's Event, MetricPoint, LogLine, and CheckpointFileRow.
    events: list[JsonObject] | UnsetType = UNSET
    metrics: list[JsonObject] | UnsetType = UNSET
    # False: there are points of earlier flushes too, which the reader has to read again.
    has_all_metrics: bool = True
    metric_names: int | UnsetType = UNSET  # names of all metrics, if some have new points
    log: list[JsonObject] | UnsetType = UNSET
    checkpoints: list[JsonObject] | UnsetType = UNSET
    # HTML of the page's changed parts, and of the changed rows of its tables, by name.
    fragments: dict[str, str] | UnsetType = UNSET
    rows: dict[str, TableRows] | UnsetType = UNSET


class RunEnd(Message, frozen=True, kw_only=True):
    """The last message of a run's stream that has nothing new."""

    is_over: bool = True


class ListMessage(Message, frozen=True, kw_only=True):
    """Changes of the list of runs."""

    newest: int  # id of the newest run
    is_worker_up: bool
    rows: dict[int, str]  # HTML of the changed rows, by run id
    facts: str | UnsetType = UNSET  # HTML of the facts above the list


class SweepMessage(Message, frozen=True, kw_only=True):
    """A sweep has changed: the page is read again."""

    mark: str


class WorkersMessage(Message, frozen=True, kw_only=True):
    """Changed rows of the workers page."""

    html: str
    keys: list[str]  # ids of all workers, in order


def encode(message: Message) -> str:
    """Return the JSON of a message."""
    return msgspec.json.encode(message).decode()
