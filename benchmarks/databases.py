"""Durable databases to measure, unlike those of the tests."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from db.database import Database


@contextmanager
def sqlite() -> Iterator[Database]:
    """Yield a fresh SQLite database, as the product sets it up (WAL, synchronous FULL)."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        database = Database(f"sqlite:///{folder}/halfstep.db")
        database.migrate()
        yield database
        database.dispose()


@contextmanager
def postgresql(connections: int = 100) -> Iterator[Database]:
    """Yield a fresh database of a private PostgreSQL server with default settings.

    connections: the number of connections that it allows.
    """
    binaries = max(Path("/usr/lib/postgresql").glob("*/bin"))
    folder = Path(tempfile.mkdtemp(prefix="halfstep-bench-"))
    # PostgreSQL does not run as root; Debian's package adds a user for it.
    user = "postgres" if os.geteuid() == 0 else None
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, user=user, cwd=folder)

    run(f"{binaries}/initdb", "-D", "data", "-U", "halfstep", "-A", "trust", "-E", "UTF8")
    options = f"-k {folder} -c listen_addresses='' -c max_connections={connections}"
    run(f"{binaries}/pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")
    try:
        database = Database(f"postgresql+psycopg://halfstep@/postgres?host={folder}")
        database.migrate()
        yield database
        database.dispose()
    finally:
        run(f"{binaries}/pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)
