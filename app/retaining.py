"""Delete what rules of retention let go: run by run, each in a transaction of its own."""

import logging
from threading import Event

from app.downloads import RETRY_SECONDS
from db import pruning, retention, runs
from db.database import Database, is_outage
from db.settings import Settings
from db.storage import open_store

logger = logging.getLogger(__name__)


def look(settings: Settings, database: Database, stopping: Event) -> None:
    """Look once; two servers that look at once delete nothing twice.

    What one run does keeps none of the others.
    """
    with database.reading() as session:
        due = retention.due(session)
    store = open_store(settings, retry_seconds=RETRY_SECONDS) if due else None
    for run_id, rules in due:
        if stopping.is_set() or store is None:
            return
        try:
            with database.reading() as session:  # most have nothing but what is kept
                is_due = bool(pruning.of_run(session, runs.get(session, run_id), rules))
            if is_due:
                pruning.prune(database, store, run_id, rules)
        except Exception as error:
            if is_outage(error):
                raise
            logger.warning("run %d cannot be pruned: %s", run_id, error)
