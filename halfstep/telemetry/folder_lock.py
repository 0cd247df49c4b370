"""A lock file that one process at a time holds, also where the file system has no locks.

The lock is the kernel's (flock), gone with the process. Where the file system refuses it, as NFS
without a lock daemon does, it is a file made exclusively, `<name>.owner`, that names its owner and
is touched as a heartbeat. The owner of such a file is stale once its process is dead, or, if this
machine cannot know that, once its heartbeat is too old by the clock of the file system.
"""

import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from halfstep import process

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # without a heartbeat
POLL_SECONDS = 0.05  # of `held` for an owner's file, which cannot wake who waits


class FolderLock:
    """Held until `release` or the end of the process. A child by fork has to release its copy."""

    def __init__(self, path: Path) -> None:
        """path: of the lock file, which stays."""
        self._path = path
        self._file: IO[str] | None = None
        self._owner: OwnerFile | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting; False if another holds it. Raises OSError."""
        return self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def wait(self) -> None:
        """Take the lock once no other holds it. Raises OSError."""
        while not self._acquire(fcntl.LOCK_EX):
            time.sleep(POLL_SECONDS)

    def is_held(self) -> bool:
        """Return whether a process holds the lock, without taking it."""
        try:
            with self._path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        except OSError:
            return self._owner_file().is_held()
        return False

    def _acquire(self, operation: int) -> bool:
        file = self._path.open("a")
        try:
            fcntl.flock(file, operation)
        except BlockingIOError:
            file.close()
            return False
        except OSError:  # ENOLCK, ENOTSUP, EINVAL: depends on the file system
            file.close()
            self._owner = self._owner_file()
            return self._owner.acquire()
        self._file = file
        return True

    def _owner_file(self) -> "OwnerFile":
        return OwnerFile(self._path.with_name(f"{self._path.name}.owner"))

    def release(self) -> None:
        """Give the lock up; in a child by fork only the copy, which its parent still holds."""
        if self._file:
            self._file.close()
        if self._owner:
            self._owner.release()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a file, once no other does. Raises OSError."""
    lock = FolderLock(path)
    lock.wait()
    try:
        yield
    finally:
        lock.release()


class OwnerFile:
    """A file that exists as long as its owner holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = uuid.uuid4().hex
        self._pid = os.getpid()
        self._released: threading.Event | None = None

    def acquire(self) -> bool:
        """Make the file, or take a stale one over; False if another process holds it."""
        if self._create(self._path) or (self._is_stale(self._path) and self._take_over()):
            self._released = threading.Event()
            threading.Thread(target=self._beat, args=[self._released], daemon=True).start()
            return True
        return False

    def is_held(self) -> bool:
        """Return whether a process that is not known to be dead holds it."""
        return self._path.exists() and not self._is_stale(self._path)

    def release(self) -> None:
        """Delete the file, in the process that made it."""
        if self._released and os.getpid() == self._pid:
            self._released.set()
            if self._is_ours():
                self._path.unlink(missing_ok=True)
        self._released = None

    def _take_over(self) -> bool:
        """Replace a stale file; of several that try, one succeeds.

        Only who has made the successor may rename it, and looks again before.
        """
        successor = self._path.with_name(f"{self._path.name}.next")
        if not self._create(successor):
            if not self._is_stale(successor):
                return False
            successor.unlink(missing_ok=True)  # of a process that ended in the midst of this
            if not self._create(successor):
                return False
        with suppress(FileNotFoundError):  # another renamed ours
            if self._is_stale(self._path):
                successor.replace(self._path)
            else:
                successor.unlink()
        return self._is_ours()

    def _create(self, path: Path) -> bool:
        """Make a file exclusively; False if it is there already."""
        owner = {
            "token": self._token,
            "host": platform.node(),
            "pid": self._pid,
            "pid_started": process.started(self._pid),
            "pid_space": process.pid_space(),
        }
        try:
            with path.open("x") as file:
                json.dump(owner, file)
        except FileExistsError:
            return False
        return True

    def _is_ours(self) -> bool:
        return bool(_read(self._path).get("token") == self._token)

    def _is_stale(self, path: Path) -> bool:
        """Return whether the owner is dead, or its heartbeat too old; False if there is no file."""
        owner = _read(path)
        if owner.get("pid_space") and owner["pid_space"] == process.pid_space():
            return not process.lives(owner["pid"], owner["pid_started"])
        try:
            return self._file_system_time() - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            return False

    def _file_system_time(self) -> float:
        """Return the time by the clock that the file's heartbeat is written with."""
        probe = self._path.with_name(f".{self._path.name}.{self._token}.time")
        probe.write_bytes(b"")
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a full or absent disk: at the next beat
                if not self._is_ours():
                    return
                os.utime(self._path)


def _read(path: Path) -> dict[str, Any]:
    """Return what an owner wrote; nothing if the file is gone or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
