"""Online backup of database and stored files, and restore into SQLite or PostgreSQL.

<folder>/tables/<table>.jsonl.gz    one row a line, all tables from one snapshot
<folder>/files/<key>                the store's files: checkpoints, artifacts and uploaded weights
                                    that runs start from
<folder>/backup.json                rows, files and format

The folder appears under its name once it is complete; a backup that fails leaves nothing.
"""

import base64
import errno
import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from obstore.store import LocalStore, ObjectStore
from sqlalchemy import Integer, Table, delete, exists, func, insert, or_, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.errors import Conflict, Invalid
from db.files import uploads
from db.files.object_store import get_file, is_plain, put_file
from db.files.step_files import STEPS, check_has_steps
from db.files.storage import Stored
from db.tables import (
    ApiToken,
    Artifact,
    ArtifactEntry,
    ArtifactVersion,
    AuditEvent,
    Backup,
    Blob,
    CheckpointFile,
    Delivery,
    FrozenSteps,
    MetricBlock,
    MetricBucket,
    ReportImage,
    Run,
    SharedLink,
    SharedRun,
    SignInLink,
    SignInSession,
    StepBlock,
    StepBucket,
    User,
)
from db.tables import Table as Base
from db.telemetry import damage_search, step_block_writer, step_conversion

FORMAT = 1
ROWS = 1000
WITH_FILES = tuple(table.__table__ for table in (CheckpointFile, Artifact, FrozenSteps, Blob))
#: Derived from the steps; `restore` computes them.
DERIVED = (StepBucket.__table__, MetricBucket.__table__)
#: Sign-ins end with a restore: some may have been ended since the backup was made.
SIGN_INS = (SignInSession.__table__, SignInLink.__table__)
NOT_SENT = "not sent: restored from a backup; it may have been sent after the backup"
NOT_SAVED = (*DERIVED, *SIGN_INS, Backup.__table__)
TABLES = [table for table in Base.metadata.sorted_tables if table not in NOT_SAVED]
#: Backups whose rows are kept, and how long an error in one may be.
MOST_KNOWN, ERROR_CHARACTERS = 200, 500
#: How often a backup reports that it runs.
RENEWAL_SECONDS = 60.0
#: How a column's values are written to JSON and read back, by their Python type.
CODECS: dict[type, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    **dict.fromkeys((bool, int, float, str, object), (lambda value: value, lambda value: value)),
}


class _File(NamedTuple):
    """A file that a row names."""

    sha256: str
    size_bytes: int


def back_up(
    database: Database,
    store: ObjectStore,
    folder: Path,
    *,
    previous: Path | None = None,
    slot: int | None = None,
    verifies: bool = False,
) -> dict[str, Any]:
    """Write a backup into a new folder and return its summary.

    previous: an earlier backup on the same disk; its files that are still the same become hard
    links instead of copies.  slot: see Backup; IntegrityError if another backup has it.  verifies:
    restore the backup into a scratch database before it gets its name.

    Returns {format, rows, files, linked, left_out, damaged}. left_out lists the keys of files that
    are missing or damaged, or that lead out of the folder; `restore` leaves out their rows. damaged
    lists blocks of steps and metrics that are copied as they are.

    Raises Conflict if the folder exists or the database cannot be written, Invalid if the folder
    cannot be written or the disk is too small, StorageUnreachable if files of steps are recorded
    and the store has none.
    """
    if folder.exists():
        raise Conflict(f"{folder} exists already: name a folder that does not.")
    with _record(database, folder, slot):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        except OSError as error:
            message = f"{folder} cannot be written: {error.strerror}; choose another folder"
            raise Invalid({"folder": message}) from error
        try:
            with _disk_space_named(folder):
                content = _write(database, store, partial, previous)
                if verifies:
                    verify(partial, left_out=len(content["left_out"]))
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial)
            raise
    return content


@contextmanager
def _record(database: Database, folder: Path, slot: int | None) -> Iterator[None]:
    """Record a backup from its start to its end.

    While it runs no file is deleted that is replaced after this backup has read its row, see
    `is_backup_running`. A backup that is killed counts for an hour. Raises Conflict if the
    database cannot be written.
    """
    done = Event()
    try:
        with database.writing() as session:
            row = Backup(folder=str(folder), slot=slot)
            session.add(row)
            session.flush()
            its = Backup.id == row.id
            session.execute(delete(Backup).where(Backup.id <= row.id - MOST_KNOWN))
    except IntegrityError:
        raise
    except DBAPIError as error:
        raise Conflict(
            f"{database.name} cannot be written: {str(error.orig).strip()}. A backup records there "
            "that it runs, so that servers keep the files which it copies: back up the primary, as "
            "a user who may write."
        ) from error

    def record(**values: object) -> None:
        with suppress(DBAPIError), database.writing() as session:
            session.execute(update(Backup).where(its).values(seen_at=now(), **values))

    def renew() -> None:
        while not done.wait(RENEWAL_SECONDS):
            record()

    renewal = Thread(target=renew, daemon=True)
    renewal.start()
    ending: dict[str, object] = {"slot": None, "error": "it was interrupted"}
    try:
        yield
        ending = {}
    except Exception as error:
        ending["error"] = (str(error) or type(error).__name__)[:ERROR_CHARACTERS]
        raise
    finally:
        done.set()
        renewal.join()
        record(ended_at=now(), **ending)


def _write(
    database: Database, store: ObjectStore, folder: Path, previous: Path | None
) -> dict[str, Any]:
    (folder / "tables").mkdir()
    with database.reading() as session:
        rows = sum(_write_table(session, table, folder) for table in TABLES)
        files = _list_stored_files(session)
        damaged = list(map(str, damage_search.find_in_blocks(session.connection())))
    if any(key.startswith(f"{STEPS}/") for key in files):
        check_has_steps(store)
    linked = {key for key in files if previous and _link_file(previous, key, folder, files[key])}
    needed_bytes = sum(files[key].size_bytes for key in files.keys() - linked)
    if needed_bytes > (free := shutil.disk_usage(folder).free):
        raise OSError(errno.ENOSPC, f"files of {needed_bytes:,} bytes, {free:,} bytes are free")
    left_out = [
        key for key in files if key not in linked and not _copy_file(store, key, folder, files[key])
    ]
    content = {"format": FORMAT, "rows": rows, "files": len(files) - len(left_out)}
    (folder / "backup.json").write_text(json.dumps(content))
    return {**content, "linked": len(linked), "left_out": left_out, "damaged": damaged}


def _list_stored_files(session: Session) -> dict[str, _File]:
    """Return the files that rows name, by key. The sizes of uploads are not recorded: 0."""
    rows: list[Stored] = [
        *session.scalars(select(CheckpointFile)),
        *session.scalars(select(Artifact)),
        *session.scalars(select(FrozenSteps)),
        *session.scalars(select(Blob)),
    ]
    files = {row.key: _File(row.sha256, row.stored_bytes) for row in rows if row.is_stored}
    for image in session.scalars(select(ReportImage)):
        files[image.key] = _File(image.sha256, image.size_bytes)
    for upload in uploads.named(session):
        files[uploads.key(upload)] = _File(upload.partition("/")[0], 0)
    return files


def _link_file(previous: Path, key: str, folder: Path, file: _File) -> bool:
    """Link a file of an earlier backup into this one; return False if it is not the same."""
    source, target = previous / "files" / key, folder / "files" / key
    if not (is_plain(previous / "files", key) and is_plain(folder / "files", key)):
        return False
    try:
        with source.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                return False
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(source)
    except OSError:  # absent, or on another disk
        return False
    return True


def _copy_file(store: ObjectStore, key: str, folder: Path, file: _File) -> bool:
    """Copy one of the store's files into the backup; return False if it is not sound."""
    path = folder / "files" / key
    if not is_plain(folder / "files", key):
        return False
    try:
        get_file(store, key, path, sha256=file.sha256)
    except (FileNotFoundError, ValueError):  # deleted since the rows were read, or damaged
        path.unlink(missing_ok=True)
        return False
    return True


@contextmanager
def _disk_space_named(folder: Path) -> Iterator[None]:
    """Turn a full disk into an error that names the folder. Raises Invalid."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder.parent).free
        space = error.strerror if "free" in str(error.strerror) else f"{free:,} bytes are free"
        message = f"the disk of {folder} has too little space ({space})"
        raise Invalid({"folder": f"{message}; choose a folder on a larger disk"}) from error


def restore(
    database: Database, store: ObjectStore, folder: Path, *, revoke: bool = False
) -> dict[str, object]:
    """Fill an empty, migrated database and the store from a backup.

    All sessions and sign-in links end, and deliveries that were due are not sent. API tokens and
    shared links of the backup are valid again, also those that were revoked since; `revoke`
    deletes them.

    Returns {rows, files, unsent, tokens, shared_links}; unsent: how many deliveries were due. See
    valid_tokens and valid_links.

    Raises Invalid if the folder is not a backup, Conflict if the database has runs.
    """
    try:
        content = json.loads((folder / "backup.json").read_text())
    except FileNotFoundError as error:
        raise Invalid({"folder": f"{folder} has no backup.json: it is not a backup"}) from error
    if content["format"] != FORMAT:
        raise Invalid({"folder": f"{folder} has format {content['format']}; supported: {FORMAT}"})
    files = [path for path in (folder / "files").rglob("*") if path.is_file()]
    keys = {path.relative_to(folder / "files").as_posix(): path for path in files}
    rows, available = 0, {*keys, ""}  # without a key: a file that was never stored here
    with database.reading() as session:
        _check_empty(session, database)
    for key, path in keys.items():  # before the rows that name them, and without locks
        put_file(store, key, path)
    with database.writing() as session:
        _check_empty(session, database)
        for table in (*NOT_SAVED, *reversed(TABLES)):
            session.execute(table.delete())
        for table in TABLES:
            stored = _read_table(table, folder)
            while batch := list(islice(stored, ROWS)):
                valid = [row for row in batch if table not in WITH_FILES or row["key"] in available]
                if table is ArtifactEntry.__table__:
                    valid = _without_lost_blobs(session, valid)
                if valid:
                    session.execute(insert(table), valid)
                rows += len(valid)
            _reset_sequence(session, table)
        is_lacking = exists().where(
            ArtifactEntry.version_id == ArtifactVersion.id, ArtifactEntry.blob_id.is_(None)
        )
        session.execute(update(ArtifactVersion).where(is_lacking).values(completed_at=None))
        if not _table_file(folder, MetricBlock.__table__).exists():  # of an earlier version
            has_steps = _table_file(folder, StepBlock.__table__).exists()
            step_conversion.note_due(session, steps=not has_steps)
        waiting = set(step_conversion.unread(session))
        for run_id in session.scalars(select(Run.id)).all():
            if run_id not in waiting:
                step_block_writer.rebuild(session.connection(), run_id, lost=True)
        if revoke:
            for secret in (SharedRun, SharedLink, ApiToken):
                session.execute(delete(secret))
        unsent = _end_deliveries(session)
        secrets = {"tokens": valid_tokens(session), "shared_links": valid_links(session)}
    return {"rows": rows, "files": len(keys), "unsent": unsent, **secrets}


def verify(folder: Path, *, left_out: int = 0) -> None:
    """Restore a backup into a scratch database next to it. Raises Conflict if it lacks rows.

    left_out: how many files it lacks, whose rows are not restored.
    """
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=folder.parent) as scratch:
        database = Database(f"sqlite:///{scratch}/verify.db")
        try:
            database.migrate()
            files = LocalStore(folder / "files", mkdir=True)  # they stay where they are
            restored = restore(database, files, folder)
        finally:
            database.dispose()
    content = json.loads((folder / "backup.json").read_text())
    rows, files_found = restored["rows"], restored["files"]
    if rows < content["rows"] - left_out or files_found != content["files"]:
        raise Conflict(
            f"the backup has {content['rows']} rows and {content['files']} files, but restores "
            f"{rows} and {files_found}: back up again."
        )


def _without_lost_blobs(session: Session, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return files of artifacts without content that the backup left out."""
    ids = {row["blob_id"] for row in rows}
    known = set(session.scalars(select(Blob.id).where(Blob.id.in_(ids))))
    return [row if row["blob_id"] in known else row | {"blob_id": None} for row in rows]


def _end_deliveries(session: Session) -> int:
    """End the deliveries that were due: they may have been sent since the backup."""
    ended = update(Delivery).where(Delivery.ended_at.is_(None))
    ended = ended.values(ended_at=now(), answer=NOT_SENT).returning(Delivery.id)
    return len(session.scalars(ended).all())


def valid_tokens(session: Session) -> list[dict[str, object]]:
    """Return {user, name, kind, project, expires_at} of each API token that still works."""
    columns = (ApiToken.name, ApiToken.kind, ApiToken.project, ApiToken.expires_at)
    query = select(User.name.label("user"), *columns).join(User, User.id == ApiToken.user_id)
    query = query.where(or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > now()))
    return [dict(row) for row in session.execute(query.order_by(ApiToken.id)).mappings()]


def valid_links(session: Session) -> list[dict[str, object]]:
    """Return {user, id, expires_at} of each shared link that still works."""
    columns = (User.name.label("user"), SharedLink.id, SharedLink.expires_at)
    query = select(*columns).join(User, User.id == SharedLink.user_id)
    query = query.where(SharedLink.expires_at > now()).order_by(SharedLink.id)
    return [dict(row) for row in session.execute(query).mappings()]


def _check_empty(session: Session, database: Database) -> None:
    """Check that a restore would delete neither runs nor an audit log. Raises Conflict."""
    for table, content in ((Run, "runs"), (AuditEvent, "an audit log")):
        if session.scalar(select(table.id).limit(1)) is not None:
            raise Conflict(
                f"{database.name} has {content} already: restore into a new database "
                "(another HALFSTEP_DATA or HALFSTEP_DATABASE_URL)."
            )


def _write_table(session: Session, table: Table, folder: Path) -> int:
    count = 0
    encode = {column.name: CODECS[column.type.python_type][0] for column in table.columns}
    with gzip.open(_table_file(folder, table), "wt") as file:
        query = select(table).order_by(*table.primary_key)
        with session.execute(query.execution_options(yield_per=ROWS)) as result:
            for row in result.mappings():
                file.write(json.dumps(_convert(dict(row), encode)) + "\n")
                count += 1
    return count


def _read_table(table: Table, folder: Path) -> Iterator[dict[str, object]]:
    path = _table_file(folder, table)
    decode = {column.name: CODECS[column.type.python_type][1] for column in table.columns}
    if path.exists():
        with gzip.open(path, "rt") as file:
            yield from (_convert(json.loads(line), decode) for line in file)


def _table_file(folder: Path, table: Any) -> Path:
    return folder / "tables" / f"{table.name}.jsonl.gz"


def _convert(row: Mapping[str, Any], codec: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: None if value is None else codec[name](value) for name, value in row.items()}


def _reset_sequence(session: Session, table: Table) -> None:
    """Set PostgreSQL's sequence to continue after the restored rows."""
    key = table.primary_key.columns.values()
    numbered = len(key) == 1 and isinstance(key[0].type, Integer)
    if numbered and session.connection().dialect.name == "postgresql":
        sequence = func.pg_get_serial_sequence(table.name, key[0].name)
        highest = select(func.max(key[0])).scalar_subquery()
        session.execute(select(func.setval(sequence, func.coalesce(highest, 1))))
