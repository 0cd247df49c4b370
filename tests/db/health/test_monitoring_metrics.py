"""Metrics for monitoring systems, on both databases."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import event

from db.database import Database
from db.files import erasure
from db.files.object_store import open_store
from db.health import monitoring_metrics
from db.health.monitoring_metrics import Readings
from db.queue import queue
from db.runs import runs, trash
from db.settings import Settings
from db.tables import Run, Status, User, Worker
from db.telemetry import telemetry
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit, submit_command
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.spool_made import event_of

ROLLED_BACK: dict[str, Any] = {
    **{"event": "rolled_back", "step": 4, "from_step": 9, "spike": 6},
    **{"loss": 9.0, "z": 8.0, "examples": 10, "rollbacks": 1},
}


def read(database: Database, **limit: int) -> Readings:
    with database.reading() as session:
        return monitoring_metrics.read(session, **limit)


def test_queued_runs_are_counted_by_why_they_wait(database: Database, ada: User) -> None:
    """Each queued run counts by its hardest obstacle, or as no_worker if there is no worker."""
    with database.writing() as session:
        first = submit(session, ada)
        submit(session, ada, after_id=first.id)
        submit(session, ada, recipe="unknown")
        submit(session, ada, nodes=2)
        submit_command(session, ada)
    assert read(database).queued == {"no_worker": 5}
    worker = add_worker(database, "w", [DIGITS], [CPU])
    assert read(database).queued == {"device": 1, "after_another": 1, "not_offered": 3}
    add_worker(database, "commands", [], [CPU], offers_commands=True)
    assert read(database).queued == {"device": 2, "after_another": 1, "not_offered": 2}
    with database.writing() as session:
        assert claim(session, worker) is not None
        submit(session, ada)
    assert read(database, runs_per_user=1).queued["owners_limit"] == 2
    assert sum(read(database).queued.values()) == 5


def test_devices_workers_and_runs(database: Database, ada: User) -> None:
    """Devices, workers and runs are counted by kind and status; a lost worker's run holds none."""
    gpu = {**CPU, "kind": "cuda", "bf16": True}
    worker = add_worker(database, "gpus", [DIGITS], [gpu, {**gpu, "index": 1}])
    add_worker(database, "cpu", [DIGITS], [CPU])
    with database.writing() as session:
        submit(session, ada)
        claim(session, worker, free_devices=[1])
    found = read(database)
    assert (found.workers, found.devices, found.busy) == (2, {"cuda": 2, "cpu": 1}, {"cuda": 1})
    assert found.runs == {Status.STARTING: 1}
    with database.writing() as session:
        session.get_one(Worker, worker.id).seen_at = 0.0
    found = read(database)
    assert (found.workers, found.devices, found.busy) == (1, {"cpu": 1}, {})


@pytest.mark.slow
def test_counters_never_decrease(
    database: Database, running: Run, ada: User, tmp_path: Path
) -> None:
    """Repeated flushes, rollbacks, the trash and purges do not decrease a counter."""
    for _ in range(2):
        record(database, running, make_steps([1.0] * 9, skipped=[3, 6]))
    found = read(database)
    assert (found.steps, found.skips) == (9, 2)
    with database.writing() as session:
        telemetry.take_back(session, running.id, running.attempt, event_of(ROLLED_BACK))
    assert read(database).steps == 9
    record(database, running, make_steps([1.0] * 6, first=5, skipped=[5]))
    found = read(database)
    assert (found.steps, found.skips) == (15, 3)
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
        trash.delete(session, running.id, ada)
        trash.erase(session, running.id, ada)
    assert read(database).runs[Status.FINISHED] == 0
    settings = Settings(data=tmp_path)
    erasure.erase(database, settings, open_store(settings), running.id, Event())
    with database.reading() as session:
        assert session.get_one(Run, running.id).erased_at is not None
    found = read(database)
    assert (found.steps, found.skips) == (15, 3)


def test_queries_are_nine_however_many_runs_there_are(database: Database, ada: User) -> None:
    """Metrics take nine queries for any number of runs."""
    add_worker(database, "w", [DIGITS], [CPU])
    made: list[str] = []
    with database.writing() as session:
        for _ in range(50):
            submit(session, ada)
        runs.set_status(session, session.get_one(Run, 1), Status.CANCELLED)

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        made.extend([] if statement.startswith("BEGIN") else [statement])

    event.listen(database.engine, "before_cursor_execute", note)
    assert read(database).queued == {"device": 49}
    event.remove(database.engine, "before_cursor_execute", note)
    assert len(made) == 9
