"""Types shared by the supervisor and the work that it supervises."""

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from obstore.store import ObjectStore

from db.settings import Settings
from db.tables import Run, Status
from halfstep.sandbox import can_stand
from halfstep.telemetry.attempt_files import AttemptFiles
from worker.attempts.log_file import LogFile
from worker.sandbox import sandbox
from worker.sandbox.cgroup_limits import RunGroup
from worker.sandbox.isolation import Isolation
from worker.sandbox.run_users import RunUser

LOST_LEASE = "its lease could not be renewed"


class CannotStart(Exception):
    """The attempt cannot begin, nor could another one.

    failure_kind: "settings" if something that the run requires is missing.
    """

    def __init__(self, message: str, failure_kind: str = "infrastructure") -> None:
        super().__init__(message)
        self.failure_kind = failure_kind


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, as it was claimed.

    node: this machine's among those of the run.  recipe: what its training loads, by a path or a
    name.  recipe_file: where its source lies, if that is known.  started_at: the run's first start,
    by halfstep.clock.  remark: adds a line to the run's log.  keep_up: renews the lease while
    something takes long.  check_wanted: the same, and raises if the attempt is not to begin any
    more.  user: that it has to itself, if it has one.  group: its cgroup, if it has one.  log: all
    that it prints.
    """

    settings: Settings
    store: ObjectStore
    files: AttemptFiles
    run: Run
    devices: list[int]
    node: int
    is_cuda: bool
    recipe: str
    recipe_file: Path | None
    started_at: float
    seconds_before: float
    remark: Callable[[str], None]
    keep_up: Callable[[], None]
    check_wanted: Callable[[], None]
    user: RunUser | None = None
    group: RunGroup | None = None
    log: LogFile | None = None

    def temporary(self) -> dict[str, str]:
        """Make the run's own folder of temporary files, and return the variables that name it: of a
        run with a user of its own it is at home there.
        """
        folder = self.files.temporary
        folder.mkdir(mode=0o700, exist_ok=True)
        variables = {"TMPDIR": str(folder)}
        if self.settings.sandbox:
            variables |= sandbox.caches(folder)
        if self.user is None:
            return variables
        name = f"run-{self.user.number}"
        return {**variables, "HOME": str(folder), "USER": name, "LOGNAME": name}

    def lent(self, path: str) -> str:
        """Return where the run can read a file that is another's: of its own user's, a copy."""
        if self.user is None or Path(path).is_relative_to(self.files.folder) or Path(path).is_dir():
            return path
        self.temporary()
        copy = self.files.temporary / f"lent-{len(list(self.files.temporary.iterdir()))}"
        copy = copy.with_suffix(Path(path).suffix)
        shutil.copyfile(path, copy)
        return str(copy)

    def isolated(self, argv: list[str], *reads: str) -> tuple[list[str], dict[str, str]]:
        """Return what starts a program enclosed as this run is to be, and the variables for it.

        reads: places that it needs to find, which a private /tmp would hide.
        """
        if self.user is None and self.group is None:
            return argv, {}
        isolation = Isolation(group=str(self.group.folder) if self.group else "")
        if self.user is not None:
            self.user.own(self.files.folder)
            isolation = replace(
                isolation,
                user=self.user.number,
                temporary=str(self.files.temporary),
                places=sandbox.hidden_places(self.settings, *reads),
                processes=self.settings.run_processes,
            )
        return [*sandbox.ISOLATED, *argv], isolation.variable()

    def wall(self, read: Sequence[str] = (), free: Sequence[Path] = ()) -> dict[str, str]:
        """Return the variable that has the run's process apply its sandbox, if it can and shall.

        read, free: as `sandbox.wall` has them.
        """
        if not (self.settings.sandbox and can_stand()):
            return {}
        return sandbox.wall(self.settings, self.files, read, free).variable()


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. status: None if it was killed, so that it may be started again."""

    status: Status | None
    reason: str | None = None
    error: str | None = None
    failure_kind: str | None = None


def disk_full(folder: Path, error: str = "") -> Ending:
    """Return the outcome for a full disk. error: the message, if any."""
    reason = f"no space left on the disk that holds {folder}"
    return Ending(Status.FAILED, reason, error or reason, "infrastructure")


def death(exit_code: int, what: str) -> str:
    """Describe the death of a process that left no outcome."""
    if exit_code < 0:
        number = -exit_code
        is_named = number in set(signal.Signals)  # one of the real-time signals is not
        return f"{what} was killed by {signal.Signals(number).name if is_named else number}"
    return f"{what} ended with exit code {exit_code} and left no outcome"
