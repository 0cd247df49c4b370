"""Uploads of files in pieces, of watched runs and of artifacts, stored once they are complete.

A piece is appended to `incoming/<SHA-256>` in the folder of the run or of the artifacts, whose size
is the next offset.
"""

import hashlib
import logging
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import obstore
from sqlalchemy.orm import Session

from app.files.downloads import RETRY_SECONDS
from db.database import Database
from db.errors import HalfstepError, Invalid, OffsetMismatch, StorageUnreachable
from db.files import artifact_versions
from db.files.object_store import delete_file, is_full, open_store, put_file, storage_full
from db.files.storage import BLOBS
from db.queue import quotas
from db.settings import Settings
from db.tables import Artifact, CheckpointFile, Run, User
from db.telemetry import ingest
from halfstep.telemetry import folder_lock

logger = logging.getLogger(__name__)


class Upload(Protocol):
    """A file that is uploaded."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole file."""

    def part(self, settings: Settings) -> Path:
        """Return where its pieces are collected."""

    def is_stored(self, session: Session) -> bool:
        """Return whether it is stored. Checks permission and that a row names the file."""

    def new_key(self) -> str:
        """Return the key to store it under, which only the server chooses."""

    def record(self, session: Session, key: str) -> str:
        """Record that it is stored under a key; return the key that its rows have."""


class FileUpload(NamedTuple):
    """A file of a run's folder on the training machine, with its sender."""

    user: User
    run_id: int
    attempt: int
    path: str
    size_bytes: int
    sha256: str

    def part(self, settings: Settings) -> Path:
        """Return where its pieces are collected."""
        return settings.run_folder(self.run_id) / "incoming" / self.sha256

    def is_stored(self, session: Session) -> bool:
        """Return whether it is stored. Checks permission and that a row names the file.

        Raises OverQuota for content of named artifacts that has no room in the project.
        """
        run, _attempt = ingest.lock_attempt(session, self.user, self.run_id, self.attempt)
        if not self._is_blob:
            return all(row.is_stored for row in self._find_awaited(session))
        is_stored = artifact_versions.is_stored(
            session, self.sha256, self.size_bytes, run_id=self.run_id
        )
        if not is_stored:
            quotas.check_storage(session, run.project, self.size_bytes)
        return is_stored

    def new_key(self) -> str:
        """Return the key to store it under."""
        if self._is_blob:
            return artifact_versions.new_key(self.sha256)
        folder = self.path.partition("/")[0]
        return f"runs/{self.run_id}/{folder}/{self.sha256}"

    def record(self, session: Session, key: str) -> str:
        """Record that it is stored under a key; return the key that its rows have."""
        if self._is_blob and (unlocked := session.get(Run, self.run_id)):
            quotas.lock_limits(session, unlocked.project)
        run, _attempt = ingest.lock_attempt(session, self.user, self.run_id, self.attempt)
        if not self._is_blob:
            ingest.record_stored(run, self._find_awaited(session), key)
            return key
        key = artifact_versions.store_blob(
            session, self.sha256, self.size_bytes, key, run_id=self.run_id
        )
        quotas.check_storage(session, run.project, 0)  # which others may have filled meanwhile
        return key

    @property
    def _is_blob(self) -> bool:
        """Whether it is content of named artifacts."""
        return self.path == f"{BLOBS}/{self.sha256}"

    def _find_awaited(self, session: Session) -> list[CheckpointFile | Artifact]:
        return ingest.find_awaited(
            session, self.run_id, self.path, size_bytes=self.size_bytes, sha256=self.sha256
        )


def take_file(
    settings: Settings, database: Database, file: Upload, offset: int, piece: bytes
) -> int:
    """Append a piece; return the size so far. A complete file is verified and stored.

    Raises OffsetMismatch if the piece does not start at the end of the file, Invalid if it is too
    long or the hash differs, StorageUnreachable if disk or bucket fail, StorageFull if they have no
    room, OverQuota if the project has none.
    """
    if _is_stored(database, file):
        return file.size_bytes
    part = file.part(settings)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        # Concurrent uploads of the same file are serialized.
        with folder_lock.held(part), part.open("ab") as content:
            size = _append(content, file, offset, piece)
            if size == file.size_bytes and not _is_stored(database, file):
                _store(settings, database, file, part)
            return size
    except (OSError, obstore.exceptions.BaseError) as error:
        # Path and error are only logged, not sent to clients.
        logger.warning("%s: %s", part, error)
        if is_full(error):
            raise storage_full(settings.data, file.size_bytes - offset) from error
        raise StorageUnreachable from error


def _append(content: BinaryIO, file: Upload, offset: int, piece: bytes) -> int:
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


def _store(settings: Settings, database: Database, file: Upload, part: Path) -> None:
    """Store a complete file."""
    with part.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if sha256 != file.sha256:
        part.unlink()
        text = f"the upload has {sha256}, not {file.sha256}; start again at offset 0"
        raise Invalid({"sha256": text})
    key, store = file.new_key(), open_store(settings, retry_seconds=RETRY_SECONDS)
    if settings.storage_url:
        put_file(store, key, part)  # which stays if the bucket fails: the next piece tries again
        part.unlink()
    else:
        whole = settings.data / key
        whole.parent.mkdir(parents=True, exist_ok=True)
        part.replace(whole)
    try:
        with database.writing() as session:
            is_used = file.record(session, key) == key
    except HalfstepError:
        if key.startswith(f"{BLOBS}/"):  # other keys are not new: a row may have them already
            delete_file(store, key)
        raise
    if not is_used:
        delete_file(store, key)


def _is_stored(database: Database, file: Upload) -> bool:
    with database.writing() as session:
        return file.is_stored(session)
