"""The copy of a SQLite database that is made before a migration."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from db.errors import Conflict

#: Free space besides the copy, for the migration itself.
SPARE_BYTES = 64 * 2**20
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


def copies(path: Path) -> list[Path]:
    """Return the copies of a database."""
    return sorted(path.parent.glob(f"{path.name}{MARK}*"))
