"""`halfstep query`: SQL over the recorded data of a server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from db.database import Database
from db.tables import Run
from halfstep import Client
from halfstep.cli.commands import query as command
from tests.db.telemetry.telemetry_made import make_metric, record
from tests.halfstep.api_client.conftest import STEPS
from tests.site import type_command

pytest.importorskip("duckdb")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloaded files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halfstep" / "query"


@pytest.fixture
def ask(client: Client, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a query and returns its rows."""

    def rows(sql: str, *options: str) -> list[dict[str, Any]]:
        assert type_command("query", sql, "--json", *options) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows


def test_runs_settings_steps_and_metrics_are_tables(
    ask: Any, client: Client, database: Database, recorded: Run
) -> None:
    """The query's tables have all recorded data with the run's id, NaN and infinity as values."""
    record(database, recorded, events=[make_metric(7, value) for value in (0.5,)])
    [row] = ask("SELECT count(*) AS n, max(step) AS last, sum(flags & 1) AS skips FROM steps")
    assert (row["n"], row["last"], row["skips"]) == (STEPS, STEPS, 1)
    [row] = ask(
        "SELECT r.name, r.status, m.value, s.number AS size FROM runs r JOIN metrics m"
        " ON m.run_id = r.id AND m.name = 'val/accuracy' JOIN settings s"
        " ON s.run_id = r.id AND s.name = 'training.batch_size' WHERE m.step = 7"
    )
    detail = client.run(recorded.id)
    assert (row["name"], row["status"], row["value"]) == (detail["name"], "running", 0.5)
    assert row["size"] == detail["config"]["training"]["batch_size"]
    losses = [each["loss"] for each in ask("SELECT loss FROM steps ORDER BY step LIMIT 10")]
    assert losses[9] == "Infinity"


def test_files_are_fetched_once_for_each_revision(
    ask: Any, database: Database, recorded: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query fetches only the files that it reads; a later revision replaces them."""
    ask("SELECT id FROM runs")
    assert list(cache.glob("*/*")) == []
    count = "SELECT count(*) AS n FROM metrics"
    [before] = ask(count)
    [first] = cache.glob("*/*.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(Client, "export_file", None)
        assert ask(count) == [before]
    record(database, recorded, events=[make_metric(8, 0.25)])
    assert ask(count) == [{"n": before["n"] + 1}]
    [second] = cache.glob("*/*.parquet")
    assert second != first


def test_a_filter_limits_the_runs(ask: Any) -> None:
    """`--filter` limits a query like the page of runs; without a match there are no rows."""
    assert ask("SELECT count(*) AS n FROM steps", "--filter", "status:failed") == [{"n": 0}]
    assert ask("SELECT count(*) AS n FROM runs", "--filter", "status:running") == [{"n": 1}]


def test_a_table_is_printed(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """A printed query result has the names of its columns."""
    assert type_command("query", "SELECT id AS run, 0.5 AS half FROM runs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "half"]
    assert lines[-1].split() == ["1", "0.5"]


def test_a_wrong_query_is_named(client: Client) -> None:
    """An invalid query gets DuckDB's error."""
    message = type_command("query", "SELECT lost FROM steps")
    assert isinstance(message, str)
    assert "lost" in message


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `query`, the error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(SystemExit, match=r"duckdb is required: pip install 'halfstep\[query\]'"):
        command.app(["SELECT 1"], standalone_mode=False)
