"""Jobs submitted to a cluster, and how long they are needed."""

from db.database import Database
from db.queue import placements, queue, workers
from db.tables import Run, Status, User
from tests.db.conftest import CPU, DIGITS, claim, submit


def is_wanted(database: Database) -> bool:
    with database.reading() as session:
        [(_placement, wanted)] = placements.list_open(session)
    return wanted


def begin(database: Database, run: Run) -> None:
    with database.writing() as session:
        [row] = placements.list_unplaced(
            session, ["digits"], runs_per_user=0, devices_per_user=0, limit=10
        )
        assert row.id == run.id
        assert placements.begin(session, row)


def take(database: Database, run: Run, *, only_run_id: int | None) -> None:
    """Have a worker of that kind claim the run."""
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
    """A run that another worker has taken meanwhile needs none of the placed ones."""
    with database.writing() as session:
        run = submit(session, ada)
    begin(database, run)
    take(database, run, only_run_id=None)
    assert not is_wanted(database)
