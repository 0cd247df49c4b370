"""Input-bound runs, which wait for their data."""

import numpy as np
import pytest

from db.database import Database
from db.health import findings
from db.health.input_bound import DataWait, data_wait
from db.tables import Run
from halfstep.telemetry.spool import UNKNOWN_US
from tests.db.telemetry.telemetry_made import make_steps, record


def look(database: Database, run: Run) -> tuple[DataWait | None, list[str]]:
    with database.reading() as session:
        row = session.get_one(Run, run.id)
        return data_wait(session, row), [each.text for each in findings.of_run(session, row)]


def test_the_last_hundred_steps_are_judged(database: Database, running: Run) -> None:
    """A run is input-bound if many of its last hundred steps waited a fifth of their time."""
    steps = make_steps([1.0] * 150)
    steps["step_us"] = 1000
    steps["data_us"] = np.where(steps["step"] > 87, 800, 0)
    record(database, running, steps)
    found, texts = look(database, running)
    assert found == DataWait(steps=100, waited=63, share=pytest.approx(0.504))
    assert found.is_real
    assert found.per_cent == 63
    assert any(
        text.startswith(
            "63 % of the last 100 steps waited for data, for 50.4 % of their total time"
        )
        for text in texts
    )


def test_a_loop_without_data_wait_is_not_reported(database: Database, running: Run) -> None:
    """A few waiting steps, or short waits in all steps, are not reported as input-bound."""
    steps = make_steps([1.0] * 100)
    steps["step_us"], steps["data_us"] = 1000, 20
    steps["data_us"][:5] = 1000
    record(database, running, steps)
    found, texts = look(database, running)
    assert found is not None
    assert (found.waited, found.is_real, texts) == (5, False, [])


def test_steps_without_data_times_are_left_out(database: Database, running: Run) -> None:
    """Steps without data times are left out, and a run without others is unknown."""
    assert look(database, running)[0] is None
    steps = make_steps([1.0] * 60)
    steps["data_us"] = UNKNOWN_US
    record(database, running, steps)
    assert look(database, running)[0] is None
    record(database, running, make_steps([1.0] * 8, first=61))
    found = look(database, running)[0]
    assert found is not None
    assert found.steps == 8
