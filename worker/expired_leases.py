"""Expired leases: any worker's heartbeat detects such runs.

They are queued again when no node can still be training.
"""

import logging
import time

from db.database import Database
from db.queue import queue

logger = logging.getLogger(__name__)


class ExpiredLeases:
    """The runs with expired leases at the last check."""

    def __init__(self, database: Database, lease_seconds: float) -> None:
        self._database, self._lease_seconds = database, lease_seconds
        self._expired: set[int] = set()
        self._reached_since = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._expired)

    def check(self, *, is_lost: bool) -> None:
        """Mark runs that were expired before, and requeue those that no node can still train.

        is_lost: whether there are expired leases.
        """
        if not (is_lost or self._expired):
            return
        with self._database.writing() as session:
            expired = queue.mark_unreachable(session, self._expired)
            if time.monotonic() - self._reached_since > self._lease_seconds:
                for run_id in queue.requeue_unreachable(session, expired):
                    logger.warning(
                        "unreachable for a whole lease, queued again", extra={"run": run_id}
                    )
        self._expired = expired

    def note_outage(self) -> None:
        """Requeue nothing for a whole lease: a database outage is not the death of a worker."""
        self._reached_since = time.monotonic()
