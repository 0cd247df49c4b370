"""What workers offer."""

import pytest
from sqlalchemy import update

from db import workers
from db.database import Database, now
from db.errors import Conflict, NotFound
from db.tables import Run, User, Worker
from tests.db.conftest import DIGITS, add_worker


def test_a_worker_that_comes_back_is_the_same_worker(database: Database, worker: Worker) -> None:
    """Registering a known name updates its row."""
    again = add_worker(database, "w1", [])
    assert again.id == worker.id
    with database.reading() as session:
        assert workers.recipes(session) == []


def test_a_name_that_is_alive_on_another_host_is_refused(
    database: Database, worker: Worker
) -> None:
    """Two machines of one name would take each other's runs for lost."""
    offer = {"devices": [], "recipes": [], "versions": {}}
    with pytest.raises(Conflict, match="'w1' is up on host"), database.writing() as session:
        workers.register(session, name="w1", host="other", pid=1, **offer)
    with database.writing() as session:
        workers.stop(session, worker.id)
        assert workers.register(session, name="w1", host="other", pid=1, **offer).id == worker.id


def test_silent_or_stopped_workers_are_not_alive(database: Database, worker: Worker) -> None:
    """A worker is alive while it is heard of and has not said goodbye."""

    def is_alive() -> bool:
        with database.reading() as session:
            return workers.everyone(session)[0][1]

    assert is_alive()
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=now() - 60))
    assert not is_alive()
    with database.writing() as session:
        workers.beat(session, worker.id)
    assert is_alive()
    with database.writing() as session:
        workers.stop(session, worker.id)
    assert not is_alive()


def test_living_workers_word_on_a_recipe_counts_first(database: Database, worker: Worker) -> None:
    """Of two schemas of one recipe the living worker's is the one offered."""
    add_worker(database, "w2", [{**DIGITS, "schema": {"old": True}}])
    with database.writing() as session:
        session.execute(update(Worker).where(Worker.name == "w2").values(seen_at=now() - 60))
    with database.reading() as session:
        assert workers.recipes(session) == [DIGITS]


def test_unknown_recipe_names_those_there_are(database: Database, worker: Worker) -> None:
    """Asking for a recipe that nobody offers lists what is offered; broken ones are not."""
    add_worker(database, "w2", [{"name": "mine", "error": "SyntaxError"}])
    with pytest.raises(NotFound, match=r"'mine'.*digits"), database.reading() as session:
        workers.recipe(session, "mine")


def test_a_recipe_of_a_file_goes_by_its_name_and_by_its_path(
    database: Database, worker: Worker, ada: User
) -> None:
    """Runs of an earlier version have the path; the worker is told which file to load."""
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
