"""Users that runs have to themselves: one of a range each, for as long as an attempt lasts.

Such a user owns its run's folder, can open nothing of another run's, and what it started ends with
the attempt. It takes root, and Landlock's wall: in a run's folder root writes too, and behind the
wall alone a run lays no link there that leads root elsewhere.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from db.settings import Settings
from halfstep.sandbox import can_stand
from halfstep.telemetry.folder_lock import FolderLock
from worker.sandbox.isolation import Isolation

#: Where programs look for a place for temporary files.
PLACES = ("/tmp", "/var/tmp")  # noqa: S108 - they are hidden, not used
TRIAL_SECONDS = 60.0


class NoneFree(Exception):
    """Every user of HALFSTEP_RUN_USERS has a run."""


class RunUser:
    """One of them, held by a lock that ends with this process."""

    def __init__(self, number: int, lock: FolderLock) -> None:
        self.number = number
        self._lock = lock

    @classmethod
    def taken(cls, settings: Settings) -> "RunUser | None":
        """Take one that nobody has, without what an earlier run may have left; None: they are not
        to be. Raises NoneFree.
        """
        if not settings.run_user_range:
            return None
        folder = settings.data / "run-users"
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in settings.run_user_range:
            lock = FolderLock(folder / str(number))
            if not lock.acquire():
                continue
            found = cls(number, lock)
            found.clear()
            return found
        raise NoneFree(f"every user of HALFSTEP_RUN_USERS={settings.run_users} has a run")

    def clear(self) -> None:
        """End all that runs as this user: until there is nothing, for it may be starting more."""
        while found := [each for each in psutil.process_iter() if self._is_its(each)]:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=1.0)

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()

    def own(self, folder: Path) -> None:
        """Give it a run's folder; what we write there later is for its group to read."""
        os.umask(0o027)
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(Path(place, name), self.number, self.number, follow_symlinks=False)
        os.chown(folder, self.number, self.number)
        folder.chmod(0o2700)

    def _is_its(self, process: psutil.Process) -> bool:
        try:
            is_its = self.number in process.uids()
            return is_its and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def hidden(needed: Iterable[str]) -> tuple[str, ...]:
    """Return the places that become a run's own, but those where something is that it needs."""
    paths = [Path(each).resolve() for each in needed]
    return tuple(each for each in PLACES if not any(path.is_relative_to(each) for path in paths))


def obstacle(settings: Settings, devices: int) -> str:
    """Say why runs here cannot have users of their own, if they cannot; open the way for them."""
    users = settings.run_user_range
    if os.geteuid() != 0:
        return "the worker is not root"
    if not (settings.sandbox and can_stand()):
        return "it takes walls, HALFSTEP_SANDBOX=yes, on a Linux that has them"
    if len(users) < devices:
        return f"{len(users)} users are fewer than {devices} devices"
    runs = settings.data / "runs"
    runs.mkdir(exist_ok=True)
    for each in (settings.data, runs):
        each.chmod(0o711)  # to pass through, to its own folder there
    trial = Isolation(user=users[0]).variable()
    argv = [sys.executable, "-I", "-m", "worker.sandbox.isolation", sys.executable, "-c"]
    program = (
        "import os, sys, trainer.process, worker.commands.command_runner; os.stat(sys.argv[1])"
    )
    try:
        ended = subprocess.run(
            [*argv, program, str(runs / ".")],
            env={"PATH": os.defpath, **trial},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a program of user {users[0]} did not start within {TRIAL_SECONDS:.0f} s"
    said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return f"user {users[0]} cannot run programs here: {said[-1]}" if ended.returncode else ""
