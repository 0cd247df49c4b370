"""Erasure of runs in the trash: first their files, then their rows, one batch per transaction.

Each step can be repeated, and only the fact that a run is being erased is stored, so an interrupted
erasure continues. The run's row stays, emptied: its id is not reused, references stay valid, and
every machine can see from it which folder to delete.
"""

import time
from collections.abc import Collection
from threading import Event
from typing import Any

import obstore
from obstore.store import ObjectStore
from sqlalchemy import Table, delete, or_, select, tuple_, update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.files.object_store import PAGE_FILES, delete_files
from db.files.step_files import STEPS
from db.runs.trash import DAY_SECONDS
from db.settings import Settings
from db.tables import IN_TRASH, AuditEvent, Run, StepBlock, Trial
from db.tables import Table as Base
from halfstep import untrusted_files

#: Rows per transaction: SQLite has one writer, and other writers must not wait long.
BATCH_ROWS = 20_000
#: A block of steps is as large as so many other rows.
ROWS_OF_BLOCK = 200
#: Columns that are cleared; owner, number and times stay.
EMPTY: dict[str, object] = {
    **dict.fromkeys(("name", "note", "tags", "project"), ""),
    **dict.fromkeys(
        ("command", "script_config", "step_metrics", "error", "stop_reason", "workload")
    ),
    **dict.fromkeys(("idempotency_key", "request_hash", "watch_id")),
    **dict.fromkeys(("parent_id", "parent_step", "group_id", "after_id", "worker_id")),
    **{"config": {}, "loss": None, "scale": None, "stored_bytes": 0},
}


class Stopped(Exception):
    """The erasure was stopped before its end."""


def due(session: Session, days: float) -> list[int]:
    """Return the runs in the trash that are due: erasure requested, or older than so many days."""
    is_over = or_(Run.erasing, Run.deleted_at <= now() - days * DAY_SECONDS)
    return list(session.scalars(select(Run.id).where(IN_TRASH, is_over).order_by(Run.id)))


def erase(
    database: Database, settings: Settings, store: ObjectStore, run_id: int, stopping: Event
) -> None:
    """Erase a run that is due. Raises Stopped, or the error that deleting its files raised."""
    with database.writing() as session:
        mine = (Run.id == run_id, IN_TRASH)
        # Unless it has been restored in the meantime.
        begun = update(Run).where(*mine).values(erasing=True).returning(Run.id)
        if session.scalar(begun) is None:
            return
    _delete_files(settings, store, run_id)
    for table in tables():
        _delete_rows(database, table, run_id, stopping)
    with database.writing() as session:
        session.execute(update(Run).where(*mine).values(EMPTY | {"erased_at": now()}))


def tables() -> list[Table]:
    """List the tables with a run's own rows, in order of deletion: referenced tables last.

    Trials stay, or the sweep would repeat their points; the audit log stays too.
    """
    others = {Trial.__tablename__, AuditEvent.__tablename__}
    tables = reversed(Base.metadata.sorted_tables)
    return [table for table in tables if "run_id" in table.columns and table.name not in others]


def select_erased(session: Session, run_ids: Collection[int]) -> list[int]:
    """Return the runs that are erased or being erased."""
    return list(session.scalars(select(Run.id).where(Run.id.in_(run_ids), Run.erasing)))


def delete_folders(settings: Settings, run_id: int) -> None:
    """Delete a run's folders on this machine, if they exist."""
    for folder in (settings.scratch_folder(run_id).parent, settings.run_folder(run_id)):
        if folder.is_dir() or folder.is_symlink():
            untrusted_files.delete(folder.parent, folder.name)
        elif folder.exists():
            raise NotADirectoryError(f"{folder} is not a folder")


def _delete_files(settings: Settings, store: ObjectStore, run_id: int) -> None:
    prefixes = [f"{STEPS}/{run_id}/", *([f"runs/{run_id}/"] if settings.storage_url else [])]
    for prefix in prefixes:
        for page in obstore.list(store, prefix=prefix, chunk_size=PAGE_FILES):
            keys = [meta["path"] for meta in page if meta["path"].startswith(prefix)]
            delete_files(store, keys)
    delete_folders(settings, run_id)


def _delete_rows(database: Database, table: Table, run_id: int, stopping: Event) -> None:
    """Delete a run's rows of a table in batches, with a pause as long as each batch took."""
    key = [column for column in table.primary_key if column.name != "run_id"] or [table.c.run_id]
    mine = [table.c.run_id == run_id]
    rows = max(1, BATCH_ROWS // ROWS_OF_BLOCK) if table is StepBlock.__table__ else BATCH_ROWS
    last: Any = ()
    while last is not None:
        if last:  # otherwise PostgreSQL scans the deleted rows again
            mine[1:] = [tuple_(*key) >= tuple_(*last)]
        begun = time.monotonic()
        with database.writing() as session:
            further = select(*key).where(*mine).order_by(*key).offset(rows).limit(1)
            last = session.execute(further).one_or_none()
            batch = [*mine, tuple_(*key) < tuple_(*last)] if last else mine
            session.execute(delete(table).where(*batch))
        if last is not None and stopping.wait(time.monotonic() - begun):
            raise Stopped
