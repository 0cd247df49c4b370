"""The run of a server's queue that a script was started for: its worker names its folder.

A script that watches itself then writes there, as a recipe's training does, and the worker's
recorder reads it: neither name, server nor token are needed, and another run is not made.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np

from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import OwnerFile
from halfstep.telemetry.spool import Position, SpoolReader, spool_of

#: What the worker tells a command; HALFSTEP_RUN, the run's number, is for people.
FOLDER, ATTEMPT, RUN = "HALFSTEP_RUN_FOLDER", "HALFSTEP_ATTEMPT", "HALFSTEP_RUN"
#: Names, with commas, of the variables that are secrets.
SECRETS = "HALFSTEP_SECRETS"


@dataclass(frozen=True)
class QueuedRun:
    """What one process of the attempt watches, and where that goes on: several may, in turn.

    sequence: of its first spool file.  step: the last one that others of this attempt have made.
    started_at: when the run was first started, by halfstep.clock.
    """

    files: AttemptFiles
    sequence: int
    step: int
    started_at: float
    lock: IO[str]
    owner: OwnerFile | None  # in place of a lock, where the file system has none

    @classmethod
    def taken(cls) -> Self | None:
        """Return the run, or None in a script that nobody queued.

        Raises RuntimeError if another process of the attempt is being watched, OSError.
        """
        if not os.environ.get(FOLDER):
            return None
        files = AttemptFiles(Path(os.environ[FOLDER]), int(os.environ[ATTEMPT]))
        started_at = float(json.loads(files.job.read_text())["started_at"])
        lock = (files.folder / f"watch-{files.attempt}.lock").open("a+")
        try:
            owner = _locked(lock)
        except BaseException:
            lock.close()
            raise
        sequences = [sequence for sequence, _ in spool_of(files.spool, files.attempt)]
        lock.seek(0)
        step = max(int(lock.read() or 0), _last_step(files, sequences))
        return cls(files, max(sequences, default=-1) + 1, step, started_at, lock, owner)

    def leave(self, step: int) -> None:
        """Let the next process go on after this step."""
        self.lock.truncate(0)
        self.lock.write(str(step))
        self.lock.close()
        if self.owner:
            self.owner.release()


def _locked(file: IO[str]) -> OwnerFile | None:
    """Lock a file, or take the file that stands for its lock where the file system has none.

    Raises RuntimeError if another process holds it.
    """
    try:
        # Of this process only: a lock that loaders' workers inherit would outlive it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: it is held
        is_free, owner = False, None
    except OSError:  # ENOLCK, ENOTSUP: depends on the file system
        owner = OwnerFile(Path(f"{file.name}.owner"))
        is_free = owner.acquire()
    else:
        return None
    if not is_free:
        raise RuntimeError(
            "another process of this run is being watched, and one writes its history"
        )
    return owner


def secrets() -> list[str]:
    """Return the values of the secrets that this script was given."""
    names = filter(None, os.environ.get(SECRETS, "").split(","))
    return [os.environ[name] for name in names if name in os.environ]


def _last_step(files: AttemptFiles, sequences: list[int]) -> int:
    """Return the last step in what there is of the attempt's spool; its reader deletes as it goes.

    One that was killed could not say where it was.
    """
    if not sequences:
        return 0
    reader = SpoolReader(files.spool, Position(files.attempt, sequences[0], 0))
    step = 0
    while items := reader.poll():
        step = max([step, *(int(i["step"].max()) for i in items if isinstance(i, np.ndarray))])
    return step
