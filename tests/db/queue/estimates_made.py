"""Shared helpers of the tests of estimates."""

from db.database import Database
from db.runs import runs
from db.tables import CheckpointFile, Status, User
from tests.db.conftest import config, submit


def add_finished(database: Database, ada: User, speed: float, batch_size: int, *sizes: int) -> int:
    """Add a run that made its steps at a speed, with files of its last checkpoint and an older."""
    with database.writing() as session:
        run = submit(session, ada, config=config(batch_size=batch_size))
        runs.set_status(session, run, Status.FINISHED)
        run.steps_per_second = speed
        for step in (50, 100):
            for number, size in enumerate(sizes):
                kind = "checkpoint" if not number else "weights"
                file = {"kind": kind, "key": "k", "attempt": 1, "reason": "end", "sha256": "ab"}
                size_bytes = size if step == 100 else 1
                session.add(CheckpointFile(run_id=run.id, step=step, size_bytes=size_bytes, **file))
        return run.id
