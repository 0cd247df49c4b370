"""States of the runs that live streams follow, read in one query however many runs there are."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from db.database import Database, is_outage
from db.runs import runs
from db.runs.runs import State

logger = logging.getLogger(__name__)

READ_SECONDS = 0.05


@dataclass(eq=False, frozen=True)
class Watch:
    """A stream that waits for a change of a run."""

    run_id: int
    has_changed: Callable[[State | None], bool]  # None: there is no such run
    wake: Callable[[], object]


class RunStates:
    """Reads the states of all watched runs periodically: an idle stream takes no time itself."""

    def __init__(self, database: Database, seconds: float = READ_SECONDS) -> None:
        self._database = database
        self._seconds = seconds
        self._watches: set[Watch] = set()
        self._reading: asyncio.Task[None] | None = None

    @contextmanager
    def watching(
        self,
        run_id: int,
        has_changed: Callable[[State | None], bool],
        wake: Callable[[], object],
    ) -> Iterator[None]:
        """Call `wake` within the context at each read of a changed state."""
        watch = Watch(run_id, has_changed, wake)
        self._watches.add(watch)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_periodically())
        try:
            yield
        finally:
            self._watches.remove(watch)

    async def _read_periodically(self) -> None:
        while self._watches:
            run_ids = {watch.run_id for watch in self._watches}
            try:
                states = await asyncio.to_thread(self._query, run_ids)
            except Exception as error:
                if is_outage(error):
                    logger.warning("live streams wait for the database: %s", error)
                else:
                    logger.exception("the states of runs %.200s cannot be read", run_ids)
                    for watch in self._watches:  # their polls report it, and end their streams
                        watch.wake()
            else:
                for watch in self._watches:  # of one that is new the state may not be known
                    if watch.run_id in run_ids and watch.has_changed(states.get(watch.run_id)):
                        watch.wake()
            await asyncio.sleep(self._seconds)

    def _query(self, run_ids: set[int]) -> dict[int, State]:
        with self._database.read_only() as session:
            return runs.states(session, run_ids)
