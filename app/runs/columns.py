"""The columns of the list of runs: those available, and those that a URL selects."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from sqlalchemy.orm import Session

from app.http.parameters import flaw
from app.submission import config_schema
from db.errors import Invalid
from db.runs import groups
from db.runs.run_filters import METRICS, TAKEN, qualify, values_of
from db.tables import Run

NEWEST_FIRST = "-id"
#: The order of rows while the list is newest first: runs that have not ended come first.
ACTIVE_FIRST = "-active"
TABLE, CHARTS = "table", "charts"
MOST_COLUMNS, NAME_CHARACTERS = 24, 200


@dataclass(frozen=True)
class Column:
    """A column of the list."""

    name: str  # in URLs
    label: str  # in the table header
    sort: str = ""  # name of its order; empty if the list cannot be sorted by it
    kind: str = ""  # CSS class of its cells

    @property
    def is_own(self) -> bool:
        """Whether the column shows a setting or a metric."""
        return self.name not in BUILT_IN


BUILT_IN: MappingProxyType[str, Column] = MappingProxyType(
    {
        column.name: column
        for column in (
            Column("name", "Name", "name"),
            Column("status", "Status", "status"),
            Column("step", "Step", "step"),
            Column("loss", "Loss", "loss"),
            Column("scale", "Scale", "scale", "number"),
            Column("health", "Scale health"),
            Column("skipped", "Skipped", "skipped", "number"),
            Column("speed", "Steps/s", "steps_per_second", "number"),
            Column("owner", "Owner", "owner"),
            Column("created", "Created", "id", "number"),
            Column("duration", "Duration", "duration", "number"),
            Column("tags", "Tags", "tags"),
            Column("project", "Project", "project"),
            Column("recipe", "Recipe", "recipe"),
            Column("precision", "Precision", "precision"),
            Column("source", "Source", "source"),
            Column("priority", "Priority", "priority", "number"),
            Column("attempt", "Attempt", "attempt", "number"),
            Column("size", "On disk", "stored_bytes", "number"),
            Column("device", "Device"),
        )
    }
)
DEFAULT = (
    "name",
    "status",
    "step",
    "loss",
    "scale",
    "health",
    "skipped",
    "precision",
    "duration",
    "speed",
    "owner",
    "tags",
    "created",
)
#: Default columns that depend on the listed runs come after this one.
BEFORE_OWN = "skipped"
#: Settings without a default column: they differ in most runs, or have a column of their own.
# "enabled" says nothing without the group of its setting.
NEVER_DEFAULT = ("seed", "steps", "precision", "epochs", "enabled")


def chosen(text: str) -> list[Column]:
    """Return the columns of a comma-separated list; always with the name.

    Other names are settings or metrics. Raises Invalid.
    """
    if wrong := flaw(text):
        raise Invalid({"columns": f"{wrong}; allowed: comma-separated names"})
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(","))))) or [*DEFAULT]
    if len(names) > MOST_COLUMNS:
        raise Invalid({"columns": f"{len(names)} columns; allowed: at most {MOST_COLUMNS}"})
    for name in names:
        if len(name) > NAME_CHARACTERS:
            text = f"{name[:100]!r} has {len(name)} characters; allowed: at most {NAME_CHARACTERS}"
            raise Invalid({"columns": text})
    names = ["name", *(name for name in names if name != "name")]
    return [BUILT_IN.get(name) or Column(name, _label(name), name, "number") for name in names]


def _label(name: str) -> str:
    """Return the header of a setting or a metric; both names of the learning rate have one."""
    return "lr" if name == "learning_rate" else name


def usual(some_runs: Sequence[Run], metrics: Sequence[str]) -> list[Column]:
    """Return the default columns for these runs: with their first metric and differing setting.

    metrics: the first metric of each run that has one.
    """
    names = [*DEFAULT]
    position = names.index(BEFORE_OWN) + 1
    names[position:position] = [*_first_metric(metrics), *_first_difference(some_runs)]
    return chosen(",".join(names))


def _first_metric(metrics: Sequence[str]) -> list[str]:
    """Return the metric that most runs have."""
    most_common = Counter(name for name in metrics if _is_short(name)).most_common(1)
    return [qualify(name, METRICS) for name, _count in most_common]


def _is_short(name: str) -> bool:
    return "," not in name and len(name) <= 40


def _first_difference(some_runs: Sequence[Run]) -> list[str]:
    """Return the first setting that differs between runs; the learning rate before all others."""
    values: dict[str, set[str]] = {}
    for run in some_runs:
        for path, value in config_schema.flat(run.config):
            values.setdefault(path, set()).add(repr(value))
    paths_called = Counter(path.rpartition(".")[2] for path in values)
    names = [
        name
        for path, different in values.items()
        if len(different) > 1
        and _can_be_default(name := path.rpartition(".")[2])
        # A column is addressed by the last part of the path, so it must be unique.
        and paths_called[name] == 1
    ]
    names.sort(key=lambda name: name not in ("learning_rate", "lr"))
    return names[:1]


def _can_be_default(name: str) -> bool:
    return name not in (*NEVER_DEFAULT, *BUILT_IN, *TAKEN) and _is_short(name)


def address(columns: Sequence[Column]) -> str:
    """Return the URL value for these columns; empty for the default."""
    names = [column.name for column in columns]
    return "" if names == [*DEFAULT] else ",".join(names)


def list_address(**parts: object) -> str:
    """Return a URL of the list; filter, sort, columns, group, view and a position are optional."""
    query = {name: value for name, value in parts.items() if value}
    for name, default in (("sort", NEWEST_FIRST), ("view", TABLE)):
        if query.get(name) == default:
            del query[name]
    return f"/runs?{urlencode(query)}" if query else "/runs"


def values(
    session: Session, run_ids: Collection[int], columns: Sequence[Column]
) -> dict[int, dict[str, object]]:
    """Return the values of runs in columns that summaries do not have."""
    rows: dict[int, dict[str, Any]] = {run_id: {} for run_id in run_ids}
    for column in columns:
        if column.name == "device":
            column_values: dict[int, object] = dict(groups.devices(session, run_ids))
        elif column.is_own:
            column_values = dict(values_of(session, list(run_ids), column.name))
        else:
            continue
        for run_id, value in column_values.items():
            rows[run_id][column.name] = value
    return rows
