"""Writers of one process get SQLite's lock in the order of their requests."""

import threading
import time
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.exc import PendingRollbackError

from db.database import Database
from db.turns import Turns

pytestmark = pytest.mark.only_on("sqlite")


def wait_for(turns: Turns, waiting: int) -> None:
    """Wait until this number of threads waits for a turn."""
    until = time.monotonic() + 60
    while turns.waiting != waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_writers_take_turns_in_order(database: Database) -> None:
    """Each writer writes once all earlier ones have committed."""
    order: list[int] = []

    def write(number: int) -> None:
        with database.writing() as session:
            session.execute(text("SELECT 1"))
            order.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    with database.writing() as session:
        session.execute(text("SELECT 1"))
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(database.turns, number + 1)
        assert not order
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_a_session_waits_at_its_first_statement_only(database: Database) -> None:
    """A session waits for its turn at its first statement, and without one it never waits."""
    with database.writing() as session:
        session.execute(text("SELECT 1"))
        with database.writing(), database.reading() as reader:
            reader.execute(text("SELECT 1"))
        assert database.turns.waiting == 0


@pytest.mark.parametrize("how", ["raises", "rolls back", "loses its connection"])
def test_a_turn_ends_however_a_writer_ends(database: Database, how: str) -> None:
    """A transaction that fails or is abandoned passes its turn on."""
    with suppress(ZeroDivisionError, PendingRollbackError), database.writing() as session:
        session.execute(text("SELECT 1"))
        if how == "rolls back":
            session.rollback()
            session.close()
        elif how == "loses its connection":
            session.connection().invalidate()
        else:
            _ = 1 / 0
    assert database.turns.take(timeout=0)
    database.turns.give_back()


def test_a_session_that_timed_out_gets_no_turn() -> None:
    """A session that timed out while waiting gets no turn, which it would not return."""
    turns = Turns()
    assert turns.take(timeout=0)
    assert not turns.take(timeout=0)
    turns.give_back()
    assert turns.take(timeout=0)
