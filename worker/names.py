"""Names of workers, and their lock files, which show whether a worker is healthy."""

import socket
import time
from pathlib import Path

from db.errors import Invalid
from db.settings import Settings
from halfstep.telemetry.folder_lock import FolderLock

#: Upper bound on one turn of a worker's loop, even while database and disk do not respond.
LONGEST_TURN_SECONDS = 60.0


def name_of(settings: Settings, only: int | None = None) -> str:
    """Return the name of this machine's worker. only: id of the only run that it trains."""
    alone = f"-run-{only}" if only is not None else ""
    return settings.worker_name or f"{socket.gethostname()}{alone}"


def lock_path(settings: Settings, only: int | None = None) -> Path:
    """Return the lock file of a worker's name, which it touches in each turn of its loop."""
    return settings.data / f"worker-{name_of(settings, only)}.lock"


def is_healthy(settings: Settings) -> bool:
    """Return whether the loop of this machine's worker of this name is running.

    Does not query the database: during an outage the worker is healthy and its trainings continue,
    and an orchestrator that replaces unhealthy processes would end them.
    """
    try:
        touched_at = lock_path(settings).stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - touched_at < LONGEST_TURN_SECONDS


def lock_name(settings: Settings, only: int | None) -> FolderLock:
    """Lock a worker's name, until this process ends. Raises Invalid if it is taken.

    Two workers with the same name would adopt each other's runs.
    """
    lock = FolderLock(lock_path(settings, only))
    if not lock.acquire():
        name = name_of(settings, only)
        message = f"a worker named {name!r} is already running here; choose another name"
        raise Invalid({"HALFSTEP_WORKER_NAME": message})
    return lock
