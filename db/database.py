"""Database connections and transactions."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

from sqlalchemy import (
    Connection,
    Engine,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session

from db import database_copy
from db.errors import Conflict, DatabaseUnreachable, Invalid
from db.settings import Settings
from db.turns import Turns

if TYPE_CHECKING:
    from alembic.config import Config
    from obstore.store import ObjectStore

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
#: PostgreSQL's timeout for an idle transaction: a client that is stopped or cut off within one
#: would hold its locks forever, for example on a run that another worker must take over.
IDLE_MILLISECONDS = 30_000
#: Timeout for SQLite's write lock.
BUSY_SECONDS = 30
#: How long to retry a bucket that does not answer, for a file of steps.
RETRY_SECONDS = 5.0
#: Key in a connection's record while it holds the turn of its process's writers.
TURN = "writer's turn"


class _HintedSQLite(SQLiteCompiler):
    """Compiler that emits "INDEXED BY …" hints, which SQLAlchemy's own omits."""

    def get_from_hint_text(self, table: object, text: str | None) -> str | None:
        """Return the text that follows a table's name."""
        return text


class Database:
    """An engine with four kinds of sessions: `read_only`, `single_write`, `reading` and `writing`.

    A session cannot be used after its `with` block: nothing would commit it or return its
    connection. Raises Invalid if the URL is not valid; connects on first use.
    """

    def __init__(self, url: str, open_store: "Callable[[], ObjectStore] | None" = None) -> None:
        """open_store: opens the store, for files of steps that earlier versions wrote."""
        self.open_store = open_store
        try:
            parsed = make_url(url)
            backend = parsed.get_backend_name()
            if backend not in ("sqlite", "postgresql"):
                raise ArgumentError(f"the backend {backend!r} is neither sqlite nor postgresql")
            self.turns = Turns()  # of SQLite's writers in this process
            self.engine = _engine(url, backend, self.turns)
        except (ArgumentError, NoSuchModuleError) as error:
            raise Invalid({"HALFSTEP_DATABASE_URL": str(error)}) from error
        # Without the query of the URL, which may contain a password too.
        self.name = parsed.set(query={}).render_as_string(hide_password=True)
        # SQLite's transactions are snapshots anyway.
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        options = snapshot if backend == "postgresql" else {}
        self._reader = self.engine.execution_options(writing=False, **options)
        autocommit = {"isolation_level": "AUTOCOMMIT"} if backend == "postgresql" else {}
        self._autocommit = self.engine.execution_options(writing=False, **autocommit)
        self._writer = self.engine.execution_options(writing=True)

    @contextmanager
    def read_only(self) -> Iterator[Session]:
        """Yield a session for one query: on PostgreSQL a transaction costs two more round trips."""
        with Session(self._autocommit, close_resets_only=False) as session:
            yield session

    @contextmanager
    def single_write(self) -> Iterator[Session]:
        """Yield a session for one change, which PostgreSQL commits by itself."""
        has_autocommit = self.engine.dialect.name == "postgresql"
        with self.read_only() if has_autocommit else self.writing() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a read-only session on one snapshot.

        Also raises at its end if the connection was lost.
        """
        with Session(self._reader, expire_on_commit=False, close_resets_only=False) as session:
            yield session
            # A rollback would discard psycopg's prepared statements. A commit would flush changes,
            # so all objects are removed first.
            session.expunge_all()
            session.commit()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Yield a session for a transaction: all changes are committed, or none."""
        opened = Session(self._writer, expire_on_commit=False, close_resets_only=False)
        with opened as session, session.begin():
            yield session

    def migrate(self) -> None:
        """Create or migrate the tables to this version. Raises DatabaseUnreachable, Conflict.

        A SQLite file is copied before: halfstep.db.before-0047, of the revision that it has.
        """
        revision = self.read_known_revision()
        if revision != revisions()[-1]:
            from alembic import command  # takes a quarter of a second

            if revision is not None and self.file is not None:
                database_copy.copy(self.file, revision)
            command.upgrade(self.migrations(), "head")

    def is_current(self) -> bool:
        """Return whether the tables are those of this version. Raises DatabaseUnreachable."""
        return self.revision() == revisions()[-1]

    def require_current(self, revision: str | None = None) -> None:
        """Raise Conflict if another version has migrated the database.

        revision: of the tables, as just read; None to read it.
        """
        own = revisions()[-1]
        if revision is None:
            with self.read_only() as session:
                revision = session.scalar(text("SELECT version_num FROM alembic_version"))
        if revision != own:
            raise Conflict(
                f"The database was migrated to revision {revision} by another version of Halfstep; "
                f"this one needs {own}. Install that version here, and start it."
            )

    @property
    def file(self) -> Path | None:
        """The file of a SQLite database, None of others."""
        path = Path(self.engine.url.database or "")
        is_file = self.engine.dialect.name == "sqlite" and path.is_file()
        return path if is_file else None

    def revision(self) -> str | None:
        """Return the revision of the tables, None without any. Raises DatabaseUnreachable."""
        self.check()
        with self._reader.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            revision: str | None = connection.scalar(
                text("SELECT version_num FROM alembic_version")
            )
            return revision

    def read_known_revision(self) -> str | None:
        """Return the revision of the tables. Raises DatabaseUnreachable, Conflict if unknown."""
        known, revision = revisions(), self.revision()
        if revision not in (None, *known):
            raise Conflict(
                f"The database has revision {revision}; this version can open {known[0]} to "
                f"{known[-1]}. Use the version of Halfstep that wrote it, or a newer one."
            )
        return revision

    def migrations(self, output: TextIO | None = None) -> "Config":
        """Return the configuration for Alembic's commands. output: receives SQL in offline mode."""
        from alembic.config import Config

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

    def log_state(self) -> tuple[int, int] | None:
        """Return the state of SQLite's write-ahead log, which each commit changes; else None."""
        if self.engine.dialect.name != "sqlite":
            return None
        try:
            status = Path(f"{self.engine.url.database}-wal").stat()
        except OSError:
            return 0, 0  # no connection is open
        return status.st_mtime_ns, status.st_size

    def dispose(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def revisions() -> list[str]:
    """Return the revisions of this version's migrations, oldest first; file names begin with it.

    Raises Invalid if there are none.
    """
    files = MIGRATIONS.glob("versions/[0-9]*.py")
    if not (found := sorted(path.name.partition("_")[0] for path in files)):
        raise Invalid({"database": f"{MIGRATIONS}/versions has no migrations: install again"})
    return found


def open_database(settings: Settings) -> Database:
    """Open the database of these settings, and check that the data folder is writable.

    Sets the umask so that only this process's user can read its files: telemetry and checkpoints
    are private, and the database contains all users' sessions. Raises Invalid.
    """
    os.umask(0o077)
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=settings.data):
            pass
    except OSError as error:
        message = f"{settings.data} cannot be written: {error.strerror}"
        raise Invalid({"HALFSTEP_DATA": message}) from error
    from db.files.object_store import open_store

    store = cache(partial(open_store, settings, retry_seconds=RETRY_SECONDS))
    return Database(settings.database_url, store)


def is_outage(error: Exception) -> bool:
    """Return whether an error means that the database is unavailable, so a retry may help."""
    if isinstance(error, DatabaseUnreachable):
        return True
    if not isinstance(error, DBAPIError):
        return False
    # SQLITE_ERROR is a mistake in the statement; busy or full have other codes. PostgreSQL's class
    # 54 means that a statement is too long or too complex, which a retry does not change.
    is_mistake = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    is_mistake |= str(getattr(error.orig, "sqlstate", None)).startswith("54")
    return error.connection_invalidated or (isinstance(error, OperationalError) and not is_mistake)


def _engine(url: str, backend: str, turns: Turns) -> Engine:
    if backend == "sqlite":
        engine = create_engine(url, max_overflow=-1, connect_args={"timeout": BUSY_SECONDS})
        engine.dialect.statement_compiler = _HintedSQLite
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", partial(_begin_on_sqlite, turns))
        event.listen(engine, "checkin", partial(_release_turn, turns))
        return engine
    from db.telemetry import postgresql_arrays  # noqa: F401 - before the first connection

    engine = create_engine(
        url,
        pool_pre_ping=True,
        max_overflow=50,  # of the 100 connections that PostgreSQL allows by default
        # Detects a vanished peer within seconds, not after TCP's default of minutes.
        connect_args={"connect_timeout": 5, "tcp_user_timeout": 10_000, "keepalives_idle": 5},
    )
    event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _set_up_postgresql(connection: Any, _record: object) -> None:
    # Not in the connection's options, which PgBouncer rejects.
    connection.autocommit = True
    idle = f"SET idle_in_transaction_session_timeout = {IDLE_MILLISECONDS}"
    # The JIT compiles for seconds queries that take milliseconds.
    connection.execute(f"{idle}; SET jit = off")
    connection.autocommit = False


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # _begin_on_sqlite executes BEGIN
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_on_sqlite(turns: Turns, connection: Connection) -> None:
    # A transaction that reads before it writes would fail immediately, regardless of the timeout,
    # if another one wrote in between: so writers first wait for the write lock.
    if not connection.get_execution_options().get("writing", True):
        connection.exec_driver_sql("BEGIN")
        return
    # SQLite polls its lock every 0.1 s or less, in no fair order, so the threads of a process
    # queue for it first. They do so here and not when a session is opened, which may happen in the
    # event loop and must not block.
    info = connection.connection.record_info
    if info is not None and not info.get(TURN):  # None: not from the pool
        info[TURN] = turns.take(BUSY_SECONDS)
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _release_turn(turns: Turns, _connection: object, record: Any) -> None:
    """Release the turn when the connection is returned to its pool, also after an error."""
    if record.record_info.pop(TURN, False):
        turns.give_back()
