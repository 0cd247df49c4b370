"""Changes of a run since a cursor."""

from typing import Any

import numpy as np

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, Worker
from db.telemetry import series, telemetry
from db.telemetry.series import Cursor
from halfstep.telemetry.spool import STEP_DTYPE
from tests.db.conftest import claim
from tests.marks import looped


def steps(first: int, last: int, loss: float = 0.5) -> np.ndarray[Any, Any]:
    rows = [(step, step, 900, loss, 1.0, 1.0, 1.0, 1e-3, 0, 90) for step in range(first, last + 1)]
    return np.array(rows, STEP_DTYPE)


def record(database: Database, run: Run, attempt: int, *batches: np.ndarray[Any, Any]) -> None:
    with database.writing() as session:
        telemetry.record(session, run.id, attempt, telemetry.Flush(steps=list(batches)))


def test_a_viewer_gets_each_step_once(database: Database, running: Run) -> None:
    """A viewer gets each step once by its cursor, and None if there are no updates."""
    seen: list[int] = []
    cursor = Cursor()
    for first in (1, 11, 21):
        record(database, running, 1, steps(first, first + 9))
        with database.reading() as session:
            changes = series.changes(session, running.id, cursor)
            assert changes is not None
            assert series.changes(session, running.id, changes.cursor) is None
        seen += changes.steps["step"]
        cursor = Cursor.parse(str(changes.cursor))
    assert seen == list(range(1, 31))


def test_a_backlog_comes_in_pages(database: Database, running: Run) -> None:
    """A viewer that is far behind gets all steps, a page at a time."""
    record(database, running, 1, steps(1, 25))
    seen: list[int] = []
    cursor = Cursor()
    with database.reading() as session:
        while changes := series.changes(session, running.id, cursor, most=10):
            seen += changes.steps["step"]
            cursor = changes.cursor
    assert seen == list(range(1, 26))


def test_a_viewer_sees_what_a_resumed_attempt_made_of_the_steps(
    database: Database, running: Run, worker: Worker
) -> None:
    """A viewer that has 20 steps of a run resumed at 10 gets the new ones instead."""
    record(database, running, 1, steps(1, 20))
    with database.reading() as session:
        changes = series.changes(session, running.id, Cursor())
        assert changes is not None
    cursor = changes.cursor
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.QUEUED)
        assert claim(session, worker) is not None
    with database.reading() as session:  # the claim is news too, and must not spoil the cursor
        changes = series.changes(session, running.id, cursor)
        assert changes is not None
        cursor = changes.cursor
    with database.writing() as session:
        queue.start(session, running.id, 2, resumed_step=10)
        telemetry.truncate(session, running.id, 2, after=10)
        telemetry.record(session, running.id, 2, telemetry.Flush(steps=[steps(11, 13, loss=0.25)]))
    with database.reading() as session:
        changes = series.changes(session, running.id, cursor)
        assert changes is not None
        recorded = series.raw_steps(session, running.id)
    assert (changes.steps["step"], changes.steps["loss"]) == ([11, 12, 13], [0.25] * 3)
    assert recorded["step"] == list(range(1, 14))
    assert changes.run.step == 13


def test_a_cursor_that_makes_no_sense_is_as_good_as_none() -> None:
    """An invalid cursor counts as none."""
    for text in (
        "1.2.three",
        "",
        "1.1.99999999999999999999.0.0.0",
        "-2",
        ".".join(["1"] * 12),
        "²",
    ):
        assert Cursor.parse(text) == Cursor()
    assert Cursor.parse(str(Cursor())) == Cursor()


@looped("field", ["attempt", "event", "diagnosis"])
def test_a_cursor_beyond_the_range_of_ids_counts_as_none(
    database: Database, running: Run, field: str
) -> None:
    """A cursor beyond the range of ids, which PostgreSQL would reject, counts as none."""
    record(database, running, 1, steps(1, 3))
    text = str(Cursor(**{field: 2**31}))
    assert Cursor.parse(text) == Cursor()
    largest = Cursor.parse(str(Cursor(**{field: 2**31 - 1})))
    assert largest == Cursor(**{field: 2**31 - 1})
    with database.reading() as session:
        found = series.changes(session, running.id, largest)
        assert found is not None
        assert found.steps["step"] == [1, 2, 3]
