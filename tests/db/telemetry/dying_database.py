"""A database whose process is killed in the midst of a transaction."""

import multiprocessing
import os
import signal
from typing import Any

from sqlalchemy import event

from db.database import Database

#: Starts processes by forking one that has loaded what they need.
DYING = multiprocessing.get_context("forkserver")
DYING.set_forkserver_preload([f"{__package__}.test_step_{end}" for end in ("blocks", "conversion")])


def dying_database(url: str, point: int) -> Database:
    """Return a database that kills this process before its point-th statement that writes."""
    database, count = Database(url), 0

    def die(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        nonlocal count
        count += statement.lstrip().startswith(("INSERT", "UPDATE", "DELETE"))
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(database.engine, "before_cursor_execute", die)
    return database
