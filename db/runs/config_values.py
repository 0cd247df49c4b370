"""Settings of runs as rows, so that run lists can filter by any of them."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from sqlalchemy import delete, insert
from sqlalchemy.orm import Session

from db.tables import Run, RunConfigValue
from halfstep.telemetry.plain_json import JsonObject

#: Limits for arbitrary configurations: settings, path length that PostgreSQL can index, and length
#: to which texts are cut.
MOST, PATH_CHARACTERS, TEXT_CHARACTERS = 1000, 200, 200


def note(session: Session, run: Run) -> None:
    """Replace the stored settings of a run."""
    session.execute(delete(RunConfigValue).where(RunConfigValue.run_id == run.id))
    if rows := rows_of(run):
        session.execute(insert(RunConfigValue), rows)


def note_script(session: Session, run: Run, config: JsonObject) -> None:
    """Replace the configuration that a command's script reported, and the settings."""
    run.script_config = config
    note(session, run)


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a run's settings."""
    # {"a.b": 1, "a": {"b": 2}} has the same path twice.
    values = dict(islice(_flat(run.whole_config), MOST))
    return [
        {"run_id": run.id, "path": path, "name": path.rpartition(".")[2], **_value(value)}
        for path, value in values.items()
    ]


def _flat(config: Mapping[Any, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif len(path) <= PATH_CHARACTERS:
            yield path, value


def _value(value: object) -> dict[str, object]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return {"number": float(value), "text": None}
        except OverflowError:  # an earlier version accepted any number
            return {"number": None, "text": None}
    text = value if isinstance(value, str) else json.dumps(value)
    return {"number": None, "text": text[:TEXT_CHARACTERS]}
