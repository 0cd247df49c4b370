"""Fixtures of runs and workers."""

from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from db.database import Database
from db.queue import claims, queue, workers
from db.runs import runs
from db.tables import Run, User, WatchedAttempt, Worker
from db.telemetry import ingest

CPU = {"kind": "cpu", "index": 0, "memory_bytes": 8 * 2**30, "fp16": True, "bf16": False}
DIGITS = {"name": "digits", "title": "Digits", "description": "", "schema": {"type": "object"}}


#: Folders and modules of rows that are stored and read again, without a query or lock of their own.
SAMPLED = {"access", "alerts", "files", "health"}
SAMPLED |= {"test_curves.py", "test_run_metadata.py", "test_runs.py", "test_trash.py"}
#: Modules about bytes in rows, or about rows of one run: what is about SQL is marked there.
SAMPLED |= {"test_metric_blocks.py", "test_metric_conversion.py", "test_quotas.py"}
SAMPLED |= {"test_recorded_losses.py", "test_run_control.py", "test_step_blocks.py"}
SAMPLED |= {"test_step_conversion.py"}
#: Modules whose tests vary the values of one statement, or the shape of what it returns.
SAMPLED |= {"test_comparisons.py", "test_environments.py", "test_export.py"}
SAMPLED |= {"test_grouping.py", "test_log_lines.py", "test_series.py"}


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Run database tests on both databases in `make test`, some modules on the first only."""
    if isinstance(collector, pytest.Module):
        is_sampled = not SAMPLED.isdisjoint(collector.path.parts)
        collector.add_marker("sql_sample" if is_sampled else "sql")


def config(steps: int = 100, precision: str = "fp16", **training: Any) -> dict[str, Any]:
    return {"precision": precision, "training": {"steps": steps, **training}}


def submit(session: Session, owner: User, **changes: Any) -> Run:
    values: dict[str, Any] = {"recipe": "digits", "config": config()}
    return runs.submit(session, owner, Run(**(values | changes)))


def submit_command(session: Session, owner: User, line: str = "true", **changes: Any) -> Run:
    """Queue a command; changes: values of the row or of the command."""
    command = {"line": line, "folder": "", "git": "", "commit": "", "venv": ""}
    command |= {"variables": {}, "secrets": [], "parameters": {}, "sources": {}}
    command |= {name: changes.pop(name) for name in command.keys() & changes.keys()}
    values: dict[str, Any] = {"name": "script", "command": command, "config": {}}
    return runs.submit(session, owner, Run(**(values | changes)))


def make_watched(
    session: Session, owner: User, key: str = "0" * 32, **changes: Any
) -> WatchedAttempt:
    """Begin a watched run."""
    values: dict[str, Any] = {"name": "n", "project": "", "config": {}, "tags": "", "host": ""}
    values |= {"started_at": 0.0, "versions": {}}
    return ingest.begin(session, owner, key, 1, **(values | changes))


def claim(session: Session, worker: Worker, **changes: Any) -> Run | None:
    values: dict[str, Any] = {
        "recipes": ["digits"],
        "precisions": ["fp32", "fp16"],
        "free_devices": range(64),
        "lease_seconds": 60.0,
    }
    return claims.claim(session, worker.id, **(values | changes))


def add_worker(
    database: Database,
    name: str,
    recipes: list[dict[str, Any]],
    devices: list[dict[str, Any]] | None = None,
    *,
    offers_commands: bool = False,
) -> Worker:
    offer: dict[str, Any] = {"devices": devices or [], "recipes": recipes, "versions": {}}
    offer["offers_commands"] = offers_commands
    with database.writing() as session:
        return workers.register(session, name=name, host="host", pid=1, **offer)


@pytest.fixture
def worker(database: Database) -> Worker:
    """A worker that offers digits."""
    return add_worker(database, "w1", [DIGITS], [CPU])


@pytest.fixture
def running(database: Database, ada: User, worker: Worker) -> Run:
    """A run in its first attempt."""
    with database.writing() as session:
        submit(session, ada)
        run = claim(session, worker)
        assert run is not None
        queue.start(session, run.id, run.attempt)
        return run


def is_blocked(database: Database) -> bool:
    """Return whether a connection waits for another one's lock."""
    waits = select(func.count()).select_from(text("pg_stat_activity"))
    waits = waits.where(text("wait_event_type = 'Lock' AND datname = current_database()"))
    with database.reading() as session:
        return bool(session.scalar(waits))
