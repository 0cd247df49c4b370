"""Periodic task that moves the steps of ended runs into files."""

import logging
import time
from collections.abc import Collection
from threading import Event

import obstore
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.files.downloads import RETRY_SECONDS
from db.database import Database, is_outage
from db.errors import StorageUnreachable
from db.files.object_store import open_store
from db.settings import Settings
from db.tables import WATCH, Run
from db.telemetry import freeze

logger = logging.getLogger(__name__)

#: Runs of one call, and how long it begins further ones; the next call continues. At first
#: thousands of runs may be due.
MOST_RUNS, ROUND_SECONDS = 100, 60.0
#: Delay before another call for a run that is still due: that cannot be frozen, or has no steps, or
#: whose old file must wait.
AGAIN_SECONDS = 3600.0
#: Errors that further runs would meet too.
STORE_ERRORS = (StorageUnreachable, obstore.exceptions.BaseError, OSError)


class FreezeJob:
    """Freeze of due runs; an interrupted one is continued at the next start.

    Safe to run on two servers at the same time.
    """

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database = settings, database
        self._days = settings.freeze_days
        self._stopping = stopping
        self._retry_at: dict[int, float] = {}
        # The next round begins after it, so runs that cannot be frozen do not delay the others.
        self._last_run = 0

    def log_default(self) -> None:
        """Log the default that holds, and why, unless the operator has set the days."""
        if self._settings.freeze_after_days is not None:
            return
        what = "stay in the database, which is not"
        if self._days:
            what = "move into files, because the database is"
        logger.info(
            "HALFSTEP_FREEZE_AFTER_DAYS is not set and defaults to %g: steps of ended runs %s %s "
            "next to the files",
            *(self._days, what, self._settings.default_database),
        )

    def freeze_due(self) -> None:
        """Freeze the steps of due runs once; an error of the store ends the round."""
        if not self._days:
            return
        begun = time.monotonic()
        self._retry_at = {run: at for run, at in self._retry_at.items() if at > begun}
        most = MOST_RUNS + len(self._retry_at)
        with self._database.reading() as session:
            found = freeze.due(session, self._days, most=most, after=self._last_run)
            due = [run_id for run_id in found if run_id not in self._retry_at][:MOST_RUNS]
            self._last_run = due[-1] if due else 0
            others = self._of_other_stores(session, due)
        if others:
            self._retry_at |= dict.fromkeys(others, time.monotonic() + AGAIN_SECONDS)
            logger.warning(
                "the steps of run %d and of %d further runs stay in the database: %s has no folder "
                "of these runs, so their workers may not share it",
                *(min(others), len(others) - 1, self._settings.data / "runs"),
            )
            due = [run_id for run_id in due if run_id not in others]
        if not due:
            return
        store = open_store(self._settings, retry_seconds=RETRY_SECONDS)
        for run_id in due:
            try:
                folder = self._settings.data
                freeze.freeze(self._database, store, run_id, folder=folder, stopping=self._stopping)
            except freeze.Stopped:
                return
            except Exception as error:
                if is_outage(error):
                    raise
                logger.warning("the steps of run %d cannot be frozen: %s", run_id, error)
                if isinstance(error, STORE_ERRORS):
                    return
            finally:
                self._retry_at[run_id], self._last_run = time.monotonic() + AGAIN_SECONDS, run_id
            if time.monotonic() - begun > ROUND_SECONDS:
                return

    def _of_other_stores(self, session: Session, run_ids: Collection[int]) -> set[int]:
        """Return the runs whose workers would not find a file here if they continue the run.

        Without a bucket, a worker on another machine may have a data folder of its own.
        """
        if self._settings.storage_url:
            return set()
        of_workers = select(Run.id).where(Run.id.in_(run_ids), Run.source != WATCH)
        found = session.scalars(of_workers)
        return {run_id for run_id in found if not self._settings.run_folder(run_id).is_dir()}
