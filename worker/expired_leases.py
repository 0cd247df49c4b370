"""Expired leases: any worker's heartbeat finds such runs, and queues them again in time."""

import time
from collections.abc import Callable

from db.database import Database
from db.queue import queue


class LostRuns:
    """The runs whose leases had expired at the last check."""

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
        """Mark runs that were found before, and queue again those that no node can still train.

        is_lost: whether there are expired leases.
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
        """Queue nothing again for a whole lease: a database outage is no death of a worker."""
        self._reached_since = time.monotonic()
