"""Tables of DuckDB with the runs of a server, fetched by its API as far as a query reads them.

Steps and metrics come as Parquet files, one for each run, and are cached by the run's revision.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from halfstep.client import Client
from halfstep.session.nesting import flat

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ListedRun

_FLOATS = ("loss", "scale", "grad_norm", "grad_norm_clipped", "lr")
#: Columns of the tables, with the types of DuckDB.
TABLES: dict[str, dict[str, str]] = {
    "runs": {
        "id": "BIGINT",
        **dict.fromkeys(("name", "source", "project", "recipe", "precision"), "VARCHAR"),
        **dict.fromkeys(("status", "outcome", "owner", "error", "damage"), "VARCHAR"),
        "tags": "VARCHAR[]",
        **dict.fromkeys(("parent_id", "group_id", "step", "steps_total", "skipped"), "BIGINT"),
        **dict.fromkeys(("loss", "scale", "steps_per_second", "seconds"), "DOUBLE"),
        **dict.fromkeys(("created_at", "started_at", "ended_at"), "TIMESTAMP"),
        "stored_bytes": "BIGINT",
    },
    "settings": {"run_id": "BIGINT", "name": "VARCHAR", "value": "VARCHAR", "number": "DOUBLE"},
    "steps": {
        **dict.fromkeys(("run_id", "step", "elapsed_ms", "step_us"), "BIGINT"),
        **dict.fromkeys(_FLOATS, "DOUBLE"),
        **dict.fromkeys(("flags", "data_us"), "BIGINT"),
    },
    "metrics": {
        "run_id": "BIGINT",
        "name": "VARCHAR",
        "step": "BIGINT",
        "value": "DOUBLE",
        "elapsed_ms": "BIGINT",
    },
}
EXPORTED = ("steps", "metrics")


def cache_folder() -> Path:
    """Return the folder of the fetched files."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halfstep" / "query"


class Views:
    """The tables of a server's runs. runs_filter: only the runs that it finds."""

    def __init__(self, client: Client, runs_filter: str = "") -> None:
        self._client, self._filter = client, runs_filter
        self._connection = duckdb.connect()
        server = hashlib.sha256(client.url_of("").encode()).hexdigest()[:16]
        self._folder = cache_folder() / server

    def execute(self, sql: str) -> duckdb.DuckDBPyConnection:
        """Return the result of a query, after its tables were fetched. Raises duckdb.Error."""
        for name, columns in TABLES.items():
            listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
            self._connection.execute(f"CREATE OR REPLACE TABLE {name} ({listed})")
        names = self._connection.get_table_names(sql) & TABLES.keys()
        runs = list(self._client.runs(self._filter)) if names else []
        self._folder.mkdir(parents=True, exist_ok=True)
        if "runs" in names:
            self._insert("runs", (_run_row(run) for run in runs))
        if "settings" in names:
            self._insert("settings", (row for run in runs for row in self._settings(run)))
        for name in EXPORTED:
            if name in names:
                self._show_files(name, runs)
        return self._connection.execute(sql)

    def _insert(self, name: str, rows: Iterator[dict[str, object]]) -> None:
        path = self._folder / f".{name}-{os.getpid()}.jsonl"
        try:
            with path.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            rows_of = "SELECT * FROM read_json(?, format = ?, columns = ?)"
            query = f"INSERT INTO {name} {rows_of}"
            self._connection.execute(query, [str(path), "newline_delimited", TABLES[name]])
        finally:
            path.unlink(missing_ok=True)

    def _show_files(self, name: str, runs: "list[ListedRun]") -> None:
        """Replace a table by a view of the files of runs, each with the id of its run."""
        files = {str(self._fetch(run, f"{name}.parquet")): run["id"] for run in runs}
        if not files:
            return
        owners = ", ".join(f"({_quote(path)}, {run_id})" for path, run_id in files.items())
        columns = ", ".join(f"file.{column}" for column in TABLES[name] if column != "run_id")
        listed = ", ".join(map(_quote, files))
        self._connection.execute(f"DROP TABLE {name}")
        self._connection.execute(
            f"CREATE VIEW {name} AS SELECT owner.run_id, {columns} "  # noqa: S608 - our own names
            f"FROM read_parquet([{listed}], filename = true) AS file "
            f"JOIN (VALUES {owners}) AS owner (path, run_id) ON owner.path = file.filename"
        )

    def _settings(self, run: "ListedRun") -> Iterator[dict[str, Any]]:
        path = self._get_cache_path(run, "settings.json")
        if not path.exists():
            config = self._client.run(run["id"])["config"]
            self._put(path, run, [json.dumps(config).encode()])
        for setting, value in flat(json.loads(path.read_bytes())).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            shown = value if isinstance(value, str) else json.dumps(value)
            number = value if is_number else None
            yield {"run_id": run["id"], "name": setting, "value": shown, "number": number}

    def _fetch(self, run: "ListedRun", name: str) -> Path:
        path = self._get_cache_path(run, name)
        if not path.exists():
            with self._client.export_file(run["id"], name) as pieces:
                self._put(path, run, pieces)
        return path

    def _get_cache_path(self, run: "ListedRun", name: str) -> Path:
        return self._folder / f"{run['id']}-{run['revision']}-{name}"

    def _put(self, path: Path, run: "ListedRun", pieces: Iterable[bytes]) -> None:
        """Write a file of the cache, and delete those of earlier revisions of its run."""
        partial = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            with partial.open("wb") as file:
                file.writelines(pieces)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        end = path.name.removeprefix(f"{run['id']}-{run['revision']}-")
        for earlier in self._folder.glob(f"{run['id']}-*-{end}"):
            if earlier != path:
                earlier.unlink(missing_ok=True)


def _run_row(run: "ListedRun") -> dict[str, Any]:
    row: dict[str, Any] = {name: run.get(name) for name in TABLES["runs"]}
    for name, kind in TABLES["runs"].items():
        if kind == "TIMESTAMP" and row[name] is not None:
            moment = datetime.fromtimestamp(row[name], UTC)
            row[name] = moment.replace(tzinfo=None).isoformat(sep=" ")
    return row


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
