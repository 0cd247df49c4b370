"""Periodic task that erases runs and reports: those due in the trash, and on request."""

import logging
import time
from threading import Event

import obstore
from obstore.store import ObjectStore

from app.files.downloads import RETRY_SECONDS
from db.database import Database, is_outage
from db.files import erasure, report_images
from db.files.object_store import open_store, why
from db.runs import reports
from db.settings import Settings

logger = logging.getLogger(__name__)

#: Delay before another attempt if a run's files cannot be deleted.
AGAIN_SECONDS = 600.0


class Purge:
    """Erasure of due runs; an interrupted one is continued at the next start."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database = settings, database
        self._stopping = stopping
        self._retry_at: dict[int, float] = {}  # of runs that could not be erased

    def erase_due(self) -> None:
        """Erase all due runs and reports once; an error of one does not affect the others."""
        with self._database.reading() as session:
            due = erasure.due(session, self._settings.trash_days)
            due_reports = reports.due(session, self._settings.trash_days)
        for report_id in due_reports:
            try:
                self._erase_report(report_id)
            except obstore.exceptions.BaseError as error:
                logger.warning("report %d cannot be erased: %s", report_id, why(error))
        for run_id in due:
            if time.monotonic() < self._retry_at.get(run_id, 0.0):
                continue
            try:
                self._erase(run_id)
            except erasure.Stopped:
                return
            except Exception as error:
                if is_outage(error):
                    raise
                self._retry_at[run_id] = time.monotonic() + AGAIN_SECONDS
                logger.warning("run %d cannot be erased: %s", run_id, error)

    def _erase_report(self, report_id: int) -> None:
        with self._database.writing() as session:
            if not reports.begin_erasure(session, report_id):
                return
        report_images.delete_of_report(self._store(), report_id)
        with self._database.writing() as session:
            reports.erase_rows(session, report_id)

    def _store(self) -> ObjectStore:
        return open_store(self._settings, retry_seconds=RETRY_SECONDS)

    def _erase(self, run_id: int) -> None:
        erasure.erase(self._database, self._settings, self._store(), run_id, self._stopping)
