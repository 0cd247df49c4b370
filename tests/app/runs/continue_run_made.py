"""Shared helpers of the tests of continue run."""

from typing import Any

from db.database import Database
from db.files import checkpoints
from db.runs import runs
from db.tables import Run, Status
from tests.spool_made import checkpoint_of


def end(database: Database, run: Run, status: Status, *steps: int) -> None:
    """End a run that has left checkpoints."""
    with database.writing() as session:
        for step in steps:
            file = {"kind": "checkpoint", "size_bytes": 1, "sha256": "ab", "path": "/gone"}
            event: dict[str, Any] = {"step": step, "reason": "cancel", "files": [file]}
            checkpoints.publish(session, run.id, run.attempt, checkpoint_of(event), ["key"])
        runs.set_status(session, session.get_one(Run, run.id), status)
