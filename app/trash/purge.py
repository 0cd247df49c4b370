"""Erase the runs whose days in the trash are over, and those that somebody wants erased now."""

import logging
import time
from threading import Event

from app.files.downloads import RETRY_SECONDS
from db.database import Database, is_outage
from db.files import erasure
from db.files.storage import open_store
from db.settings import Settings

logger = logging.getLogger(__name__)

#: A run whose files cannot be deleted is tried again after so long.
AGAIN_SECONDS = 600.0


class Purge:
    """What it was stopped in the middle of, the next one goes on with."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database = settings, database
        self._stopping = stopping
        self._put_off: dict[int, float] = {}  # until when, of runs that could not be erased

    def look(self) -> None:
        """Look once, and erase what is due. What one run does keeps none of the others."""
        with self._database.reading() as session:
            due = erasure.due(session, self._settings.trash_days)
        for run_id in due:
            if time.monotonic() < self._put_off.get(run_id, 0.0):
                continue
            try:
                self._erase(run_id)
            except erasure.Stopped:
                return
            except Exception as error:
                if is_outage(error):
                    raise
                self._put_off[run_id] = time.monotonic() + AGAIN_SECONDS
                logger.warning("run %d cannot be erased: %s", run_id, error)

    def _erase(self, run_id: int) -> None:
        store = open_store(self._settings, retry_seconds=RETRY_SECONDS)
        erasure.erase(self._database, self._settings, store, run_id, self._stopping)
