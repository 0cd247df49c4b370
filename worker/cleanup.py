"""Cleanup of this machine's data folder, which the server may not reach."""

import logging
import threading

from db.database import Database
from db.files import erasure, uploads
from db.runs import runs
from db.settings import Settings
from halfstep import untrusted_files
from worker.attempts.recorder import may_pass

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
#: Runs per query.
RUNS = 500


def start(settings: Settings, database: Database, stopping: threading.Event) -> None:
    """Delete each minute what no run needs, in a thread: a run may have left 100,000 files."""
    arguments = (settings, database, stopping)
    threading.Thread(target=_run, args=arguments, name="cleanup", daemon=True).start()


def _run(settings: Settings, database: Database, stopping: threading.Event) -> None:
    while not stopping.is_set():
        for delete in (delete_erased, delete_checkouts, delete_uploads):
            try:
                delete(settings, database)
            except Exception as error:
                if not may_pass(error):  # the worker reports outages
                    logger.exception("the cleanup of the data folder failed")
        stopping.wait(PAUSE_SECONDS)


def delete_erased(settings: Settings, database: Database) -> list[int]:
    """Delete this machine's folders of erased runs; return their ids.

    A folder that cannot be deleted is reported, and does not affect the others.
    """
    here = _runs_here(settings)
    deleted = []
    with database.reading() as session:
        erased = [
            run_id
            for first in range(0, len(here), RUNS)
            for run_id in erasure.select_erased(session, here[first : first + RUNS])
        ]
    for run_id in erased:
        try:
            erasure.delete_folders(settings, run_id)
            deleted.append(run_id)
        except Exception as error:  # that of one run keeps no other
            words = "the folder of the deleted run cannot be removed: %s"
            logger.error(words, error, extra={"run": run_id})
    return deleted


def delete_checkouts(settings: Settings, database: Database) -> list[int]:
    """Delete checkouts of ended commands, except the latest; return their run ids."""
    here = [
        run_id
        for run_id in _runs_here(settings)
        if untrusted_files.exists(settings.scratch_folder(run_id), "work/.git")
    ]
    with database.reading() as session:
        ended = [
            end
            for first in range(0, len(here), RUNS)
            for end in runs.ends(session, here[first : first + RUNS])
        ]
    deleted = []
    for _ended_at, run_id in sorted(ended, reverse=True)[settings.max_cached_checkouts :]:
        try:
            untrusted_files.delete(settings.scratch_folder(run_id), "work")
            deleted.append(run_id)
        except Exception as error:  # that of one run keeps no other
            words = "the checkout of the ended run cannot be removed: %s"
            logger.error(words, error, extra={"run": run_id})
    return deleted


def _runs_here(settings: Settings) -> list[int]:
    """Return the runs that have a folder on this machine."""
    above = (settings.run_folder(0).parent, settings.scratch_folder(0).parents[1])
    names = {path.name for folder in above if folder.is_dir() for path in folder.iterdir()}
    return sorted(int(name) for name in names if name.isdecimal())


def delete_uploads(settings: Settings, database: Database) -> None:
    """Delete fetched uploads that no run starts from."""
    if not (settings.data / uploads.FOLDER).is_dir():
        return
    with database.reading() as session:
        in_use = uploads.named(session)
    uploads.delete_unused_here(settings, in_use)
