"""Recipes and devices that workers offer."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from db.clock import now
from db.database import Database, revisions
from db.errors import Conflict, NotFound
from db.queue import pending_reasons, queue, workers
from db.runs import runs
from db.tables import Run, Status, User, Worker
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit

IDLE = workers.PendingWork(
    is_stopped=False, nodes=0, is_queued=False, is_lost=False, revision=revisions()[-1]
)


def test_a_worker_that_comes_back_is_the_same_worker(database: Database, worker: Worker) -> None:
    """Registering a known worker name updates its row."""
    again = add_worker(database, "w1", [])
    assert again.id == worker.id
    with database.reading() as session:
        assert workers.recipes(session) == []


def test_a_worker_name_in_use_on_another_host_is_rejected(
    database: Database, worker: Worker
) -> None:
    """A worker name in use on another host is rejected, since both would take over runs."""
    offer = {"devices": [], "recipes": [], "versions": {}}
    with pytest.raises(Conflict, match="'w1' is up on host"), database.writing() as session:
        workers.register(session, name="w1", host="other", pid=1, **offer)
    with database.writing() as session:
        workers.stop(session, worker.id)
        assert workers.register(session, name="w1", host="other", pid=1, **offer).id == worker.id


def test_silent_or_stopped_workers_are_not_alive(database: Database, worker: Worker) -> None:
    """A worker is alive while its heartbeat is recent and it has not signed off."""

    def is_alive() -> bool:
        with database.reading() as session:
            return workers.all_workers(session)[0][1]

    assert is_alive()
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=now() - 60))
    assert not is_alive()
    with database.writing() as session:
        workers.heartbeat(session, worker.id)
    assert is_alive()
    with database.writing() as session:
        workers.stop(session, worker.id)
    assert not is_alive()


def test_living_workers_word_on_a_recipe_counts_first(database: Database, worker: Worker) -> None:
    """A live worker's schema of a recipe is offered rather than a dead worker's."""
    add_worker(database, "w2", [{**DIGITS, "schema": {"old": True}}])
    with database.writing() as session:
        session.execute(update(Worker).where(Worker.name == "w2").values(seen_at=now() - 60))
    with database.reading() as session:
        assert workers.recipes(session) == [DIGITS]


def test_an_unknown_recipe_is_an_error_with_the_offered_ones(
    database: Database, worker: Worker
) -> None:
    """The error for an unknown recipe lists the offered ones, without broken recipes."""
    add_worker(database, "w2", [{"name": "mine", "error": "SyntaxError"}])
    with pytest.raises(NotFound, match=r"'mine'.*digits"), database.reading() as session:
        workers.recipe(session, "mine")


def test_a_recipe_file_has_a_name_and_a_path(database: Database, worker: Worker, ada: User) -> None:
    """A run by a recipe's path gets its declared name, and the worker its file."""
    mine = {**DIGITS, "name": "mine", "reference": "/a/mine.py:Mine", "file": "/a/mine.py"}
    with database.writing() as session:
        workers.offer(session, worker.id, [DIGITS, mine])
    with database.reading() as session:
        assert workers.recipe(session, "mine") == workers.recipe(session, "/a/mine.py:Mine") == mine
        row = workers.get(session, worker.id)
        assert row.recipe_names == ["digits", "mine", "/a/mine.py:Mine"]
        for asked, loaded in (("mine", "/a/mine.py:Mine"), ("digits", "digits"), ("/b.py:B",) * 2):
            run = Run(recipe=asked, worker_id=worker.id)
            assert workers.reference(workers.get(session, run.worker_id), run.recipe) == loaded


def test_a_drained_worker_claims_nothing_as_pending_reasons_say(
    database: Database, ada: User, worker: Worker
) -> None:
    """A drained worker claims neither a run nor a node, and finishes its run; undrained it
    claims again.
    """
    other = add_worker(database, "w2", [DIGITS], [CPU])
    with database.writing() as session:
        mine = submit(session, ada)
        assert claim(session, worker) is not None
        workers.drain(session, worker.id)
        wide = submit(session, ada, nodes=2)
    with database.writing() as session:
        queue.renew(session, mine.id, 1, 60.0)
        assert claim(session, other) is None
        assert claim(session, worker) is None
        reason = pending_reasons.reason(
            runs.get(session, wide.id), pending_reasons.Queue.read(session)
        ).text
        assert reason == "it waits for workers that are drained: w1"
        queue.end(session, mine.id, 1, Status.FINISHED)
        assert claim(session, other) is None
        workers.undrain(session, worker.id)
        claimed = claim(session, other)
        assert (claimed and claimed.id) == wide.id
        with pytest.raises(NotFound, match="There is no worker 99"):
            workers.drain(session, 99)


def test_one_statement_says_that_a_worker_is_alive_and_what_there_is_to_do(
    database: Database, running: Run, worker: Worker, ada: User
) -> None:
    """One heartbeat statement returns a worker's nodes, queued runs, expired leases and stop
    request.
    """
    with database.single_write() as session:
        pending = workers.heartbeat(session, worker.id)
    assert pending == replace(IDLE, nodes=1)
    with database.writing() as session:
        queue.renew(session, running.id, 1, -1.0)
        submit(session, ada)
        workers.drain(session, worker.id, stop=True)
    with database.single_write() as session:
        pending = workers.heartbeat(session, worker.id)
    assert pending == replace(IDLE, is_stopped=True, nodes=1, is_queued=True, is_lost=True)


def test_an_outdated_workers_schema_validates_nothing(database: Database, worker: Worker) -> None:
    """An outdated worker's schema is not used for validation."""
    with database.writing() as session:
        session.execute(update(Worker).values(versions={"torch": "2.13.0"}))  # as 0.1.0 registered
    with database.reading() as session:
        [(registered, is_alive)] = workers.all_workers(session)
        assert (workers.is_outdated(registered), is_alive) == (True, True)
        assert workers.recipes(session) == []
        assert workers.find_recipe(session, "digits") is None
        with pytest.raises(NotFound, match=r"Worker w1 has an earlier version; .*pip install"):
            workers.recipe(session, "digits")
    add_worker(database, "w1", [DIGITS])
    with database.reading() as session:
        assert workers.recipes(session) == [DIGITS]
