"""Uploads of weights: hashed while they arrive, stored once they are complete."""

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

import obstore
from starlette.exceptions import HTTPException

from app.files.downloads import RETRY_SECONDS
from app.html.formats import memory
from db.database import Database
from db.errors import Invalid, StorageUnreachable
from db.files import uploads
from db.files.object_store import is_full, open_store, put_file, storage_full
from db.settings import Settings
from halfstep.config_groups import UPLOAD

logger = logging.getLogger(__name__)

SAFETENSORS, PICKLE = KINDS = (".safetensors", ".pt")
NAME_CHARACTERS = 100
#: Magic bytes of torch.save: a zip, or the format before 1.6.
OF_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
#: Head of a safetensors file: the length of its header and its opening brace.
HEAD_BYTES = 9


class Stored(NamedTuple):
    """A stored upload."""

    upload: str  # as in `weights.upload`
    size_bytes: int
    sha256: str


class Upload:
    """Upload of a file, discarded unless `keep` is called. Raises Invalid, HTTPException 413."""

    def __init__(self, settings: Settings, name: str, declared_bytes: int) -> None:
        if not name.endswith(KINDS):
            kinds = " or ".join(KINDS)
            text = f"{name[:NAME_CHARACTERS]!r} is not a weights file; allowed: {kinds}"
            raise Invalid({"name": text})
        if "/" in name or "\\" in name:
            text = f"{name[:NAME_CHARACTERS]!r} contains a folder; allowed: a file name"
            raise Invalid({"name": text})
        self._name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[-NAME_CHARACTERS:].lstrip("-.")
        self._settings = settings
        self._check_size(declared_bytes)
        self._declared_bytes = declared_bytes
        self._size, self._digest, self._head = 0, hashlib.sha256(), b""
        self._path = settings.data / uploads.FOLDER / "incoming" / uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        if isinstance(error, OSError | obstore.exceptions.BaseError):
            # Path and error are only logged, not sent to clients.
            logger.warning("the upload %s in %s: %s", self._name, self._path.parent, error)
            if is_full(error):
                needed = max(self._declared_bytes, self._size)
                raise storage_full(self._settings.data, needed) from error
            raise StorageUnreachable from error

    def add(self, piece: bytes) -> None:
        """Append bytes."""
        self._size += len(piece)
        self._check_size(self._size)
        self._digest.update(piece)
        self._head = (self._head + piece[:HEAD_BYTES])[:HEAD_BYTES]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(piece)

    def keep(self) -> Stored:
        """Store the complete file."""
        if not self._size:
            raise Invalid({"body": f"{self._name} is empty; allowed: a file of weights"})
        self._check_content()
        sha256 = self._digest.hexdigest()
        upload = f"{sha256}/{self._name}"
        key = uploads.key(upload)
        if self._settings.storage_url:
            store = open_store(self._settings, retry_seconds=RETRY_SECONDS)
            put_file(store, key, self._path)
        else:
            whole = self._settings.data / key
            whole.parent.mkdir(parents=True, exist_ok=True)
            self._path.replace(whole)
        return Stored(upload, self._size, sha256)

    def _check_content(self) -> None:
        """Check the magic bytes, to reject renamed files of other formats."""
        if self._name.endswith(PICKLE):
            kind, is_valid = "torch.save", self._head.startswith(OF_TORCH)
        else:
            length = int.from_bytes(self._head[:8], "little")
            kind, is_valid = "safetensors", self._head[8:] == b"{" and length + 8 <= self._size
        if not is_valid:
            text = f"{self._name} does not have the format of {kind}"
            raise Invalid({"body": f"{text}; allowed: a file of weights"})

    def _check_size(self, size_bytes: int) -> None:
        most = largest_bytes(self._settings)
        if size_bytes > most:
            allowed = f"at most {memory(most)}" if most else "none"
            text = f"The file {self._name} is too large; allowed by HALFSTEP_UPLOAD_GIB: {allowed}."
            raise HTTPException(413, text)


def largest_bytes(settings: Settings) -> int:
    """Return the largest size of an upload; 0 if uploads are disabled."""
    return int(settings.upload_gib * 2**30)


def lost(settings: Settings, config: Mapping[str, object]) -> dict[str, str]:
    """Return an error at its field if the upload of a configuration no longer exists.

    Called before a transaction, since a bucket may be slow. An unreachable bucket is no error: the
    worker waits for it.
    """
    weights = config.get("weights")
    upload = weights.get("upload") if isinstance(weights, dict) else None
    if not isinstance(upload, str) or not re.fullmatch(UPLOAD, upload):
        return {}  # the recipe's schema reports it
    try:
        is_there = _is_there(settings, upload)
    except obstore.exceptions.BaseError:
        return {}
    text = f"{upload} no longer exists: unused uploads are deleted after a day"
    return {} if is_there else {uploads.SETTING: f"{text}; allowed: upload it again"}


def _is_there(settings: Settings, upload: str) -> bool:
    """Return whether the upload exists; on this disk, extend its lifetime by a day."""
    try:
        if settings.storage_url:
            store = open_store(settings, retry_seconds=RETRY_SECONDS)
            obstore.head(store, uploads.key(upload))
        else:
            os.utime(settings.data / uploads.key(upload))
    except FileNotFoundError:
        return False
    return True


def tidy(settings: Settings, database: Database) -> None:
    """Delete uploads that no run starts from."""
    with database.writing() as session:
        used = uploads.named(session)
        uploads.forget_unused(session, used)
    uploads.delete_unused_here(settings, used)
    if settings.storage_url:
        uploads.delete_unused(open_store(settings, retry_seconds=RETRY_SECONDS), used)
