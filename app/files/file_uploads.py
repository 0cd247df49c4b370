"""Uploads of watched runs' files in pieces, stored once they are complete.

A piece is appended to `data/runs/<id>/incoming/<SHA-256>`, whose size is the next offset.
"""

import hashlib
import logging
from pathlib import Path
from typing import BinaryIO, NamedTuple

import obstore

from app.files.downloads import RETRY_SECONDS
from db.database import Database
from db.errors import Invalid, OffsetMismatch, StorageUnreachable
from db.files.storage import is_full, open_store, put_file, storage_full
from db.settings import Settings
from db.tables import User
from db.telemetry import ingest
from halfstep.telemetry import folder_lock

logger = logging.getLogger(__name__)


class FileUpload(NamedTuple):
    """A file of a run's folder on the training machine, with its sender."""

    user: User
    run_id: int
    attempt: int
    path: str
    size_bytes: int
    sha256: str


def take_file(
    settings: Settings, database: Database, file: FileUpload, offset: int, piece: bytes
) -> int:
    """Append a piece; return the size so far. A complete file is verified and stored.

    Raises OffsetMismatch if the piece does not start at the end of the file, Invalid if it is too
    long or the hash differs, StorageUnreachable if disk or bucket fail, StorageFull if they have no
    room.
    """
    if _is_stored(database, file):
        return file.size_bytes
    part = settings.run_folder(file.run_id) / "incoming" / file.sha256
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        # Concurrent uploads of the same file are serialized.
        with folder_lock.held(part), part.open("ab") as content:
            size = _append(content, file, offset, piece)
            if size == file.size_bytes and not _is_stored(database, file):
                key = _store(settings, file, part)
                _record_stored(database, file, key)
            return size
    except (OSError, obstore.exceptions.BaseError) as error:
        # Path and error are only logged, not sent to clients.
        logger.warning("%s: %s", part, error)
        if is_full(error):
            raise storage_full(settings.data, file.size_bytes - offset) from error
        raise StorageUnreachable from error


def _append(content: BinaryIO, file: FileUpload, offset: int, piece: bytes) -> int:
    size = content.seek(0, 2)
    if offset != size:
        raise OffsetMismatch(offset=size)
    if size + len(piece) > file.size_bytes:
        text = (
            f"the piece ends at {size + len(piece)}; allowed: at most the size, {file.size_bytes}"
        )
        raise Invalid({"body": text})
    content.write(piece)
    content.flush()
    return size + len(piece)


def _store(settings: Settings, file: FileUpload, part: Path) -> str:
    """Store a complete file and return its key, which only the server chooses."""
    with part.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if sha256 != file.sha256:
        part.unlink()
        text = f"the upload has {sha256}, not {file.sha256}; start again at offset 0"
        raise Invalid({"sha256": text})
    folder = file.path.partition("/")[0]
    key = f"runs/{file.run_id}/{folder}/{file.sha256}"
    whole = settings.data / key
    whole.parent.mkdir(parents=True, exist_ok=True)
    part.replace(whole)
    put_file(open_store(settings, retry_seconds=RETRY_SECONDS), key, whole)
    if settings.storage_url:
        whole.unlink()
    return key


def _is_stored(database: Database, file: FileUpload) -> bool:
    """Return whether the file is stored. Checks permission and that a row names the file."""
    with database.writing() as session:
        ingest.lock_attempt(session, file.user, file.run_id, file.attempt)
        rows = ingest.awaited(
            session, file.run_id, file.path, size_bytes=file.size_bytes, sha256=file.sha256
        )
        return all(row.is_stored for row in rows)


def _record_stored(database: Database, file: FileUpload, key: str) -> None:
    with database.writing() as session:
        run, _attempt = ingest.lock_attempt(session, file.user, file.run_id, file.attempt)
        rows = ingest.awaited(
            session, file.run_id, file.path, size_bytes=file.size_bytes, sha256=file.sha256
        )
        ingest.stored(run, rows, key)
