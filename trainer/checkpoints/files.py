"""Atomic file writes: written under a temporary name, synced, then renamed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: errno values: a disk or a quota is full
FULL = (errno.ENOSPC, errno.EDQUOT)
PIECE_BYTES = 16 * 2**20  # unit of transfer to other machines


class SavedFile(NamedTuple):
    """A file that is durably stored under its final name."""

    path: Path
    size_bytes: int
    sha256: str


def write_whole(path: Path, write: Callable[[Any], None]) -> SavedFile:
    """Write a binary file atomically by calling `write` with it.

    Raises OSError; on a full disk with the folder, the bytes needed and the bytes free.
    """
    temporary = path.with_name(f".{path.name}.partial")
    hashing = None
    try:
        with temporary.open("wb") as file:
            hashing = HashingFile(file)
            write(hashing)
            hashing.check()
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except Exception as error:
        temporary.unlink(missing_ok=True)  # frees the space for others
        if hashing and is_full(error):
            raise disk_full(path, hashing.size_bytes) from error
        raise
    publish(temporary, path)
    return SavedFile(path, size, hashing.sha256.hexdigest())


def is_full(error: Exception) -> bool:
    """Return whether an error means that a disk, or a quota on it, has no room left."""
    return isinstance(error, OSError) and error.errno in FULL


def disk_full(path: Path, needed: int) -> OSError:
    """Return the error of a file that does not fit, with the bytes needed and free."""
    free = shutil.disk_usage(path.parent).free
    text = f"{os.strerror(errno.ENOSPC)} in {path.parent}: {path.name} needs {needed:,} bytes"
    return OSError(
        errno.ENOSPC, f"{text}, {free:,} are free. Free space, or keep fewer checkpoints"
    )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file to its final name, durably."""
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class HashingFile:
    """File wrapper that computes the SHA-256 while writing, so nothing is read again.

    On a full disk the remaining bytes are only counted, so that `check` can report the size needed:
    torch would replace an error raised within a write by one of its own, without the reason.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._error: OSError | None = None
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes) -> int:
        """Write and hash data."""
        self.size_bytes += len(data)
        if self._error is None:
            self.sha256.update(data)
            try:
                self._file.write(data)
            except OSError as error:
                if not is_full(error):
                    raise
                self._error = error
        return len(data)

    def check(self) -> None:
        """Raise the error of a disk that became full."""
        if self._error:
            raise self._error

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)
