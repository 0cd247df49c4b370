"""States of watched runs are read by one query, and no change is missed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from sqlalchemy.exc import OperationalError

from app.live import run_updates
from app.live.run_states import RunStates
from db.database import Database
from db.queue import queue
from db.runs import history, runs
from db.runs.runs import State
from db.tables import Run, Status, User
from tests.app.conftest import start_run, submit
from tests.app.looks_made import collect_queries
from tests.db.telemetry.telemetry_made import make_steps, record

pytestmark = [pytest.mark.slow, pytest.mark.sql_sample]


class Noted(RunStates):
    """States that are read without a pause, with the runs of each query recorded."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, seconds=0)
        self.queries: list[set[int]] = []

    async def read(self, run_ids: set[int]) -> None:
        """Wait until a query of these runs has started and been evaluated after this call."""
        before = len(self.queries)
        while run_ids not in self.queries[before:-1]:
            await asyncio.sleep(0)

    async def has_stopped(self) -> None:
        """Wait until no query is running."""
        while self._reading is not None and not self._reading.done():
            await asyncio.sleep(0)

    def _query(self, run_ids: set[int]) -> dict[int, State]:
        self.queries.append(run_ids)
        return super()._query(run_ids)


def _play(play: Callable[[], Awaitable[None]]) -> None:
    async def run_limited() -> None:
        async with asyncio.timeout(60):
            await play()

    asyncio.run(run_limited())


def _is_running(state: State | None) -> bool:
    return state is not None and state.status == Status.RUNNING


def test_runs_that_are_watched_at_once_share_a_query(
    database: Database, ada: User, offered: None
) -> None:
    """A single query reads the states of all watched runs."""
    run_ids = [start_run(database, ada).id for _ in range(3)]
    states = Noted(database)

    async def play() -> None:
        with collect_queries(database) as statements:
            with ExitStack() as watches:
                woken = [asyncio.Event() for _ in run_ids]
                for run_id, event in zip(run_ids, woken, strict=True):
                    watches.enter_context(states.watching(run_id, _is_running, event.set))
                for event in woken:
                    await event.wait()
            await states.has_stopped()
        assert len(statements) == len(states.queries)
        assert states.queries[0] == {*run_ids}
        with states.watching(run_ids[0], _is_running, lambda: None):
            with states.watching(run_ids[1], _is_running, lambda: None):
                await states.read({*run_ids[:2]})
            await states.read({run_ids[0]})

    _play(play)


def test_a_run_that_is_watched_during_a_query_is_part_of_the_next_one(
    database: Database, ada: User, offered: None
) -> None:
    """A run that is watched during a query is part of the next one, not reported as unknown."""
    runs_watched = [start_run(database, ada).id for _ in range(2)]
    has_begun, is_watched = threading.Event(), threading.Event()

    class Slow(Noted):
        """States whose queries each wait until the second run is watched."""

        def _query(self, run_ids: set[int]) -> dict[int, State]:
            has_begun.set()
            assert is_watched.wait(60)
            return super()._query(run_ids)

    states, seen = Slow(database), []

    def note(state: State | None) -> bool:
        seen.append(state)
        return True

    async def play() -> None:
        woken = asyncio.Event()
        with states.watching(runs_watched[0], _is_running, lambda: None):
            while not has_begun.is_set():
                await asyncio.sleep(0)
            with states.watching(runs_watched[1], note, woken.set):
                is_watched.set()
                await woken.wait()

    _play(play)
    assert states.queries[:2] == [{runs_watched[0]}, set(runs_watched)]
    assert all(map(_is_running, seen))


@pytest.mark.parametrize("error", [OperationalError("SELECT", {}, Exception("away")), KeyError()])
def test_a_failed_query_is_logged_and_repeated(
    database: Database, running: Run, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams survive a failed query, whether by an outage or another error; it is logged."""
    errors = [error]

    class Failing(Noted):
        """States whose first query fails."""

        def _query(self, run_ids: set[int]) -> dict[int, State]:
            if errors:
                raise errors.pop()
            return super()._query(run_ids)

    async def play() -> None:
        woken = asyncio.Event()
        with Failing(database).watching(running.id, _is_running, woken.set):
            await woken.wait()

    _play(play)
    assert "live streams wait" in caplog.text or "cannot be read" in caplog.text


def test_an_error_that_is_no_outage_wakes_the_streams(database: Database, running: Run) -> None:
    """An error other than an outage wakes the streams, whose own polls raise it and end them;
    otherwise it would be logged forever.
    """

    class Failing(Noted):
        def _query(self, run_ids: set[int]) -> dict[int, State]:
            raise KeyError

    async def play() -> None:
        woken = asyncio.Event()
        with Failing(database).watching(running.id, lambda _state: False, woken.set):
            await woken.wait()

    _play(play)


def test_a_change_is_seen_and_an_idle_run_is_not_polled(database: Database, running: Run) -> None:
    """A run's cursor has no changes until a step, or the end, is recorded."""
    states = Noted(database)
    watching = run_updates.watching_run(states, running.id)

    async def play() -> None:
        async def wakes(*cursors: str) -> bool:
            woken = asyncio.Event()
            with watching(cursors, woken.set):
                await states.read({running.id})
            return woken.is_set()

        before = _cursor(database, running)
        assert not await wakes(before)
        record(database, running, make_steps([1.0]))
        assert await wakes(before)
        now = _cursor(database, running)
        assert not await wakes(now)
        assert await wakes(now, before)
        with database.writing() as session:
            queue.end(session, running.id, running.attempt, Status.FINISHED)
        assert await wakes(now)
        assert await wakes(_cursor(database, running))  # an ended run is polled: its stream ends

    _play(play)


def test_a_queued_run_and_an_unknown_one_are_always_polled(
    database: Database, ada: User, running: Run
) -> None:
    """A queued run is always polled, since its reason may change; an unknown run's poll fails."""
    states, run = Noted(database), submit(database, ada)

    async def play() -> None:
        for run_id, cursor in ((run.id, _cursor(database, run)), (run.id + 1, "")):
            woken = asyncio.Event()
            with run_updates.watching_run(states, run_id)([cursor], woken.set):
                await woken.wait()

    _play(play)


def _cursor(database: Database, run: Run) -> str:
    with database.reading() as session:
        return str(history.cursor_now(session, runs.get(session, run.id)))
