"""The database connection, the migrations and the clock."""

import secrets
import time
from contextlib import suppress

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.schema import CreateTable

from db.access import accounts
from db.clock import now
from db.database import Database, is_outage
from db.errors import DatabaseUnreachable, Invalid
from db.tables import LatestMetric, Run, Table, User


def test_migrations_give_the_tables_of_the_code(database: Database) -> None:
    """Migrations give the schema of the table classes."""

    elsewhere = {"sqlite": "ix_runs_kept", "postgresql": "ix_runs_listed"}

    def is_here(item: object, _name: object, kind: str, *_: object) -> bool:
        other = elsewhere[connection.dialect.name]
        return kind != "index" or str(item.name) != other  # type: ignore[attr-defined]

    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": is_here})
        assert compare_metadata(context, Table.metadata) == []


@pytest.mark.only_on("postgresql")
def test_migrations_give_the_key_of_the_code(database: Database) -> None:
    """Migrations give the indexes and keys of the table classes."""
    with database.reading() as session:
        query = text("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = :name")
        key = session.scalar(query, {"name": "pk_run_config_values"})
    assert key in str(
        CreateTable(Table.metadata.tables["run_config_values"]).compile(database.engine)
    )
    assert key == "PRIMARY KEY (name, path, run_id) INCLUDE (number, text)"


def test_migrating_twice_changes_nothing(database: Database) -> None:
    """Migrating again changes nothing."""
    database.migrate()


def test_clock_counts_seconds_since_the_epoch(database: Database) -> None:
    """The database's clock is in seconds since the epoch."""
    with database.reading() as session:
        assert session.scalar(select(now())) == pytest.approx(time.time(), abs=5)


def test_failed_transaction_leaves_nothing(database: Database) -> None:
    """An error within a transaction undoes all of it."""
    with suppress(ZeroDivisionError), database.writing() as session:
        accounts.user_named(session, "ada")
        _ = 1 / 0
    with database.reading() as session:
        assert session.scalars(select(User)).all() == []


def test_a_reader_sees_one_snapshot(database: Database, ada: User) -> None:
    """A reader sees one snapshot, later writes in the next session, and cannot write."""
    with database.reading() as session:
        before = session.scalars(select(User.name)).all()
        with database.writing() as other:
            accounts.user_named(other, "bob")
        assert session.scalars(select(User.name)).all() == before
    with database.reading() as session:
        assert len(session.scalars(select(User)).all()) == 2


@pytest.mark.parametrize("kind", ["read_only", "single_write", "reading", "writing"])
def test_a_closed_session_cannot_be_used(database: Database, kind: str) -> None:
    """A closed session cannot begin another transaction, which nothing would end."""
    with getattr(database, kind)() as session:
        session.scalar(select(now()))
    with pytest.raises(InvalidRequestError):
        session.scalar(select(now()))


@pytest.mark.only_on("postgresql")
def test_a_silent_transaction_releases_its_locks(
    database_url: str, database: Database, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that stays silent loses its locks, and ends as an outage."""
    monkeypatch.setattr("db.database.IDLE_MILLISECONDS", 100)
    silent = Database(database_url)

    def fall_silent() -> None:
        with silent.writing() as session, database.writing() as other:
            session.get(Run, running.id, with_for_update=True)
            other.execute(text("SET LOCAL lock_timeout = '60s'"))
            other.get(Run, running.id, with_for_update=True)
            session.scalars(select(now())).one()

    with pytest.raises(DBAPIError) as ended:
        fall_silent()
    assert is_outage(ended.value)
    silent.dispose()


def test_silent_database_is_named_without_its_password() -> None:
    """The error for an unresponsive database has its address without the password."""
    url = "postgresql+psycopg://halfstep:sesame@127.0.0.1:9/halfstep?password=sesame"
    database = Database(url)
    with pytest.raises(DatabaseUnreachable, match=r"127\.0\.0\.1:9") as caught:
        database.check()
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://localhost/x", "nonsense", "sqlite+nothing:///x"])
def test_url_that_cannot_be_understood_names_the_setting(url: str) -> None:
    """The error for an invalid URL names HALFSTEP_DATABASE_URL."""
    with pytest.raises(Invalid, match="HALFSTEP_DATABASE_URL"):
        Database(url)


@pytest.mark.only_on("postgresql")
def test_values_too_long_for_an_index_are_no_outage(database: Database, running: Run) -> None:
    """A value too long for an index is rejected, not retried like an outage."""
    name = secrets.token_hex(20_000)  # that nothing can compress
    metric = LatestMetric(run_id=running.id, name=name, step=1, value=0.5)
    with pytest.raises(DBAPIError) as caught, database.writing() as session:
        session.add(metric)
    assert not is_outage(caught.value)
