"""The copy of a SQLite database that is made before a migration."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from db.errors import Conflict

#: Free space besides the copy, for the migration itself.
SPARE_BYTES = 64 * 2**20
#: What is copied to measure a copy, and pages of each part of it.
MEASURED_BYTES, PART_PAGES = 64 * 2**20, 1024
MARK = ".before-"


def estimate_needed_bytes(path: Path) -> int:
    """Return the free space that a copy needs: the size of the file and of its log."""
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists()) + SPARE_BYTES


def copy(path: Path, revision: str) -> Path:
    """Copy a database next to it, instead of an earlier copy. Raises Conflict if it is too large.

    revision: that the database has.
    """
    needed, free = estimate_needed_bytes(path), shutil.disk_usage(path.parent).free
    if free < needed:
        raise Conflict(
            f"A migration first copies {path}: {needed:,} bytes, of which {free:,} are free. "
            "Free this space; nothing was changed."
        )
    made = path.with_name(f"{path.name}{MARK}{revision}")
    partial = path.with_name(f"{made.name}.partial-{os.getpid()}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as target:
            source.backup(target)
        partial.replace(made)
    finally:
        partial.unlink(missing_ok=True)
    for earlier in copies(path):
        if earlier != made:
            earlier.unlink(missing_ok=True)
    return made


class _Enough(Exception):
    """Enough is copied to measure a copy."""


def estimate_seconds(path: Path) -> float:
    """Copy a part of a database, and return about the seconds that a copy of all takes."""
    size = path.stat().st_size

    def end(_status: int, left: int, pages: int) -> None:
        if (pages - left) * size / pages > MEASURED_BYTES:
            raise _Enough((pages - left) / pages)

    copied, begun = 1.0, monotonic()
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as target:
            try:
                source.backup(target, pages=PART_PAGES, progress=end)
            except _Enough as error:
                [copied] = error.args
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        return (monotonic() - begun) / copied


def copies(path: Path) -> list[Path]:
    """Return the copies of a database."""
    return sorted(path.parent.glob(f"{path.name}{MARK}*"))
