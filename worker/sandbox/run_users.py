"""Exclusive users for runs: one of a configured range for each attempt.

Such a user owns its run's scratch folder and cannot access other runs, and its processes are killed
with the attempt. This requires root, and the sandbox with namespaces.

User ids are the machine's, so their locks are too: workers of several data folders may have
overlapping ranges, and would otherwise kill each other's runs.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from db.settings import SCRATCH, Settings
from halfstep import untrusted_files
from halfstep.isolation import Isolation
from halfstep.sandbox import is_supported
from halfstep.telemetry.folder_lock import FolderLock

#: Usual folders of temporary files.
PLACES = ("/tmp", "/var/tmp")  # noqa: S108 - they are hidden, not used
TRIAL_SECONDS = 60.0
#: Lock files of the users of this machine, or of this container.
LOCKS = Path("/run/halfstep-run-users")


class NoneFree(Exception):
    """All users of HALFSTEP_RUN_USERS are in use."""


class RunUser:
    """One of the users, held by a lock that ends with this process."""

    def __init__(self, number: int, lock: FolderLock) -> None:
        self.number = number
        self._lock = lock

    @classmethod
    def acquire(cls, settings: Settings) -> "RunUser | None":
        """Acquire a free user, without processes of an earlier run.

        Returns None if there is no range. Raises NoneFree, OSError.
        """
        if not settings.run_user_range:
            return None
        LOCKS.mkdir(mode=0o700, exist_ok=True)
        for number in settings.run_user_range:
            lock = FolderLock(LOCKS / str(number))
            if not lock.acquire():
                continue
            user = cls(number, lock)
            user.clear()
            return user
        raise NoneFree(
            f"every user of HALFSTEP_RUN_USERS={settings.run_users} has a run on this machine; "
            "workers of several data folders need a user for each of their devices"
        )

    def clear(self) -> None:
        """Kill all processes of this user, repeatedly, because they may be starting more."""
        while processes := [process for process in psutil.process_iter() if self._is_its(process)]:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1.0)

    def release(self) -> None:
        """Release the user."""
        self._lock.release()

    def take_over(self, scratch: Path, earlier: range) -> None:
        """Give it a run's scratch folder. earlier: users that may own files there."""
        untrusted_files.give(scratch, self.number, earlier)

    def let_read(self, folder: Path) -> None:
        """Let it read a folder, and the files that are created there later."""
        os.umask(0o027)
        os.chown(folder, -1, self.number)
        folder.chmod(0o2750)

    def _is_its(self, process: psutil.Process) -> bool:
        try:
            is_its = self.number in process.uids()
            return is_its and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@contextmanager
def trial_user(settings: Settings) -> Iterator[int | None]:
    """Hold a user for a self-test, which the end of a run of that user would kill.

    None if there is no range; a user with a run if none is free. Raises OSError.
    """
    user = None
    with suppress(NoneFree):  # runs of an earlier worker have them all
        user = RunUser.acquire(settings)
    try:
        yield user.number if user else next(iter(settings.run_user_range), None)
    finally:
        if user:
            user.release()


def hidden(needed: Iterable[str]) -> tuple[str, ...]:
    """Return the folders to replace by private ones, except those with needed paths."""
    paths = [Path(path).resolve() for path in needed]
    return tuple(
        folder for folder in PLACES if not any(path.is_relative_to(folder) for path in paths)
    )


def obstacle(settings: Settings, devices: int) -> str:
    """Prepare folders for runs with users of their own; return why that is unavailable, or ""."""
    users = settings.run_user_range
    if os.geteuid() != 0:
        return "the worker is not root"
    if not (settings.sandbox and is_supported() and settings.sandbox_namespaces):
        return "it requires HALFSTEP_SANDBOX=yes, and Linux with Landlock and namespaces"
    if len(users) < devices:
        return f"{len(users)} users are fewer than {devices} devices"
    folders = (settings.data, settings.data / "runs", settings.data / SCRATCH)
    for folder in folders:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)  # to traverse, on the way to its own folder
    try:
        with trial_user(settings) as user:
            return _trial(user, folders[-1])
    except OSError as error:
        return f"the users cannot be locked: {error}"


def _trial(user: int | None, scratch: Path) -> str:
    """Run a program as a user; return why that fails, or ""."""
    argv = [sys.executable, "-I", "-m", "halfstep.isolation", sys.executable, "-c"]
    program = (
        "import os, sys, trainer.process, worker.commands.command_runner; os.stat(sys.argv[1])"
    )
    try:
        ended = subprocess.run(
            [*argv, program, str(scratch / ".")],
            env={"PATH": os.defpath, **Isolation(user=user).variable()},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a program of user {user} did not start within {TRIAL_SECONDS:.0f} s"
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return f"user {user} cannot run programs: {lines[-1]}" if ended.returncode else ""
