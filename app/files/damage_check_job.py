"""Periodic task that marks damaged runs: all once a week, and those that requests have met."""

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

WEEK_SECONDS = 7 * 86400.0
#: Delay before another check of a run that requests still meet damaged.
AGAIN_SECONDS = 60.0
#: Delay before another check where no run is due, or a bucket did not answer.
IDLE_SECONDS = 600.0
#: Time for runs of the weekly check in a call, so that requests are not slowed down.
CALL_SECONDS = 0.25
#: Pause after the weekly check of some runs, by the time that it took.
PAUSE = 20.0
RUNS_OF_A_CALL = 100


class DamageCheckJob:
    """Check of all runs, the longest unchecked first; safe to run on two servers at once."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database, self._stopping = settings, database, stopping
        self._suspects: set[int] = set()
        self._checked_at: dict[int, float] = {}
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
            self._next_at = time.monotonic() + self._check_some()

    def _check_some(self) -> float:
        """Check runs that are due; return the pause that follows, in seconds."""
        with self._database.reading() as session:
            due = run_damage.list_due(session, WEEK_SECONDS, RUNS_OF_A_CALL)
        begun = time.monotonic()
        for run_id in due:
            if self._stopping.is_set() or time.monotonic() > begun + CALL_SECONDS:
                break
            if not self._check(run_id, reads_files=False):
                return IDLE_SECONDS
        return (time.monotonic() - begun) * PAUSE if due else IDLE_SECONDS

    def _check(self, run_id: int, *, reads_files: bool) -> bool:
        """Check a run; return whether its store answered."""
        store = open_store(self._settings, retry_seconds=RETRY_SECONDS)
        try:
            mark = run_damage.check(self._database, store, run_id, reads_files=reads_files)
        except obstore.exceptions.BaseError as error:  # of a bucket: it is checked later
            logger.warning("files of run %d cannot be checked: %s", run_id, why(error))
            return False
        if mark is not None:
            logger.warning("%s", mark or f"Run {run_id} is whole again.")
        return True
