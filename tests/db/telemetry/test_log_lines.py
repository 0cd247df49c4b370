"""Lines of the log in the database, and the files with all lines."""

from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from db.database import Database
from db.files import artifacts, pruning
from db.files.pruning import Rules
from db.runs import runs
from db.runs.trash import DAY_SECONDS
from db.tables import Run, Status
from db.telemetry import series, telemetry
from db.telemetry.telemetry import LogRow
from halfstep.telemetry.events import LogPart


def test_the_database_keeps_a_bounded_number_of_lines(
    database: Database, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the newest lines are kept, with a note of the numbers of those between."""
    monkeypatch.setattr(telemetry, "FIRST_LINES", 10)
    monkeypatch.setattr(telemetry, "MOST_LINES", 100)
    monkeypatch.setattr(telemetry, "LINES_PER_CHECK", 50)
    last = 0
    for _flush in range(40):
        lines = [LogRow(attempt=1, time=0.0, stream="stdout", text="x") for _ in range(30)]
        for line in lines:
            last = telemetry.number_line(line, last)
        with database.writing() as session:
            telemetry.record(session, running.id, 1, telemetry.Flush(log_lines=lines))
    with database.reading() as session:
        kept = series.log_lines(session, running.id, most=2000)
    assert 100 <= len(kept) <= 200
    numbers = [line.number for line in kept]
    assert (numbers[:10], numbers[-1]) == (list(range(1, 11)), 1200)
    assert kept[10].text == f"[lines 11 to {kept[10].number:,} are in the file of the log only]"
    assert numbers[10:] == list(range(kept[10].number, 1201))


def test_files_of_the_log_go_with_its_lines(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Retention of logs deletes their rows, bytes and files."""
    store, key = LocalStore(tmp_path), f"runs/{running.id}/log/attempt-0001-000001.txt.gz"
    obstore.put(store, key, b"x" * 10)
    path = "log/attempt-0001-000001.txt.gz"
    event = artifacts.log_artifact(LogPart(path=path, size_bytes=10, sha256=""))
    line = {"number": 1, "attempt": 1, "time": 0.0, "stream": "stdout", "text": "x"}
    with database.writing() as session:
        artifacts.publish(session, running.id, 1, event, key)
        telemetry.record(session, running.id, 1, telemetry.Flush(log_lines=[LogRow(**line)]))
        run = runs.get(session, running.id)
        assert (run.stored_bytes, artifacts.count(session, run.id)) == (10, 0)
        run.status, run.ended_at = Status.FINISHED, run.created_at - 40 * DAY_SECONDS
    pruned = pruning.prune(database, store, running.id, Rules(log_days=30))
    assert (pruned.stored_bytes, pruned.log_lines) == (10, 1)
    with database.reading() as session:
        assert artifacts.log_files(session, running.id) == []
        assert runs.get(session, running.id).stored_bytes == 0
    assert not (tmp_path / key).exists()
