"""A real server with a run that was recorded, and its client."""

from collections.abc import Iterator

import numpy as np
import pytest

from db.database import Database
from db.tables import Run
from db.telemetry import telemetry
from halfstep import Client
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import STEP_DTYPE
from tests.db.telemetry.telemetry_made import step_event

STEPS = 300


@pytest.fixture
def recorded(database: Database, running: Run) -> Run:
    """A run of steps with a skip, an infinite loss, an awkwardly named metric, and events."""
    steps = np.zeros(STEPS, STEP_DTYPE)
    steps["step"] = range(1, STEPS + 1)
    steps["loss"] = 1 / steps["step"]
    steps["loss"][9] = np.inf
    steps["scale"], steps["lr"] = 1024, 0.5
    steps["flags"][9] = SKIPPED
    metric = {"event": "metric", "name": 'a "b",\u2028c', "elapsed_ms": 5}
    skip = {"event": "scaler", "kind": "skip", "step": 10, "optimizer": "Adam"}
    skip |= {"scale_before": 1024.0, "scale_after": 512.0, "culprits": [{"name": "w"}]}
    flush = telemetry.Flush(steps=[steps])
    made = [{**metric, "step": 0, "value": 1.5}, {**metric, "step": 40, "value": "NaN"}, skip]
    flush.events = [step_event(each) for each in made]
    with database.writing() as session:
        telemetry.record(session, running.id, running.attempt, flush)
    return running


@pytest.fixture
def client(
    address: str, token: str, recorded: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """A client of a server with these runs; the environment names it to commands as well."""
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)
    with Client() as client:
        yield client
