"""States of the runs that live streams follow, read in one query however many runs there are."""

import asyncio
import time
from collections.abc import Callable

from db.database import Database
from db.errors import NotFound
from db.runs import runs
from db.runs.runs import State

#: Age at which states are read again: half of the time between two questions of a stream.
FRESH_SECONDS = 0.025
#: A run that no stream has asked for in this time is no longer read.
FOLLOWED_SECONDS = 1.0


class RunStates:
    """States of runs, at most FRESH_SECONDS old."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._asked: dict[int, float] = {}  # by run, when its state was last asked for
        self._states: dict[int, State] = {}
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def state(self, run_id: int) -> State:
        """Return the state of a run. Raises NotFound."""
        async with self._reading:
            moment = self._clock()
            self._asked[run_id] = moment
            if run_id not in self._states or moment - self._read_at >= FRESH_SECONDS:
                oldest = moment - FOLLOWED_SECONDS
                self._asked = {each: at for each, at in self._asked.items() if at >= oldest}
                self._states = await asyncio.to_thread(self._read, list(self._asked))
                self._read_at = self._clock()
            if run_id not in self._states:
                raise NotFound(f"There is no run {run_id}.")
            return self._states[run_id]

    def _read(self, run_ids: list[int]) -> dict[int, State]:
        with self._database.read_only() as session:
            return runs.states(session, run_ids)
