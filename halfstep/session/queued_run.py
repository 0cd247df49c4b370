"""Queued run for which a worker started this script.

The worker sets the run's folder in the environment. A watched script writes into it, as a
recipe's training does, and the worker's recorder reads it, so the script needs no name, server or
token and creates no other run.
"""

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np

from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import Job, read_message
from halfstep.telemetry.folder_lock import OwnerFile
from halfstep.telemetry.run_folder import read_description
from halfstep.telemetry.spool import Position, SpoolReader, spool_of

#: Environment variables of a command, set by the worker; HALFSTEP_RUN, the run's id, is for users.
FOLDER, ATTEMPT, RUN = "HALFSTEP_RUN_FOLDER", "HALFSTEP_ATTEMPT", "HALFSTEP_RUN"
#: Folder with the job, which the script only reads.
CONTROL_FOLDER = "HALFSTEP_CONTROL_FOLDER"
#: Comma-separated names of the variables that are secrets.
SECRETS = "HALFSTEP_SECRETS"


def find_queued_files() -> AttemptFiles | None:
    """Return the files of the queued run of this script, or None in one that was not queued."""
    if not os.environ.get(FOLDER):
        return None
    control = os.environ.get(CONTROL_FOLDER)
    attempt = int(os.environ[ATTEMPT])
    return AttemptFiles(Path(os.environ[FOLDER]), attempt, Path(control) if control else None)


def project_of(files: AttemptFiles) -> str:
    """Return a run's project: of a queue it is in its job, else in run.json."""
    with suppress(OSError, ValueError):  # a child process may outlive the folder
        if files.job.exists():
            return read_message(files.job, Job).project
        return read_description(files.folder).project or ""
    return ""


def data_of(files: AttemptFiles) -> Path:
    """Return the data folder of the server whose worker started the run."""
    return (files.control_folder or files.folder).parents[1]


@dataclass(frozen=True)
class QueuedRun:
    """Queued run as watched by one process of the attempt; several may do so in turn."""

    files: AttemptFiles
    sequence: int  # number of this process's first spool file
    step: int  # last step of the attempt's earlier processes
    started_at: float  # first start of the run, by halfstep.clock
    lock: IO[str]
    owner: OwnerFile | None  # replaces the lock on a file system without locks

    @classmethod
    def take(cls) -> Self | None:
        """Lock and return the run, or None in a script that was not queued.

        Raises RuntimeError if another process of the attempt is being watched, and OSError.
        """
        files = find_queued_files()
        if files is None:
            return None
        started_at = read_message(files.job, Job).started_at
        lock = (files.folder / f"watch-{files.attempt}.lock").open("a+")
        try:
            owner = _lock(lock)
        except BaseException:
            lock.close()
            raise
        sequences = [sequence for sequence, _ in spool_of(files.spool, files.attempt)]
        lock.seek(0)
        step = max(int(lock.read() or 0), _last_step(files, sequences))
        return cls(files, max(sequences, default=-1) + 1, step, started_at, lock, owner)

    def leave(self, step: int) -> None:
        """Release the run, for the next process to continue after this step."""
        self.lock.truncate(0)
        self.lock.write(str(step))
        self.lock.close()
        if self.owner:
            self.owner.release()


def _lock(file: IO[str]) -> OwnerFile | None:
    """Lock a file, or acquire an owner file if the file system has no locks.

    Raises RuntimeError if another process holds it.
    """
    try:
        # A per-process lock: one inherited by data loader workers would outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process holds it
        is_free, owner = False, None
    except OSError:  # ENOLCK, ENOTSUP: depends on the file system
        owner = OwnerFile(Path(f"{file.name}.owner"))
        is_free = owner.acquire()
    else:
        return None
    if not is_free:
        raise RuntimeError(
            "another process of this run is already watched, and only one can record its history"
        )
    return owner


def secrets() -> list[str]:
    """Return the values of the secrets in this script's environment."""
    names = filter(None, os.environ.get(SECRETS, "").split(","))
    return [os.environ[name] for name in names if name in os.environ]


def _last_step(files: AttemptFiles, sequences: list[int]) -> int:
    """Return the last step in the remaining files of the attempt's spool, or 0.

    Needed after a process that was killed and did not record its last step. The recorder deletes
    files that it has read.
    """
    if not sequences:
        return 0
    reader = SpoolReader(files.spool, Position(files.attempt, sequences[0], 0))
    step = 0
    while items := reader.poll():
        step = max([step, *(int(i["step"].max()) for i in items if isinstance(i, np.ndarray))])
    return step
