"""A database whose process is killed within a transaction."""

import os
import signal
from typing import Any

from sqlalchemy import event

from db.database import Database


def dying_database(url: str, point: int) -> Database:
    """Return a database that kills this process before its n-th writing statement."""
    database, count = Database(url), 0

    def die(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        nonlocal count
        count += statement.lstrip().startswith(("INSERT", "UPDATE", "DELETE"))
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(database.engine, "before_cursor_execute", die)
    return database
