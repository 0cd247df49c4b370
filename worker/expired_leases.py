"""Runs whose machine is gone: whoever beats finds them, and queues them again when it is time."""

import time
from collections.abc import Callable

from db.database import Database
from db.queue import queue


class LostRuns:
    """Those whose leases had run out at the last look."""

    def __init__(
        self, database: Database, lease_seconds: float, say: Callable[[str], None]
    ) -> None:
        """say: told of each that is queued again."""
        self._database, self._lease_seconds, self._say = database, lease_seconds, say
        self._found: set[int] = set()
        self._reached_since = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._found)

    def look(self, *, is_lost: bool) -> None:
        """Mark those that were found before, and queue again what nobody may still train.

        is_lost: there are leases that have run out.
        """
        if not (is_lost or self._found):
            return
        with self._database.writing() as session:
            found = queue.mark_unreachable(session, self._found)
            if time.monotonic() - self._reached_since > self._lease_seconds:
                for run_id in queue.requeue_unreachable(session, found):
                    self._say(f"run {run_id}: unreachable for a whole lease, queued again")
        self._found = found

    def note_outage(self) -> None:
        """Queue none again for a whole lease: that the database was away is no death."""
        self._reached_since = time.monotonic()
