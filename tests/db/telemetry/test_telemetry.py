"""Recording of telemetry: one fenced transaction per flush, which may be repeated."""

from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from db.database import Database
from db.errors import StaleAttempt
from db.queue import queue
from db.tables import Diagnosis, LogLine, Run, ScalerEvent, Status, SystemSample
from db.telemetry import telemetry
from db.telemetry.series import raw_steps
from db.telemetry.telemetry import LogRow
from halfstep.telemetry.events import Sample
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_replay,
    make_steps,
    read_logged_points,
    record,
)


def read(database: Database, run: Run, **limits: Any) -> dict[str, list[Any]]:
    with database.reading() as session:
        return raw_steps(session, run.id, **limits)


def test_steps_are_read_back_as_they_were_recorded(database: Database, running: Run) -> None:
    """Every recorded number is read back, with names for NaN and infinities."""
    record(database, running, make_steps([0.5, float("nan"), float("inf")], skipped=[2]))
    steps = read(database, running)
    assert steps["step"] == [1, 2, 3]
    assert steps["elapsed_ms"] == [5, 10, 15]
    assert steps["step_us"] == [5001, 5002, 5003]
    assert steps["loss"] == [0.5, "NaN", "Infinity"]
    assert steps["scale"] == [2.0**20, 2.0**20, 2.0**19]
    assert steps["grad_norm"] == [2.0, "Infinity", 4.0]
    assert steps["grad_norm_clipped"] == [2.0, "Infinity", 3.0]
    assert steps["lr"] == [0.1, 0.05, 0.1 / 3]


def test_an_exact_replay_outlives_an_inexact_one(database: Database, running: Run) -> None:
    """A later inexact replay of a step does not replace an exact one.

    Also if both arrive in one batch, or twice; an inexact result is replaced by any other.
    """
    by_hand = {"exact": False, "requested": True}
    events = [make_replay(1), make_replay(1, **by_hand), make_replay(2, **by_hand)]
    record(database, running, events=events)
    record(database, running, events=[make_replay(1, **by_hand), make_replay(2)])
    record(database, running, events=[make_replay(3, **by_hand, module=name) for name in "ab"])
    with database.reading() as session:
        found = session.scalars(select(Diagnosis.content).order_by(Diagnosis.step)).all()
    assert [each["exact"] for each in found] == [True, True, False]
    assert found[2]["module"] == "b"


def test_flags_follow_what_happened(database: Database, running: Run) -> None:
    """A skip's flag is stored as sent, and a nonfinite loss sets its flag by itself."""
    steps = make_steps([1.0, float("nan"), 1.0], skipped=[1])
    steps["flags"][2] |= 2
    record(database, running, steps)
    assert read(database, running)["flags"] == [1, 2, 0]


def test_replay_changes_nothing(database: Database, running: Run) -> None:
    """A repeated flush leaves the same rows and counts."""
    steps, events = make_steps([1.0] * 9, skipped=[2, 5]), make_events([2, 5])
    record(database, running, steps, events=[*events, make_metric(9, 0.5)])
    before = _everything(database, running)
    record(database, running, steps, events=[*events, make_metric(9, 0.5)])
    assert _everything(database, running) == before
    assert before["skipped"] == 2


def _everything(database: Database, run: Run) -> dict[str, Any]:
    with database.reading() as session:
        found = session.get_one(Run, run.id)
        return {
            "steps": raw_steps(session, run.id),
            "events": [
                (event.step, event.kind, event.optimizer, event.scale_after)
                for event in session.scalars(select(ScalerEvent).order_by(ScalerEvent.id))
            ],
            "metrics": [(point.step, point.value) for point in read_logged_points(session)],
            "step": found.step,
            "skipped": found.skipped,
        }


def test_steps_run_again_within_a_batch_replace_the_earlier(
    database: Database, running: Run
) -> None:
    """Steps that are repeated within a batch, by the next attempt, replace the earlier ones."""
    again = np.concatenate([make_steps([1.0] * 10), make_steps([2.0] * 4, first=5)])
    record(database, running, again)
    assert read(database, running)["loss"] == [1.0] * 4 + [2.0] * 4 + [1.0] * 2


@pytest.mark.parametrize("at_once", [True, False])
def test_the_last_value_of_a_metric_in_a_step_counts(
    database: Database, running: Run, at_once: bool
) -> None:
    """A metric's last value in a step counts, in one flush and across several."""
    result = [make_metric(3, value) for value in (0.5, 0.9, 0.1)]
    for events in [result] if at_once else [[each] for each in result]:
        record(database, running, events=events)
    with database.reading() as session:
        assert [point.value for point in read_logged_points(session)] == [0.1]


def test_run_shows_its_latest_figures(database: Database, running: Run) -> None:
    """A run's row has the last step's loss and scale, and the latest speed, or at its end the
    mean.
    """
    fast, steps = make_steps([3.0] * 300), make_steps([3.0] * 199 + [2.0], first=301)
    fast["step_us"], steps["step_us"] = 1000, 4000
    record(database, running, fast, steps)
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        assert (run.step, run.loss, run.scale) == (500, 2.0, 2.0**20)
        assert run.steps_per_second == 250
        assert run.revision > running.revision
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
        pace = session.get_one(Run, running.id).steps_per_second
        assert pace == pytest.approx(500 / (0.3 + 0.8))


@pytest.mark.parametrize("pieces", [(21,), (1, 20), (2, 19), (1, *[1] * 20)])
def test_a_slow_first_step_does_not_count_for_the_speed(
    database: Database, running: Run, pieces: tuple[int, ...]
) -> None:
    """A slow first step does not count for the speed, however steps arrive."""
    steps = make_steps([3.0] * 21)
    steps["step_us"] = 1000
    steps["step_us"][0] = 3_000_000
    for part in np.split(steps, np.cumsum(pieces)[:-1]):
        record(database, running, part)
    with database.reading() as session:
        assert session.get_one(Run, running.id).steps_per_second == pytest.approx(1000)


def test_steps_without_durations_have_no_speed(database: Database, running: Run) -> None:
    """Steps without durations have no speed, which begins with a script's second step."""
    steps = make_steps([3.0, 2.0])
    steps["step_us"] = [0, 4000]
    record(database, running, steps[:1])
    with database.reading() as session:
        assert session.get_one(Run, running.id).steps_per_second is None
    record(database, running, steps[1:])
    with database.reading() as session:
        assert session.get_one(Run, running.id).steps_per_second == 250


def test_a_short_pause_changes_the_speed_little(database: Database, running: Run) -> None:
    """The speed is that of about the last 200 steps, so a pause changes it little."""
    steps, slow = make_steps([3.0] * 300), make_steps([3.0] * 2, first=301)
    steps["step_us"], slow["step_us"] = 1000, 50_000
    record(database, running, steps)
    record(database, running, slow)
    with database.reading() as session:
        speed = session.get_one(Run, running.id).steps_per_second
        assert speed == pytest.approx(1e6 / (0.99 * 1000 + 0.01 * 50_000))


def test_log_lines_and_samples_are_recorded(database: Database, running: Run) -> None:
    """Log lines and system samples are recorded with the steps."""
    line = {"number": 1, "attempt": 1, "time": 1.0, "stream": "stdout", "text": "hello"}
    sample = {
        "device": -1,
        "elapsed_ms": 5,
        "utilization": 0.5,
        "memory_bytes": 7,
        "power_watts": None,
        "temperature_celsius": None,
    }
    with database.writing() as session:
        flush = telemetry.Flush(log_lines=[LogRow(**line)], samples=[Sample(**sample)])
        telemetry.record(session, running.id, running.attempt, flush)
    with database.reading() as session:
        assert session.scalars(select(LogLine.text)).all() == ["hello"]
        assert session.scalars(select(SystemSample.utilization)).all() == [0.5]


def test_given_up_attempt_writes_nothing(database: Database, running: Run) -> None:
    """An ended attempt cannot record telemetry."""
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    with pytest.raises(StaleAttempt):
        record(database, running, make_steps([1.0]))
    assert read(database, running)["step"] == []


def test_the_length_of_a_run_follows_from_epochs(database: Database, running: Run) -> None:
    """A run by epochs gets the number of steps from its training; a metric may be at step 0."""
    events = [{"event": "length", "step": 0, "steps": 1234}, make_metric(0, 0.25)]
    record(database, running, make_steps([1.0]), events=events)
    with database.reading() as session:
        assert session.get_one(Run, running.id).steps_total == 1234
        assert [point.step for point in read_logged_points(session)] == [0]
