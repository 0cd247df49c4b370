"""Shared helpers of the tests of suggested actions."""

import math
from copy import deepcopy
from typing import Any

from db.database import Database
from db.files import checkpoints
from db.queue import workers
from db.tables import User
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, start_run
from tests.db.telemetry.telemetry_made import make_skip, make_steps, record
from tests.spool_made import checkpoint_of

RATE = {"title": "Learning rate", "type": "number", "exclusiveMinimum": 0, "default": 0.01}


FLOOR = {"title": "Floor", "type": "number", "minimum": 0, "default": 0.0}


def offer(database: Database, *, bf16: bool) -> None:
    """Register a worker with a recipe that has a learning rate and a minimum scale."""
    schema: dict[str, Any] = deepcopy(SCHEMA)
    schema["properties"]["training"]["properties"]["learning_rate"] = RATE
    schema["properties"]["scaler"]["properties"]["floor"] = FLOOR
    what: dict[str, Any] = {"devices": [CPU | {"bf16": bf16}], "versions": {}}
    with database.writing() as session:
        recipes = [DIGITS | {"schema": schema}]
        workers.register(session, name="w1", host="host", pid=1, recipes=recipes, **what)


def fall(database: Database, ada: User, *, rate: float = 40.0) -> None:
    """Make a run with a scale below 1 from step 7 on, and checkpoints at 5 and 9."""
    training = {**CONFIG["training"], "learning_rate": rate}
    scaler = {**CONFIG["scaler"], "floor": 0.0}
    run = start_run(database, ada, config=CONFIG | {"training": training, "scaler": scaler})
    skips = [make_skip(step, "head.bias") | {"loss_nonfinite": True} for step in range(7, 41)]
    for i, skip in enumerate(skips):
        skip |= {"scale_before": 2.0**-i, "scale_after": 2.0 ** -(i + 1)}
    record(database, run, make_steps([1.0] * 6), events=[])
    steps = make_steps([math.nan] * 34, first=7, skipped=range(7, 41))
    steps["scale"] = [skip["scale_before"] for skip in skips]
    record(database, run, steps, events=skips)
    for step in (5, 9):
        files = [{"kind": "checkpoint", "size_bytes": 1, "sha256": "aa"}]
        event = {"step": step, "reason": "asked", "request": None, "files": files}
        with database.writing() as session:
            checkpoints.publish(session, 1, 1, checkpoint_of(event), [f"{step}.pt"])
