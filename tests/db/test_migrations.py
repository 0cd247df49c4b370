"""Migrations of databases that have rows, there and back."""

import io
import json
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Boolean,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    func,
    insert,
    select,
)

from db import accounts, checkpoints, ingest
from db.database import Database
from db.pyramid import SIZES, STEP_SERIES
from db.summaries import layout
from db.tables import Artifact, Run, StepBucket, Worker
from db.windows import window
from halfstep.spool import UNKNOWN_US
from tests.db.conftest import submit, submit_command
from tests.db.telemetry_made import make_steps, record
from tests.db.test_checkpoints import saved

REVISIONS = [
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0013",
    "0016",
]


def a_value(column: Any) -> Any:
    """Something of a column's type; what is a key points to the first row."""
    if isinstance(column.type, Boolean):
        return True
    if isinstance(column.type, Integer):
        return 1
    if isinstance(column.type, Float):
        return 1.0
    if isinstance(column.type, JSON):
        return []
    return b"x" if isinstance(column.type, LargeBinary) else "x"


def tables(database: Database) -> list[Table]:
    """The tables as they are now, those that others point to first."""
    metadata = MetaData()
    metadata.reflect(database.engine)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def counts(database: Database) -> dict[str, int]:
    found = tables(database)
    with database.engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in found
        }


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_outlive_every_migration(database: Database, revision: str) -> None:
    """From each revision to the newest and back to the first, rows of all tables are kept."""
    config = database.migrations()
    command.downgrade(config, "base")
    command.upgrade(config, revision)
    found = tables(database)
    with database.engine.begin() as connection:
        for table in found:
            row = {column.name: a_value(column) for column in table.columns}
            connection.execute(insert(table).values(row))
    filled = counts(database)
    assert set(filled.values()) == {1}
    for go, target in ((command.upgrade, "head"), (command.downgrade, "0001")):
        go(config, target)
        kept = counts(database)
        assert all(count == 1 for name, count in kept.items() if name in filled)
    command.upgrade(config, "head")


def test_every_revision_is_tried() -> None:
    """A new revision stands in this module's list."""
    script = ScriptDirectory.from_config(Database("sqlite:///unused.db").migrations())
    assert [each.revision for each in script.walk_revisions()][::-1] == REVISIONS


@pytest.mark.only_on("sqlite")
def test_foreign_keys_are_on_after_a_migration(database: Database) -> None:
    """They are off while tables are built anew, and no longer."""
    database.migrate()
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


def test_workers_that_were_there_keep_their_recipes(database: Database) -> None:
    """What a worker offers is found in what it had said of itself."""
    recipes = [{"name": "digits", "schema": {}}, {"name": "broken", "error": "no"}]
    who: dict[str, Any] = {"name": "w", "host": "h", "pid": 1, "devices": [], "versions": {}}
    with database.writing() as session:
        session.add(Worker(**who, recipes=recipes))
    for go, target in ((command.downgrade, "0005"), (command.upgrade, "head")):
        go(database.migrations(), target)
    with database.reading() as session:
        assert session.scalars(select(Worker)).one().recipe_names == ["digits"]


@pytest.mark.only_on("postgresql")
def test_sql_is_printed_without_a_change(database: Database) -> None:
    """Who may not let a program alter a database gets what it would do."""
    text = io.StringIO()
    command.upgrade(database.migrations(text), "0001:head", sql=True)
    assert "CREATE INDEX ix_metrics_run_id_id ON metrics (run_id, id)" in text.getvalue()
    assert "'0016'" in text.getvalue()


def test_a_watched_run_is_one_that_an_earlier_version_can_list(database: Database) -> None:
    """It reads a precision out of each configuration; a watched run's may hold anything."""
    with database.writing() as session:
        owner = accounts.user_named(session, "ada")
        what: dict[str, Any] = {"name": "n", "project": "", "tags": "", "host": "", "versions": {}}
        ingest.begin(session, owner, "0" * 32, 1, config={"a": 1}, started_at=0.0, **what)
    command.downgrade(database.migrations(), "0008")
    [runs, nodes] = [each for each in tables(database) if each.name in ("runs", "run_nodes")]
    with database.engine.connect() as connection:
        config = connection.execute(select(runs.c.config)).scalar_one()
        assert connection.execute(select(nodes)).all() == []
    assert "precision" in (json.loads(config) if isinstance(config, str) else config)
    command.upgrade(database.migrations(), "head")


def test_an_earlier_version_neither_waits_for_a_command_nor_runs_it(database: Database) -> None:
    """One in the queue is over, and its row is kept as one of a run that is watched."""
    with database.writing() as session:
        submit_command(session, accounts.user_named(session, "ada"))
    command.downgrade(database.migrations(), "0009")
    [runs] = [each for each in tables(database) if each.name == "runs"]
    with database.engine.connect() as connection:
        [row] = connection.execute(select(runs)).mappings()
    assert (row["source"], row["status"]) == ("watch", "cancelled")
    assert row["ended_at"] == row["created_at"]
    command.upgrade(database.migrations(), "head")


def test_steps_of_before_have_no_wait_and_summaries_are_read_both_ways(
    database: Database, running: Run
) -> None:
    """There and back the numbers that the version before knew are the same, to the byte."""
    steps = make_steps([1.0] * 70)
    steps["data_us"] = UNKNOWN_US
    record(database, running, steps)
    buckets = select(StepBucket.summary).order_by(StepBucket.size, StepBucket.bucket)
    with database.reading() as session:
        whole = window(session, running.id)
        summaries = session.scalars(buckets).all()
    command.downgrade(database.migrations(), "0010")
    [table] = [each for each in tables(database) if each.name == "steps"]
    assert "data_us" not in table.columns
    with database.engine.connect() as connection:
        before = [bytes(each) for each in connection.execute(buckets).scalars()]
    for short, long, size in zip(before, summaries, (64, 64, *SIZES[1:]), strict=True):
        assert short == long[: layout(STEP_SERIES[:-1], size).itemsize]
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        assert window(session, running.id) == whole
    record(database, running, make_steps([1.0] * 10, first=71))
    with database.reading() as session:
        drawn = window(session, running.id)
    assert drawn is not None
    assert drawn.series["data_us"].y[-1] == 80 % 11 * 40
    assert drawn.series["data_us"].y[:70] == [None] * 70


def test_what_files_take_is_added_up_and_an_erased_run_is_one_to_list(
    database: Database, running: Run
) -> None:
    """Files that the server does not have count nothing; an earlier version finds a name."""
    with database.writing() as session:
        for step, key in ((10, "a"), (20, "b"), (30, "")):
            checkpoints.publish(session, running.id, 1, saved(step), [key])
        session.add(Artifact(run_id=running.id, name="n", step=1, key="c", size_bytes=5, sha256=""))
        other = submit(session, accounts.user_named(session, "ada"))
        other.name, other.erased_at = "", 1.0
    command.downgrade(database.migrations(), "0011")
    [runs] = [each for each in tables(database) if each.name == "runs"]
    assert "stored_bytes" not in runs.columns
    with database.engine.connect() as connection:
        rows = connection.execute(select(runs.c.source, runs.c.name).order_by(runs.c.id)).all()
    assert [tuple(row) for row in rows] == [("recipe", "digits-fp16"), ("watch", "deleted")]
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        sizes = session.scalars(select(Run.stored_bytes).order_by(Run.id)).all()
    assert sizes == [25, 0]
