"""What the server does beside serving: runs whose days in the bin are over are erased."""

import logging
import time
from threading import Event, Thread
from typing import Self

from app.downloads import RETRY_SECONDS
from db import erasure
from db.database import Database, is_outage
from db.settings import Settings
from db.storage import open_store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
#: A run whose files cannot be deleted is tried again after so long.
AGAIN_SECONDS = 600.0
#: A server that stops waits no longer for a bucket that does not answer.
GRACE_SECONDS = 3.0


class Eraser:
    """A thread that looks for what is due; a context manager, which ends it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="eraser", daemon=True)
        self._put_off: dict[int, float] = {}  # until when, of runs that could not be erased

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(GRACE_SECONDS)

    def look(self) -> None:
        """Look once, and erase what is due. What one run does keeps none of the others."""
        with self._database.reading() as session:
            due = erasure.due(session, self._settings.bin_days)
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

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:
                if not is_outage(error):  # of an outage, each request tells
                    logger.exception("erasing failed")
            if self._stopping.wait(LOOK_SECONDS):
                return
