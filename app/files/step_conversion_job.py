"""Periodic task that converts the steps that earlier versions recorded."""

import logging
import time
from threading import Event

from db.database import Database, is_outage
from db.errors import HalfstepError
from db.telemetry import step_conversion

logger = logging.getLogger(__name__)

#: Delay before another call for a run that cannot be converted.
AGAIN_SECONDS = 3600.0


class StepConversionJob:
    """Conversion of all runs; an interrupted one is continued at the next start.

    Safe to run on two servers at the same time.
    """

    def __init__(self, database: Database, stopping: Event) -> None:
        self._database, self._stopping = database, stopping
        self._retry_at: dict[int, float] = {}

    def convert_due(self) -> None:
        """Convert the runs that are left, the newest first."""
        with self._database.reading() as session:
            due = step_conversion.due(session)
        due = [run_id for run_id in due if self._retry_at.get(run_id, 0.0) < time.monotonic()]
        if len(due) > 1:
            logger.info("the steps of %d runs are being converted after an upgrade", len(due))
        for run_id in due:
            try:
                step_conversion.convert(self._database, run_id, stopping=self._stopping)
            except step_conversion.Stopped:
                return
            except Exception as error:
                if is_outage(error) or not isinstance(error, HalfstepError | OSError):
                    raise
                logger.warning("the steps of run %d cannot be converted: %s", run_id, error)
                self._retry_at[run_id] = time.monotonic() + AGAIN_SECONDS
