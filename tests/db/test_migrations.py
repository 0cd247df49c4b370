"""Migrations of databases that have rows, there and back."""

import io
import json
from collections.abc import Collection, Iterable
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
    delete,
    func,
    insert,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.exc import DatabaseError

from db.access import accounts, audit
from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.runs import views
from db.tables import (
    AlertRule,
    ApiToken,
    Artifact,
    AuditEvent,
    LatestMetric,
    MetricBucket,
    Run,
    RunConfigValue,
    Status,
    StepBucket,
    Sweep,
    User,
    Worker,
)
from db.telemetry import ingest
from db.telemetry.pyramid import SIZES, STEP_SERIES
from db.telemetry.summaries import layout
from db.telemetry.windows import measured, window
from halfstep.telemetry.spool import UNKNOWN_US
from tests.db.conftest import submit, submit_command
from tests.db.files.test_checkpoints import saved
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.spool_made import checkpoint_of

pytestmark = pytest.mark.slow

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
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
    "0017",
    "0018",
    "0019",
    "0020",
    "0021",
    "0022",
    "0023",
    "0024",
    "0025",
    "0026",
    "0027",
    "0028",
    "0029",
    "0030",
    "0031",
    "0032",
    "0033",
    "0034",
    "0035",
    "0036",
    "0037",
    "0038",
    "0039",
    "0040",
    "0041",
    "0042",
]


def a_value(column: Any) -> Any:
    """Return a value of a column's type; a key refers to the first row."""
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
    """Return the present tables, referenced ones first."""
    metadata = MetaData()
    metadata.reflect(database.engine)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def counts(database: Database, names: Iterable[str]) -> set[int]:
    """How many rows those of these tables have that there are."""
    there = set(inspect(database.engine).get_table_names())
    with database.engine.connect() as connection:
        return {
            connection.execute(select(func.count()).select_from(table(name))).scalar_one()
            for name in there.intersection(names)
        }


def fill(database: Database, *, without: Collection[str] = ()) -> set[str]:
    """Put one row, with a value in each column, into every table; return their names."""
    found = [each for each in tables(database) if each.name not in without]
    with database.engine.begin() as connection:
        for each in reversed(found):
            connection.execute(delete(each))
        for each in found:
            row = {column.name: a_value(column) for column in each.columns}
            connection.execute(insert(each).values(row))
    names = {each.name for each in found}
    assert counts(database, names) == {1}
    return names


def test_rows_outlive_every_migration(database: Database) -> None:
    """From each revision to the next, and from the newest back to the first, one by one."""
    config = database.migrations()
    command.downgrade(config, "base")
    command.upgrade(config, REVISIONS[0])
    for revision in REVISIONS[1:]:
        # Deeds nothing could empty again; summaries are made of other rows.
        filled = fill(database, without=("deeds", "audit_events", "metric_buckets"))
        command.upgrade(config, revision)
        assert counts(database, filled) == {1}, revision
    filled = fill(database)
    for revision in REVISIONS[-2::-1]:
        command.downgrade(config, revision)
        assert counts(database, filled) == {1}, revision
    command.upgrade(config, "head")


def test_deeds_are_kept_by_an_earlier_version_too(database: Database, ada: User) -> None:
    """Except events without a user, which it does not support; rows still cannot be changed."""
    with database.writing() as session:
        audit.note_typed(session, "backup", "here")
        session.add(AuditEvent(user_id=ada.id, action="POST /views", address=""))
    command.downgrade(database.migrations(), "0024")
    rows = "SELECT deed FROM deeds"
    with database.engine.begin() as connection:
        assert connection.execute(text(rows)).scalars().all() == ["POST /views"]
    for name in ("deeds", "audit_events"):
        with database.engine.begin() as connection, pytest.raises(DatabaseError, match="are kept"):
            connection.execute(text(f"DELETE FROM {name}"))
        command.upgrade(database.migrations(), "head")


def test_every_revision_is_tried() -> None:
    """A new revision stands in this module's list."""
    script = ScriptDirectory.from_config(Database("sqlite:///unused.db").migrations())
    assert [each.revision for each in script.walk_revisions()][::-1] == REVISIONS


@pytest.mark.only_on("sqlite")
def test_foreign_keys_are_on_after_a_migration(database: Database) -> None:
    """They are off only while tables are rebuilt."""
    database.migrate()
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


def test_workers_that_were_there_keep_their_recipes(database: Database) -> None:
    """The recipes of a worker are taken from its stored capabilities."""
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
    """For users who apply changes of the schema by hand."""
    text = io.StringIO()
    command.upgrade(database.migrations(text), "0001:head", sql=True)
    assert "CREATE INDEX ix_metrics_run_id_id ON metrics (run_id, id)" in text.getvalue()
    assert "'0029'" in text.getvalue()


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
    """A queued one is ended, and its row is kept as that of a watched run."""
    with database.writing() as session:
        submit_command(session, accounts.user_named(session, "ada"))
    command.downgrade(database.migrations(), "0009")
    [runs] = [each for each in tables(database) if each.name == "runs"]
    with database.engine.connect() as connection:
        [row] = connection.execute(select(runs)).mappings()
    assert (row["source"], row["status"]) == ("watch", "cancelled")
    assert row["ended_at"] == row["created_at"]
    command.upgrade(database.migrations(), "head")


def test_an_earlier_version_does_not_go_on_with_a_sweep_of_a_command(database: Database) -> None:
    """It would search for a recipe without a name; its row is kept as ended."""
    what: dict[str, Any] = {"name": "n", "config": {}, "space": {}, "kind": "grid", "seed": 0}
    what |= {"metric": "loss", "goal": "minimise", "runs_total": 2, "at_once": 1, "tags": ""}
    what |= {"priority": 0, "devices_per_node": 1, "status": "running"}
    with database.writing() as session:
        owner_id = accounts.user_named(session, "ada").id
        session.add(Sweep(owner_id=owner_id, recipe="", command={"line": "a {b}"}, **what))
        session.add(Sweep(owner_id=owner_id, recipe="digits", **what))
    command.downgrade(database.migrations(), "0032")
    [table] = [each for each in tables(database) if each.name == "sweeps"]
    with database.engine.connect() as connection:
        rows = connection.execute(select(table.c.status).order_by(table.c.id)).scalars().all()
    assert rows == ["cancelled", "running"]
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        assert session.scalars(select(Sweep.command)).all() == [None, None]


def test_runs_of_before_know_what_they_failed_by(database: Database, running: Run) -> None:
    """It is that of the last change of their status."""
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FAILED, failure_kind="code")
    command.downgrade(database.migrations(), "0011")
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        assert session.get_one(Run, running.id).failure_kind == "code"


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
            checkpoints.publish(session, running.id, 1, checkpoint_of(saved(step)), [key])
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


def test_runs_that_were_there_are_found_by_settings_and_metrics(
    database: Database, running: Run
) -> None:
    """Both tables are filled from the existing runs, like later ones."""
    record(
        database, running, make_steps([1.0] * 3), events=[make_metric(1, 0.5), make_metric(3, 0.7)]
    )
    queries = [
        select(each).order_by(*each.primary_key)
        for each in (RunConfigValue.__table__, LatestMetric.__table__)
    ]

    def rows() -> list[Any]:
        with database.engine.connect() as connection:
            return [connection.execute(query).all() for query in queries]

    before = rows()
    assert [row.path for row in before[0]] == ["precision", "training.steps"]
    assert [row.step for row in before[1]] == [3]
    for go, target in ((command.downgrade, "0011"), (command.upgrade, "head")):
        go(database.migrations(), target)
    assert rows() == before


def test_summaries_of_metrics_without_a_point_beyond_them_go(
    database: Database, running: Run
) -> None:
    """An earlier version stored one of each size for every point; now points are read."""
    record(database, running, events=[make_metric(step, step / 70) for step in range(1, 71)])
    query = select(MetricBucket.size, MetricBucket.bucket).order_by(MetricBucket.size)
    with database.writing() as session:
        key = {"run_id": running.id, "name": "val/accuracy", "bucket": 0}
        session.add_all(MetricBucket(**key, size=size, summary=b"") for size in SIZES[1:])
        session.flush()
        assert len(session.execute(query).all()) == len(SIZES)
    command.downgrade(database.migrations(), "0036")
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        assert [tuple(row) for row in session.execute(query)] == [(64, 0)]
        assert measured(session, running.id)[0].points == 70


def test_runs_of_before_know_whether_their_last_loss_was_lost(
    database: Database, running: Run
) -> None:
    """A loss stored as NULL was NaN: such a run still counts as diverged."""
    record(database, running, make_steps([1.0, float("nan")]))
    command.downgrade(database.migrations(), "0037")
    command.upgrade(database.migrations(), "head")
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        assert (run.last_flags, run.not_stepped, run.zero_steps) == (2, 0, 0)


def test_values_are_renamed_with_the_tables(database: Database, running: Run, ada: User) -> None:
    """Configurations, searched settings and tokens keep their meaning, there and back."""
    spike = {
        "spike": {
            **{"rollback": True, "max_rollbacks": 2},
            **{"check_every_steps": 9, "afterwards": "continue"},
        }
    }
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.config = {**run.config, **spike}
        session.add(
            RunConfigValue(run_id=run.id, name="rollback", path="spike.rollback", text="true")
        )
        accounts.make_api_token(session, ada, "ci", kind="control")
        shown = {"sort": "-id", "columns": "name,health", "group": ""}
        views.save(session, ada, "mine", filter="status:no_updates", **shown)
        session.add(AlertRule(user_id=ada.id, scope="mine", condition="no_updates", channel_ids=[]))
    config = database.migrations()
    command.downgrade(config, "0038")
    with database.engine.connect() as connection:
        before = connection.execute(text("SELECT config FROM runs")).scalar_one()
        before = json.loads(before) if isinstance(before, str) else before
        assert before["spike"] == {
            **{"rewind": True, "most_rewinds": 2},
            **{"look_every_steps": 9, "afterwards": "go on"},
        }
        paths = connection.execute(text("SELECT path FROM run_settings")).scalars().all()
        assert "spike.rewind" in paths
        kinds = connection.execute(text("SELECT kind FROM api_tokens")).scalars().all()
        assert kinds == ["steer"]
        [view] = connection.execute(text("SELECT filter, columns FROM saved_views")).all()
        assert tuple(view) == ("status:unapplied", "name,verdict")
        rules = connection.execute(text("SELECT condition FROM alert_rules")).scalars().all()
        assert rules == ["unapplied"]
    command.upgrade(config, "head")
    with database.reading() as session:
        assert session.get_one(Run, running.id).config["spike"] == spike["spike"]
        assert "spike.rollback" in session.scalars(select(RunConfigValue.path)).all()
        assert [token.kind for token in session.scalars(select(ApiToken))] == ["control"]
        [saved] = views.listed(session, ada)
        assert (saved.filter, saved.columns) == ("status:no_updates", "name,health")
        assert session.scalars(select(AlertRule.condition)).all() == ["no_updates"]
