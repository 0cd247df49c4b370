"""The connection, its clock, and the only commit."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Connection,
    Engine,
    Float,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from db.errors import DatabaseUnreachable, Invalid
from db.settings import Settings
from db.turns import Turns

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
#: How long PostgreSQL waits for the next statement of a transaction. Whoever is stopped or cut off
#: within one would keep what it locked for ever: a run, say, that others are to take over.
IDLE_MILLISECONDS = 30_000
#: How long SQLite's write lock is waited for.
BUSY_SECONDS = 30
#: What a connection's record says while it has the turn of its process's writers.
TURN = "writer's turn"


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function that it is
    """The database's clock in seconds since the epoch: leases trust no worker's clock."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_on_sqlite(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_on_postgresql(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "(extract(epoch from clock_timestamp())::double precision)"


class _HintedSQLite(SQLiteCompiler):
    """Writes the hints of queries, "INDEXED BY …", which SQLAlchemy's own leaves out."""

    def get_from_hint_text(self, table: Any, text: str | None) -> str | None:
        """Return what stands behind a table's name."""
        return text


class Database:
    """One engine. `glancing`, `touching`, `reading` and `writing` lead to sessions, none of which
    can be used after its end, when nobody would commit it or give its connection back.

    Raises Invalid if the URL cannot be understood; connects only on first use.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            backend = parsed.get_backend_name()
            if backend not in ("sqlite", "postgresql"):
                raise ArgumentError(f"the backend {backend!r} is neither sqlite nor postgresql")
            self.turns = Turns()  # of SQLite's writers in this process
            self.engine = _engine(url, backend, self.turns)
        except (ArgumentError, NoSuchModuleError) as error:
            raise Invalid({"HALFSTEP_DATABASE_URL": str(error)}) from error
        # Without its query, which may hold a password too.
        self.name = parsed.set(query={}).render_as_string(hide_password=True)
        # SQLite's transactions are snapshots anyway.
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        options = snapshot if backend == "postgresql" else {}
        self._reader = self.engine.execution_options(writing=False, **options)
        alone = {"isolation_level": "AUTOCOMMIT"} if backend == "postgresql" else {}
        self._glancer = self.engine.execution_options(writing=False, **alone)
        self._writer = self.engine.execution_options(writing=True)

    @contextmanager
    def glancing(self) -> Iterator[Session]:
        """Give a session for one query: on PostgreSQL a transaction is two more round trips."""
        with Session(self._glancer, close_resets_only=False) as session:
            yield session

    @contextmanager
    def touching(self) -> Iterator[Session]:
        """Give a session for one change, which on PostgreSQL is committed by itself."""
        alone = self.engine.dialect.name == "postgresql"
        with self.glancing() if alone else self.writing() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Give a session that sees one snapshot and changes nothing.

        Raises at its end, too, if its connection was lost.
        """
        with Session(self._reader, expire_on_commit=False, close_resets_only=False) as session:
            yield session
            # With a rollback psycopg would forget what its connection has prepared. A commit would
            # first write what was changed, so nothing is left that could be.
            session.expunge_all()
            session.commit()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Give a session whose changes are all committed, or none of them."""
        opened = Session(self._writer, expire_on_commit=False, close_resets_only=False)
        with opened as session, session.begin():
            yield session

    def migrate(self) -> None:
        """Create the tables, or bring them up to this version. Raises DatabaseUnreachable."""
        self.check()
        command.upgrade(self.migrations(), "head")

    def is_current(self) -> bool:
        """Tell whether the tables are those of this version. Raises DatabaseUnreachable."""
        self.check()
        newest = ScriptDirectory.from_config(self.migrations()).get_current_head()
        with self._reader.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision() == newest

    def migrations(self, output: TextIO | None = None) -> Config:
        """Return what Alembic's commands want to know. output: where SQL goes that is asked for."""
        config = Config(output_buffer=output)
        config.set_main_option("script_location", str(MIGRATIONS))
        url = self.engine.url.render_as_string(hide_password=False)
        config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
        config.attributes["engine"] = self._writer
        return config

    def check(self) -> None:
        """Raise DatabaseUnreachable, without the password, if the database does not answer."""
        try:
            with self.engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except DBAPIError as error:
            raise DatabaseUnreachable(
                f"HALFSTEP_DATABASE_URL: {self.name} does not answer: {error.orig}"
            ) from error

    def dispose(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def open_database(settings: Settings) -> Database:
    """Open the database of these settings, and see that the data folder can be written.

    What this process writes from here on, wherever it is, its user alone may read: telemetry and
    checkpoints are nobody else's, and the database has everybody's sessions. Raises Invalid.
    """
    os.umask(0o077)
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=settings.data):
            pass
    except OSError as error:
        message = f"{settings.data} cannot be written: {error.strerror}"
        raise Invalid({"HALFSTEP_DATA": message}) from error
    return Database(settings.database_url)


def is_outage(error: Exception) -> bool:
    """Tell whether an error means that the database is away, so that trying again may help."""
    if isinstance(error, DatabaseUnreachable):
        return True
    if not isinstance(error, DBAPIError):
        return False
    # SQLite's plain "error" is a mistake in the statement; busy or full have codes of their own. Of
    # PostgreSQL's, class 54 is: what it was given is too long or too deep, and will be again.
    is_mistake = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    is_mistake |= str(getattr(error.orig, "sqlstate", None)).startswith("54")
    return error.connection_invalidated or (isinstance(error, OperationalError) and not is_mistake)


def _engine(url: str, backend: str, turns: Turns) -> Engine:
    if backend == "sqlite":
        engine = create_engine(url, max_overflow=-1, connect_args={"timeout": BUSY_SECONDS})
        engine.dialect.statement_compiler = _HintedSQLite
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", partial(_begin_on_sqlite, turns))
        event.listen(engine, "checkin", partial(_give_turn_back, turns))
        return engine
    engine = create_engine(
        url,
        pool_pre_ping=True,
        max_overflow=50,  # of the 100 connections that PostgreSQL allows by default
        # A peer that vanished without a word is noticed within seconds, not after TCP's minutes.
        connect_args={"connect_timeout": 5, "tcp_user_timeout": 10_000, "keepalives_idle": 5},
    )
    event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _set_up_postgresql(connection: Any, _record: Any) -> None:
    # Not among the connection's options, which PgBouncer refuses.
    connection.autocommit = True
    idle = f"SET idle_in_transaction_session_timeout = {IDLE_MILLISECONDS}"
    # It would compile a query for seconds that then takes milliseconds.
    connection.execute(f"{idle}; SET jit = off")
    connection.autocommit = False


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, below
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_on_sqlite(turns: Turns, connection: Connection) -> None:
    # A transaction that reads before it writes would fail at once, whatever the timeout, if
    # somebody wrote in between: so writers take the write lock first and wait for it.
    if not connection.get_execution_options().get("writing", True):
        connection.exec_driver_sql("BEGIN")
        return
    # SQLite polls its lock, up to 0.1 s apart, and whoever asks at the right moment gets it. So
    # the threads of a process take turns first. Here, where the lock would be waited for: a
    # session that is only opened, in the event loop say, waits for nothing.
    held = connection.connection.record_info
    if held is not None and not held.get(TURN):  # it has a place in the pool
        held[TURN] = turns.take(BUSY_SECONDS)
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _give_turn_back(turns: Turns, _connection: Any, record: Any) -> None:
    """Hand the turn on when the connection goes back into its pool, however it ended."""
    if record.record_info.pop(TURN, False):
        turns.give_back()
