"""Shared helpers of the tests of trash."""

from typing import Any

from db.database import Database
from db.runs import trash
from db.tables import User

WATCHED: dict[str, Any] = {
    **{"name": "n", "project": "", "config": {}, "tags": "", "started_at": 0.0},
    **{"host": "h", "versions": {}},
}


def move_to_trash(database: Database, ada: User, run_id: int) -> None:
    with database.writing() as session:
        trash.delete(session, run_id, ada)
