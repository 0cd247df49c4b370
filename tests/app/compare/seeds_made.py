"""Helpers that create runs of several precisions and seeds."""

from collections.abc import Sequence
from typing import Any

from db.database import Database
from db.queue import queue, workers
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, start_run
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def offer_seeds(database: Database) -> None:
    """Register a worker whose recipe has a seed."""
    fields = SCHEMA["properties"]
    seed = {"title": "Seed", "type": "integer", "minimum": 0, "maximum": 2**32 - 1, "default": 0}
    training = fields["training"]
    training = training | {"properties": training["properties"] | {"seed": seed}}
    schema = SCHEMA | {"properties": fields | {"training": training}}
    recipes = [DIGITS | {"schema": schema}]
    offer: dict[str, Any] = {"devices": [CPU], "recipes": recipes, "versions": {}}
    with database.writing() as session:
        workers.register(session, name="w1", host="host", pid=1, **offer)


def add_seed(
    database: Database,
    owner: User,
    precision: str,
    seed: int | None,
    accuracy: float | None,
    *,
    status: Status | None = Status.FINISHED,
    steps: int = 2,
    loss: float = 1.0,
    curve: Sequence[dict[str, Any]] = (),
    **training: Any,
) -> Run:
    """Make a run that ended with this accuracy, or one that is still training if status is None.

    curve: events of further metrics.
    """
    own = training | ({} if seed is None else {"seed": seed})
    config = CONFIG | {"training": CONFIG["training"] | own}
    run = start_run(database, owner, config=config, name=f"{precision} {seed}")
    events = [] if accuracy is None else [make_metric(1, 0.1), make_metric(steps, accuracy)]
    record(database, run, make_steps([loss] * steps), events=[*events, *curve])
    with database.writing() as session:
        stored = session.get_one(Run, run.id)
        stored.config = {**config, "precision": precision}
        stored.precision = precision
        if status is not None:
            queue.end(session, run.id, run.attempt, status)
    return run


#: Accuracies of seeds 0 to 4.
FP32 = (0.960, 0.971, 0.949, 0.965, 0.956)
FP16 = (0.950, 0.960, 0.940, 0.955, 0.945)


def two_precisions(database: Database, owner: User) -> str:
    """Make five runs in fp16, 0.01 worse than five in fp32; return their ids."""
    for precision, accuracies in (("fp16", FP16), ("fp32", FP32)):
        for seed, accuracy in enumerate(accuracies):
            add_seed(database, owner, precision, seed, accuracy)
    return ",".join(map(str, range(1, 11)))
