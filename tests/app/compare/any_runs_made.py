"""Shared helpers of the tests of any runs."""

from typing import Any

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, start_run
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_steps,
    record,
)


def train(
    database: Database, owner: User, losses: list[float], *, ended: bool = True, **training: Any
) -> Run:
    """Make a run with these losses and a measured accuracy; its second step was skipped."""
    config = CONFIG | {"training": CONFIG["training"] | training}
    run = start_run(database, owner, config=config, name=f"run of {training}")
    accuracy = [make_metric(step, 1 / (1 + loss)) for step, loss in enumerate(losses, start=1)]
    events = [*accuracy, *make_events([2]), make_metric(1, losses[-1], "val/score")]
    record(database, run, make_steps(losses, skipped=[2]), events=events)
    if ended:
        with database.writing() as session:
            queue.end(session, run.id, 1, Status.FINISHED)
    return run
