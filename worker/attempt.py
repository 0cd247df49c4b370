"""What the supervisor and the work that it supervises tell each other of an attempt."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from obstore.store import ObjectStore

from db.settings import Settings
from db.tables import Run, Status
from halfstep.attempt_files import AttemptFiles
from halfstep.walls import Wall, can_stand

LOST_LEASE = "its lease could not be renewed"


class CannotStart(Exception):
    """The attempt cannot begin, and another one could not either; the message says why."""

    def __init__(self, message: str, fault: str = "infrastructure") -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, as it was claimed.

    node: this machine's among those of the run.  recipe: what its training loads, by a path or a
    name.  recipe_file: where its source lies, if that is known.  started_at: the run's first start,
    by halfstep.clock.  remark: adds a line to the run's log.  keep_up: renews the lease while
    something takes long.  check_wanted: the same, and raises if the attempt is not to begin any
    more.
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

    def temporary(self) -> dict[str, str]:
        """Make the run's own folder of temporary files, and return the variable that names it."""
        folder = self.files.temporary
        folder.mkdir(mode=0o700, exist_ok=True)
        return {"TMPDIR": str(folder)}

    def wall(self, read: Sequence[str] = ()) -> dict[str, str]:
        """Return the variable that has the run's process wall itself off, if it can and shall.

        read: private files that it may read, besides those of its folder.
        """
        settings, files = self.settings, self.files
        if not (settings.walls and can_stand()):
            return {}
        cache = settings.data / "cache"
        cache.mkdir(exist_ok=True)
        wall = Wall(
            private=[str(each) for each in settings.private_paths],
            own=str(files.folder),
            free=[str(each) for each in (files.temporary, files.work) if each.is_dir()],
            shared=[str(cache)],
            read=[str(settings.data / "recipes.json"), *read],
        )
        return wall.variable()


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. status: None if it was killed, so that it may be started again."""

    status: Status | None
    reason: str | None = None
    error: str | None = None
    fault: str | None = None


def disk_full(folder: Path, error: str = "") -> Ending:
    """Return the end by a full disk. error: what was said of it, if anything."""
    reason = f"no space left on the disk that holds {folder}"
    return Ending(Status.FAILED, reason, error or reason, "infrastructure")


def death(exit_code: int, what: str) -> str:
    """Say how a process ended that did not say so itself."""
    if exit_code < 0:
        number = -exit_code
        is_named = number in set(signal.Signals)  # one of the real-time signals is not
        return f"{what} was killed by {signal.Signals(number).name if is_named else number}"
    return f"{what} ended with exit code {exit_code} and left no outcome"
