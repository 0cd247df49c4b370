"""Migrations of databases with rows, up and down."""

import io
import json
from collections.abc import Collection, Iterable

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import (
    TableClause,
    column,
    delete,
    func,
    insert,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.exc import DatabaseError

from db.access import accounts
from db.database import Database, revisions
from db.errors import Conflict
from db.runs import config_values, views
from db.tables import (
    AlertRule,
    ApiToken,
    AuditEvent,
    MetricBucket,
    Run,
    RunConfigValue,
    User,
)
from db.telemetry import step_conversion
from db.telemetry.pyramid import SIZES
from db.telemetry.windows import measure
from tests.db.migrations_made import a_value
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.marks import looped

pytestmark = pytest.mark.slow

REVISIONS = [f"00{number}" for number in range(35, 60)]


#: By database, how rows are written before those that they refer to.
IN_ANY_ORDER = {
    "sqlite": "PRAGMA defer_foreign_keys = ON",
    "postgresql": "SET LOCAL session_replication_role = replica",
}


def tables(database: Database) -> list[TableClause]:
    """Return the present tables with their columns, without keys and indexes."""
    found = inspect(database.engine).get_multi_columns().items()
    return [
        table(name, *(column(each["name"], each["type"]) for each in columns))
        for (_schema, name), columns in found
        if name != "alembic_version"
    ]


def counts(database: Database, names: Iterable[str]) -> set[int]:
    """Return the number of rows of the given tables that exist."""
    there = set(inspect(database.engine).get_table_names())
    numbers = [
        select(func.count()).select_from(table(name)).scalar_subquery()
        for name in sorted(there.intersection(names))
    ]
    with database.engine.connect() as connection:
        return set(connection.execute(select(*numbers)).one())


def fill(database: Database, *, without: Collection[str] = ()) -> set[str]:
    """Insert one row, with a value in each column, into every table; return the tables' names."""
    found = [each for each in tables(database) if each.name not in without]
    with database.engine.begin() as connection:
        connection.execute(text(IN_ANY_ORDER[database.engine.name]))
        for each in found:
            connection.execute(delete(each))
        for each in found:
            row = {column.name: a_value(column) for column in each.columns}
            connection.execute(insert(each), row)
    names = {each.name for each in found}
    assert counts(database, names) == {1}
    return names


def test_rows_outlive_every_migration(database: Database) -> None:
    """Rows survive each upgrade to the next revision, and each downgrade from the newest
    to the first.
    """
    config = database.migrations()
    command.downgrade(config, "base")
    command.upgrade(config, REVISIONS[0])
    for revision in REVISIONS[1:]:
        # No code could empty the audit log again; summaries are made of other rows.
        filled = fill(database, without=("deeds", "audit_events", "metric_buckets"))
        command.upgrade(config, revision)
        assert counts(database, filled) == {1}, revision
    filled = fill(database)
    for revision in REVISIONS[-2::-1]:
        command.downgrade(config, revision)
        assert counts(database, filled) == {1}, revision
    command.upgrade(config, "head")


def test_every_revision_is_tried() -> None:
    """Every revision is in this module's list."""
    script = ScriptDirectory.from_config(Database("sqlite:///unused.db").migrations())
    assert [each.revision for each in script.walk_revisions()][::-1] == REVISIONS
    assert revisions() == REVISIONS  # read without Alembic


@looped("revision", ["0034", "9999"])
def test_an_unknown_revision_is_named(database: Database, revision: str) -> None:
    """An unknown revision, older or newer than all known ones, is named, and nothing changes."""
    stored = "UPDATE alembic_version SET version_num = '{}'"
    newest = REVISIONS[-1]
    with database.engine.begin() as connection:
        connection.execute(text(stored.format(revision)))
    with pytest.raises(Conflict, match=f"revision {revision}; this version can open 0035 to"):
        database.migrate()
    with database.engine.begin() as connection:
        connection.execute(text(stored.format(newest)))
    database.migrate()


@pytest.mark.only_on("sqlite")
def test_foreign_keys_are_on_after_a_migration(database: Database) -> None:
    """Foreign keys are enforced again after a migration rebuilt tables."""
    database.migrate()
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


@pytest.mark.only_on("postgresql")
def test_sql_is_printed_without_a_change(database: Database) -> None:
    """The SQL of migrations can be printed for users who apply it by hand; nothing is changed."""
    text = io.StringIO()
    command.upgrade(database.migrations(text), "0035:head", sql=True)
    assert "ALTER TABLE deeds RENAME TO audit_events" in text.getvalue()
    assert "'0039'" in text.getvalue()


def test_losses_and_summaries_of_an_earlier_version_are_understood(
    database: Database, running: Run
) -> None:
    """A NULL loss of earlier versions counts as NaN, so the run has diverged. Metric summaries
    of every size are replaced by points.
    """
    points = [make_metric(step, step / 70) for step in range(1, 71)]
    record(database, running, make_steps([1.0, float("nan")]), events=points)
    query = select(MetricBucket.size, MetricBucket.bucket).order_by(MetricBucket.size)
    with database.writing() as session:
        key = {"run_id": running.id, "name": "val/accuracy", "bucket": 0}
        session.add_all(MetricBucket(**key, size=size, summary=b"") for size in SIZES)
    command.downgrade(database.migrations(), "0036")
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        assert (run.last_flags, run.not_stepped, run.zero_steps) == (2, 0, 0)
        assert [tuple(row) for row in session.execute(query)] == [(64, 0)]
    step_conversion.convert(database, running.id, is_own=True)
    with database.reading() as session:
        assert measure(session, running.id)[0].points == 70


def test_values_are_renamed_with_the_tables(database: Database, running: Run, ada: User) -> None:
    """Configurations, searched settings and tokens are renamed with their tables, up and down.

    Groups of other names in a configuration are the recipe's own, and audit events are kept.
    """
    own = {"recipe": {"rollback": 1, "afterwards": "continue"}}
    spike = {
        "spike": {
            **{"rollback": True, "max_rollbacks": 2},
            **{"check_every_steps": 9, "afterwards": "continue"},
        }
    }
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.config = {**run.config, **spike, **own}
        session.add(AuditEvent(user_id=ada.id, action="POST /views", address=""))
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
        assert before["recipe"] == own["recipe"]
        deeds = connection.execute(text("SELECT deed FROM deeds")).scalars().all()
        assert deeds == ["POST /views"]
        paths = connection.execute(text("SELECT path FROM run_settings")).scalars().all()
        assert "spike.rewind" in paths
        kinds = connection.execute(text("SELECT kind FROM api_tokens")).scalars().all()
        assert kinds == ["steer"]
        [view] = connection.execute(text("SELECT filter, columns FROM saved_views")).all()
        assert tuple(view) == ("status:unapplied", "name,verdict")
        rules = connection.execute(text("SELECT condition FROM alert_rules")).scalars().all()
        assert rules == ["unapplied"]
    _cannot_delete(database, "deeds")
    command.upgrade(config, "head")
    _cannot_delete(database, "audit_events")
    with database.reading() as session:
        assert session.get_one(Run, running.id).config == {**run.config, **spike, **own}
        assert "spike.rollback" in session.scalars(select(RunConfigValue.path)).all()
        assert [token.kind for token in session.scalars(select(ApiToken))] == ["control"]
        [saved] = views.list_views(session, ada)
        assert (saved.filter, saved.columns) == ("status:no_updates", "name,health")
        assert session.scalars(select(AlertRule.condition)).all() == ["no_updates"]


def test_names_of_users_are_restored(database: Database, running: Run, ada: User) -> None:
    """Names that 0039 and 0041 replaced are restored from run_config_values, tags and metrics."""
    damaged = {"rollback": 3, "model": {"mismatched": 1, "afterwards": "continue"}}
    earlier = {"rewind": 3, "model": {"misshapen": 1, "afterwards": "go on"}}
    spike = {"spike": {"rollback": True, "afterwards": "continue"}}
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.config, run.tags = {**earlier, **spike}, "rewind-lab"
        config_values.note(session, run)
        run.config = {**damaged, **spike}
        shown = {"sort": "-id", "columns": "name,health", "group": ""}
        views.save(session, ada, "tag", filter="-tag:rollback-lab status:no_updates", **shown)
        views.save(session, ada, "own", filter="max_rollbacks=2 -tag:health", **shown)
    command.downgrade(database.migrations(), "0047")
    command.upgrade(database.migrations(), "head")
    with database.reading() as session:
        assert session.get_one(Run, running.id).config == {**earlier, **spike}
        saved = {view.name: (view.filter, view.columns) for view in views.list_views(session, ada)}
    assert saved["tag"] == ("-tag:rewind-lab status:no_updates", "name,health")
    assert saved["own"] == ("max_rollbacks=2 -tag:health", "name,health")


def _cannot_delete(database: Database, table: str) -> None:
    """Check that rows of the audit log cannot be deleted."""
    with database.engine.begin() as connection, pytest.raises(DatabaseError, match="are kept"):
        connection.execute(text(f"DELETE FROM {table}"))
