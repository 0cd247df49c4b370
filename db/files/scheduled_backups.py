"""Backups at an interval into one folder, of which the newest are kept."""

import logging
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from db.clock import now
from db.database import Database
from db.files.backup import back_up
from db.files.object_store import open_store
from db.files.storage import IS_RUNNING
from db.settings import Settings
from db.tables import Backup

logger = logging.getLogger(__name__)

#: Folder names of scheduled backups; others in the folder are never deleted.
NAME, PATTERN = "halfstep-%Y%m%dT%H%M%SZ", re.compile(r"halfstep-\d{8}T\d{6}Z")
#: Delay before another try after a failed one.
RETRY_SECONDS = 3600.0


def back_up_if_due(settings: Settings, database: Database) -> Path | None:
    """Make the backup of this interval unless a server has made it; return its folder.

    A failed one is logged, recorded and tried again after RETRY_SECONDS.
    """
    parent, interval = settings.backup_folder, settings.backup_every_hours * 3600
    if parent is None or not interval or not (slot := _slot_due(database, interval)):
        return None
    for pattern in (".halfstep-*", ".verify-*"):  # of a killed server
        for rest in parent.glob(pattern):
            shutil.rmtree(rest, ignore_errors=True)
    folder = parent / datetime.now(UTC).strftime(NAME)
    earlier = list_scheduled(parent)
    try:
        saved = back_up(
            database,
            open_store(settings),
            folder,
            previous=earlier[-1] if earlier else None,
            slot=slot,
            verifies=True,
        )
    except IntegrityError:  # another server has begun it just now
        return None
    except Exception as error:
        logger.error("the scheduled backup failed: %s", error)
        return None
    logger.info("backup %s: %d rows, %d files", folder, saved["rows"], saved["files"])
    for key in saved["left_out"]:
        logger.warning("left out of the backup, because it is missing or damaged: %s", key)
    for block in saved["damaged"]:
        logger.warning("damaged, and so in this backup; an earlier one may have it: %s", block)
    for old in list_scheduled(parent)[: -settings.backup_keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def list_scheduled(parent: Path) -> list[Path]:
    """Return the complete scheduled backups in a folder, oldest first."""
    found = [path.parent for path in parent.glob("halfstep-*/backup.json")]
    return sorted(path for path in found if PATTERN.fullmatch(path.name))


def _slot_due(database: Database, interval: float) -> int | None:
    """Return the start of the current interval if it needs a backup."""
    slot = int(time.time() // interval * interval)
    is_dead = (Backup.ended_at.is_(None), ~IS_RUNNING)
    with database.reading() as session:
        has_dead = session.scalar(select(Backup.id).where(*is_dead).limit(1)) is not None
    if has_dead:
        with database.writing() as session:
            ended = update(Backup).where(*is_dead)
            session.execute(ended.values(ended_at=Backup.seen_at, slot=None, error="it was killed"))
    failed = select(Backup.id).where(Backup.error != "", Backup.ended_at > now() - RETRY_SECONDS)
    with database.reading() as session:
        newest = session.scalar(select(func.max(Backup.slot))) or 0
        if newest >= slot or session.scalar(failed.limit(1)):
            return None
        if session.scalar(select(Backup.id).where(IS_RUNNING).limit(1)):
            return None
    return slot
