"""Files that are whole or not there: written under another name, synced, then given their own."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PIECE_BYTES = 16 * 2**20  # of a file on its way to other machines


class SavedFile(NamedTuple):
    """A file that is on the disk, under its final name, to stay."""

    path: Path
    size_bytes: int
    sha256: str


def write_whole(path: Path, write: Callable[[Any], None]) -> SavedFile:
    """Let `write` fill a binary file, which then appears under its name with all of its bytes."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            hashing = HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except Exception:
        temporary.unlink(missing_ok=True)  # on a full disk others need the room
        raise
    publish(temporary, path)
    return SavedFile(path, size, hashing.sha256.hexdigest())


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name, to stay."""
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
    """Passes writes on to a file and keeps their SHA-256, so that nothing is read again."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Write and hash."""
        self.sha256.update(data)
        self._file.write(data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
