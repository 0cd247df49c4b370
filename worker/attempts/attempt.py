"""Attempt and outcome types shared by the supervisor and the work it supervises."""

import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from obstore.store import ObjectStore

from db.database import Database
from db.queue import queue
from db.settings import Settings
from db.tables import Run, Status
from halfstep import untrusted_files
from halfstep.isolation import Isolation
from halfstep.sidecar.log_file import LogFile
from halfstep.telemetry.attempt_files import AttemptFiles
from worker.sandbox import sandbox
from worker.sandbox.cgroup_limits import RunGroup
from worker.sandbox.run_users import RunUser

LOST_LEASE = "its lease could not be renewed"


class CannotStart(Exception):
    """Permanent start failure: a retry would fail too; the message gives the reason.

    failure_kind: "settings" if something that the run requests does not exist.
    """

    def __init__(self, message: str, failure_kind: str = "infrastructure") -> None:
        super().__init__(message)
        self.failure_kind = failure_kind


@dataclass(frozen=True)
class Attempt:
    """Claimed attempt of a run on one node."""

    settings: Settings
    store: ObjectStore
    files: AttemptFiles
    run: Run
    devices: list[int]
    node: int  # number of this machine's node within the run
    is_cuda: bool
    recipe: str  # path or name of the recipe that the training loads
    recipe_file: Path | None  # path of its source, if known
    started_at: float  # the run's first start, by halfstep.clock
    seconds_before: float
    append_log: Callable[[str], None]  # adds a line to the run's log
    renew_lease: Callable[[], None]  # renews the lease during a long operation
    # Renews it too, and raises if the attempt should no longer begin.
    check_not_stopped: Callable[[], None]
    user: RunUser | None = None  # its exclusive user, if any
    group: RunGroup | None = None  # its cgroup, if any
    log: LogFile | None = None  # everything that it prints
    warm: socket.socket | None = None  # client's socket of the process that forks its training

    def temporary(self) -> dict[str, str]:
        """Create the run's temporary folder and return the variables that name it.

        For a run with its own user, the folder is also its home.
        """
        folder = self.files.temporary
        untrusted_files.make_folder(self.files.folder, folder.name)
        variables = {"TMPDIR": str(folder)}
        if self.settings.sandbox:
            variables |= sandbox.caches(folder)
        if self.user is None:
            return variables
        name = f"run-{self.user.number}"
        return {**variables, "HOME": str(folder), "USER": name, "LOGNAME": name}

    def stage(self, path: str) -> str:
        """Return a path where the run can read a file: a copy if it has its own user.

        Files of the run, and folders, are not copied.
        """
        folder = self.settings.run_folder(self.run.id)
        if self.user is None or Path(path).is_relative_to(folder) or Path(path).is_dir():
            return path
        self.staging.mkdir(exist_ok=True)
        copy = self.staging / f"{len(list(self.staging.iterdir()))}{Path(path).suffix}"
        shutil.copyfile(path, copy)
        return str(copy)

    @property
    def staging(self) -> Path:
        """Folder of the copies that `stage` makes, deleted with the attempt."""
        return self.control_folder / "staged"

    @property
    def control_folder(self) -> Path:
        """Folder that only the supervisor writes."""
        return self.settings.run_folder(self.run.id, self.node)

    def isolation(self, read: Sequence[str] = (), needed: Sequence[str] = ()) -> Isolation:
        """Return the isolation of the run's process.

        read, needed: see `sandbox.isolation_of_run`.
        """
        isolation = sandbox.isolation_of_run(self.settings, self.files, read, needed)
        group = str(self.group.folder) if self.group else ""
        if self.user is None:
            return replace(isolation, group=group)
        self.user.take_over(self.files.folder, self.settings.run_user_range)
        processes = self.settings.run_processes
        return replace(isolation, group=group, user=self.user.number, processes=processes)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt."""

    status: Status | None  # None if it was killed and may be retried
    reason: str | None = None
    error: str | None = None
    failure_kind: str | None = None


def end_attempt(
    database: Database,
    settings: Settings,
    run_id: int,
    attempt: int,
    outcome: Outcome,
    log: str = "",
) -> None:
    """End an attempt by its outcome. log: see queue.end_killed. Raises StaleAttempt."""
    reason, error, failure_kind = outcome.reason, outcome.error, outcome.failure_kind
    with database.writing() as session:
        if outcome.status is None:
            queue.end_killed(
                session,
                run_id,
                attempt,
                reason=reason or "",
                max_attempts=settings.max_attempts,
                max_stalled_attempts=settings.max_stalled_attempts,
                log=log,
            )
        else:
            queue.end(
                *(session, run_id, attempt, outcome.status),
                reason=reason,
                error=error,
                failure_kind=failure_kind,
            )


def disk_full(folder: Path, error: str = "") -> Outcome:
    """Return the outcome for a full disk: a pause. error: the reported error, if any."""
    reason = f"no space left on the disk that holds {folder}: free space, then resume the run"
    return Outcome(Status.PAUSED, reason, error or reason, "infrastructure")


def death(exit_code: int, what: str) -> str:
    """Describe how a process ended that reported no outcome."""
    if exit_code < 0:
        number = -exit_code
        is_named = number in set(signal.Signals)  # real-time signals have no name
        return f"{what} was killed by {signal.Signals(number).name if is_named else number}"
    return f"{what} ended with exit code {exit_code} and left no outcome"
