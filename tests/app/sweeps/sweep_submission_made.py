"""Shared helpers of the tests of sweep submission."""

import math
from typing import Any

from sqlalchemy import select

from app.sweeps import sweep_submission
from app.sweeps.sweep_submission import SweepSubmission
from db.database import Database
from db.runs import runs
from db.tables import Status, Trial, User
from halfstep.telemetry.flags import NONFINITE_LOSS

LRS = {"training.max_grad_norm": "0.1, 1, off"}


def begin(database: Database, owner: User, **changes: Any) -> int:
    """Begin a sweep of digits; return its number."""
    values: dict[str, Any] = {"recipe": "digits", "space": LRS, "goal": "minimise"}
    with database.writing() as session:
        return sweep_submission.begin(session, owner, SweepSubmission(**(values | changes))).id


def finish(
    database: Database, run_id: int, loss: float = 1.0, status: Status = Status.FINISHED
) -> None:
    """End a run as if it had trained five steps."""
    with database.writing() as session:
        run = runs.get(session, run_id, lock=True)
        run.step, run.loss = 5, loss
        run.last_flags = 0 if math.isfinite(loss) else NONFINITE_LOSS
        runs.set_status(session, run, status)


def members(database: Database, sweep_id: int) -> list[tuple[int, dict[str, Any], str, Any]]:
    """Return number, settings, state and value of each trial."""
    with database.reading() as session:
        query = select(Trial).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
        return [(row.number, row.params, row.state, row.value) for row in session.scalars(query)]
