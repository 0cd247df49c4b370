"""States of the runs that live streams follow, read in one query however many runs there are."""

import asyncio
import math
import time
from collections.abc import Callable

from db.database import Database
from db.errors import NotFound
from db.runs import runs
from db.runs.runs import State

#: Age at which states are read again: half of the polling interval of a stream.
FRESH_SECONDS = 0.025
#: A run that no stream has requested for this time is no longer read.
FOLLOWED_SECONDS = 10.0


class RunStates:
    """States of runs, at most FRESH_SECONDS old when they are requested."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._requested: dict[int, float] = {}  # by run, the time of the last request
        self._states: dict[int, State | None] = {}  # of the last read; None: there is no such run
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None

    async def state(self, run_id: int) -> State:
        """Return the state of a run. Raises NotFound."""
        moment = self._requested[run_id] = self._clock()
        while run_id not in self._states or moment - self._read_at >= FRESH_SECONDS:
            self._requested[run_id] = self._clock()  # the read before may have taken long
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            # Shielded: other streams wait for it, too.
            await asyncio.shield(self._reading)
        if (state := self._states[run_id]) is None:
            raise NotFound(f"There is no run {run_id}.")
        return state

    async def _read(self) -> None:
        oldest = self._clock() - FOLLOWED_SECONDS
        self._requested = {each: at for each, at in self._requested.items() if at >= oldest}
        try:
            self._states = await asyncio.to_thread(self._query, list(self._requested))
            self._read_at = self._clock()
        finally:
            self._reading = None

    def _query(self, run_ids: list[int]) -> dict[int, State | None]:
        with self._database.read_only() as session:
            return dict.fromkeys(run_ids) | runs.states(session, run_ids)
