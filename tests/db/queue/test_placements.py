"""Jobs submitted to a cluster, and how long they are needed."""

from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.queue import pending_reasons, placements, queue, workers
from db.tables import Placement, Run, Status, User
from tests.db.conftest import CPU, DIGITS, claim, submit


def is_wanted(database: Database) -> bool:
    with database.reading() as session:
        [(_placement, wanted)] = placements.list_open(session)
    return wanted


def list_unplaced(session: Session) -> list[Any]:
    limits = {"runs_per_user": 0, "devices_per_user": 0, "limit": 10}
    return list(placements.list_unplaced(session, ["digits"], **limits))


def begin(database: Database, run: Run) -> None:
    with database.writing() as session:
        [row] = list_unplaced(session)
        assert row.id == run.id
        assert placements.begin(session, row)


def take(database: Database, run: Run, *, only_run_id: int | None) -> None:
    """Let a worker of this kind claim the run."""
    offer = {"devices": [CPU], "recipes": [DIGITS], "versions": {}}
    with database.writing() as session:
        worker = workers.register(
            session, name="w", host="host", pid=1, only_run_id=only_run_id, **offer
        )
        claimed = claim(session, worker)
        assert claimed is not None
        assert claimed.id == run.id


def test_workers_are_needed_as_long_as_they_train_the_run(database: Database, ada: User) -> None:
    """Workers are needed while they train the run, whatever the cluster last reported,
    which may be old.
    """
    with database.writing() as session:
        run = submit(session, ada)
    begin(database, run)
    assert is_wanted(database)
    take(database, run, only_run_id=run.id)
    assert is_wanted(database)
    with database.writing() as session:
        queue.start(session, run.id, 1)
        queue.end(session, run.id, 1, Status.FINISHED)
    assert not is_wanted(database)


def test_workers_are_not_wanted_when_another_has_taken_the_run(
    database: Database, ada: User
) -> None:
    """Placed workers are not needed once another worker has claimed the run."""
    with database.writing() as session:
        run = submit(session, ada)
    begin(database, run)
    take(database, run, only_run_id=None)
    assert not is_wanted(database)


def test_a_placement_is_of_one_run(database: Database, ada: User) -> None:
    """It neither delays a later run nor is the reason for which that one waits."""
    with database.writing() as session:
        first = submit(session, ada)
    begin(database, first)
    with database.writing() as session:
        later = submit(session, ada)
        offer = {"devices": [CPU], "recipes": [DIGITS], "versions": {}}
        workers.register(session, name="w", host="host", pid=1, **offer)
    with database.writing() as session:
        assert [row.id for row in list_unplaced(session)] == [later.id]
        read = pending_reasons.Queue.read(session)
        reasons = [pending_reasons.reason(run, read).text for run in (first, later)]
    assert reasons == [
        "workers are being requested from the cluster",
        "1 run is ahead: 1 (digits-fp16)",
    ]


def test_a_placement_that_failed_again_is_tried_later(database: Database, ada: User) -> None:
    """After the third failure the delay is nine times as long as after the first."""
    with database.writing() as session:
        run = submit(session, ada)
    begin(database, run)
    for attempts, seconds in ((1, 10.0), (3, 90.0)):
        for left, is_listed in ((1.0, False), (-1.0, True)):
            values = {"attempts": attempts, "ended_at": now() - seconds + left}
            with database.writing() as session:
                session.execute(update(Placement).values(values))
                assert bool(list_unplaced(session)) == is_listed
