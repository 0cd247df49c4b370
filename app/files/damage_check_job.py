"""Periodic task that marks damaged runs: all once a day, and those that requests have met."""

import logging
import time
from threading import Event

import obstore

from app.files.downloads import RETRY_SECONDS
from db.database import Database
from db.files import run_damage
from db.files.object_store import open_store, why
from db.settings import Settings
from db.telemetry import damage

logger = logging.getLogger(__name__)

DAY_SECONDS = 86400.0
#: Delay before another check of a run that requests still meet damaged.
AGAIN_SECONDS = 60.0
#: Delay before all runs are checked again after a bucket did not answer.
OUTAGE_SECONDS = 3600.0
#: Time for runs of the daily check in a call, so that requests are not slowed down.
CALL_SECONDS = 1.0


class DamageCheckJob:
    """Check of all runs, the newest first; safe to run on two servers at the same time."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database, self._stopping = settings, database, stopping
        self._suspects: set[int] = set()
        self._checked_at: dict[int, float] = {}
        self._due: list[int] = []
        self._next_at = 0.0

    def check_due(self) -> None:
        """Check suspected runs, and some of the others."""
        self._suspects.update(damage.take_suspects())
        early = time.monotonic() - AGAIN_SECONDS
        for run_id in sorted(self._suspects):
            if self._checked_at.get(run_id, early) <= early:
                self._check(run_id, reads_files=True)
                self._suspects.discard(run_id)
                self._checked_at[run_id] = time.monotonic()
        if time.monotonic() >= self._next_at:
            with self._database.reading() as session:
                self._due = run_damage.list_checked(session)
            self._next_at = time.monotonic() + DAY_SECONDS
        end = time.monotonic() + CALL_SECONDS
        while self._due and time.monotonic() < end and not self._stopping.is_set():
            self._check(self._due.pop(), reads_files=False)

    def _check(self, run_id: int, *, reads_files: bool) -> None:
        store = open_store(self._settings, retry_seconds=RETRY_SECONDS)
        try:
            mark = run_damage.check(self._database, store, run_id, reads_files=reads_files)
        except obstore.exceptions.BaseError as error:  # of a bucket: the others are checked later
            logger.warning("files of run %d cannot be checked: %s", run_id, why(error))
            self._due, self._next_at = [], time.monotonic() + OUTAGE_SECONDS
            return
        if mark is not None:
            logger.warning("%s", mark or f"Run {run_id} is whole again.")
