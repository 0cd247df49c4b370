"""States of followed runs: one query for all of them, and no change is missed."""

import asyncio
import threading

import pytest
from sqlalchemy.exc import OperationalError

from app.live import run_updates
from app.live.run_states import FOLLOWED_SECONDS, FRESH_SECONDS, RunStates
from db.database import Database
from db.errors import NotFound
from db.queue import queue
from db.runs import history, runs
from db.runs.runs import State
from db.tables import Run, Status, User
from tests.app.conftest import start_run, submit
from tests.app.looks_made import noted
from tests.db.telemetry.telemetry_made import make_steps, record

pytestmark = [pytest.mark.slow, pytest.mark.sql]


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_runs_that_are_followed_at_once_share_a_query(
    database: Database, ada: User, offered: None
) -> None:
    """However many runs are followed, one query per interval reads those that still are."""
    run_ids = [start_run(database, ada).id for _ in range(3)]
    clock = Clock()

    async def play() -> list[int]:
        states, queries = RunStates(database, clock), []

        async def ask(asked: list[int]) -> None:
            with noted(database) as statements:
                found = await asyncio.gather(*map(states.state, asked))
            assert [each.status for each in found] == [Status.RUNNING] * len(asked)
            queries.append(len(statements))

        await ask(run_ids)
        await ask(run_ids)
        clock.now += 2 * FRESH_SECONDS
        await ask(run_ids)
        clock.now += FOLLOWED_SECONDS + FRESH_SECONDS
        await ask(run_ids[:1])
        await ask(run_ids[1:2])  # it was no longer followed, so that it has no state
        return queries

    assert asyncio.run(play()) == [1, 0, 1, 1, 1]


def test_a_slow_database_is_read_once_for_all(database: Database, ada: User, offered: None) -> None:
    """However long a query takes, a run that is requested meanwhile is part of the next one."""
    run_ids = [start_run(database, ada).id for _ in range(3)]
    clock = Clock()

    are_requested = threading.Event()

    class Slow(RunStates):
        """Each query takes an hour, and the first until all runs are requested."""

        def _query(self, run_ids: list[int]) -> dict[int, State | None]:
            assert are_requested.wait(60)
            clock.now += 3600
            return super()._query(run_ids)

    async def play() -> int:
        states = Slow(database, clock)
        with noted(database) as statements:
            first = asyncio.create_task(states.state(run_ids[0]))
            while states._reading is None:
                await asyncio.sleep(0)
            others = [asyncio.create_task(states.state(run_id)) for run_id in run_ids[1:]]
            await asyncio.sleep(0)  # they wait for the query that is under way
            are_requested.set()
            await asyncio.gather(first, *others)
        return len(statements)

    assert asyncio.run(play()) == 2


def test_a_failed_query_fails_for_all_that_wait_and_is_tried_again(
    database: Database, running: Run
) -> None:
    """During an outage followers do not wait for one another's timeouts."""
    failures = []

    class Failing(RunStates):
        """The first query fails."""

        def _query(self, run_ids: list[int]) -> dict[int, State | None]:
            if not failures:
                failures.append(run_ids)
                raise OperationalError("SELECT", {}, Exception("away"))
            return super()._query(run_ids)

    async def play() -> None:
        states = Failing(database)
        both = await asyncio.gather(
            states.state(running.id), states.state(running.id), return_exceptions=True
        )
        assert [type(each) for each in both] == [OperationalError] * 2
        assert (await states.state(running.id)).status == Status.RUNNING

    asyncio.run(play())


def test_a_change_is_seen_and_an_idle_run_is_not_polled(database: Database, running: Run) -> None:
    """A cursor of all recorded data has no changes until a step, or the end, is recorded."""

    def cursor() -> str:
        with database.reading() as session:
            return str(history.cursor_now(session, runs.get(session, running.id)))

    clock = Clock()

    async def play() -> None:
        has_changed = run_updates.change_of_run(RunStates(database, clock), running.id)

        async def later() -> bool:
            clock.now += 2 * FRESH_SECONDS
            return await has_changed(cursor_seen)

        cursor_seen = cursor()
        assert not await later()
        record(database, running, make_steps([1.0]))
        assert await later()
        cursor_seen = cursor()
        assert not await later()
        with database.writing() as session:
            queue.end(session, running.id, running.attempt, Status.FINISHED)
        assert await later()
        cursor_seen = cursor()
        assert await later()  # an ended run is always polled: its stream ends

    asyncio.run(play())


def test_a_queued_run_is_always_polled(database: Database, ada: User) -> None:
    """Its pending reason changes with other runs."""
    run = submit(database, ada)

    async def play() -> None:
        has_changed = run_updates.change_of_run(RunStates(database), run.id)
        with database.reading() as session:
            cursor = str(history.cursor_now(session, runs.get(session, run.id)))
        assert await has_changed(cursor)

    asyncio.run(play())


def test_an_unknown_run_is_an_error(database: Database, running: Run) -> None:
    """It affects no other run."""

    async def play() -> None:
        states = RunStates(database)
        with pytest.raises(NotFound):
            await states.state(running.id + 1)
        assert (await states.state(running.id)).status == Status.RUNNING

    asyncio.run(play())
