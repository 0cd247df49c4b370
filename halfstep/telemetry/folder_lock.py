"""A lock file for one process at a time, also on file systems without locks.

The lock is flock, which the kernel releases when the process ends. If the file system does not
support it, e.g. NFS without a lock daemon, the lock is a file created exclusively, `<name>.owner`,
which names its owner and is touched as a heartbeat. The owner is stale once its process is dead,
or, if this machine cannot check that, once its heartbeat is too old by the file system's clock.
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
POLL_SECONDS = 0.05  # for an owner file, which cannot wake a waiting process


class FolderLock:
    """Held until `release` or the end of the process. A forked child must release its copy."""

    def __init__(self, path: Path) -> None:
        """path: lock file, which is never deleted."""
        self._path = path
        self._file: IO[str] | None = None
        self._owner: OwnerFile | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting; False if another process holds it. Raises OSError."""
        return self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def wait(self) -> None:
        """Wait until the lock is free and take it. Raises OSError."""
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
        """Release the lock; in a forked child only its copy: the parent still holds the lock."""
        if self._file:
            self._file.close()
        if self._owner:
            self._owner.release()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait for the lock of a file and hold it. Raises OSError."""
    lock = FolderLock(path)
    lock.wait()
    try:
        yield
    finally:
        lock.release()


class OwnerFile:
    """Lock file that exists as long as its owner holds the lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = uuid.uuid4().hex
        self._pid = os.getpid()
        self._released: threading.Event | None = None

    def acquire(self) -> bool:
        """Create the file, or take over a stale one; False if another process holds it."""
        if self._create(self._path) or (self._is_stale(self._path) and self._take_over()):
            self._released = threading.Event()
            threading.Thread(
                target=self._send_heartbeats, args=[self._released], daemon=True
            ).start()
            return True
        return False

    def is_held(self) -> bool:
        """Return whether a process that is not known to be dead holds the lock."""
        return self._path.exists() and not self._is_stale(self._path)

    def release(self) -> None:
        """Delete the file; does nothing in a process that did not create it."""
        if self._released and os.getpid() == self._pid:
            self._released.set()
            if self._is_ours():
                self._path.unlink(missing_ok=True)
        self._released = None

    def _take_over(self) -> bool:
        """Replace a stale file; of several processes that try, one succeeds.

        Only the process that created the successor may rename it, and it checks again before that.
        """
        successor = self._path.with_name(f"{self._path.name}.next")
        if not self._create(successor):
            if not self._is_stale(successor):
                return False
            successor.unlink(missing_ok=True)  # left by a process that ended during a takeover
            if not self._create(successor):
                return False
        with suppress(FileNotFoundError):  # another process renamed it
            if self._is_stale(self._path):
                successor.replace(self._path)
            else:
                successor.unlink()
        return self._is_ours()

    def _create(self, path: Path) -> bool:
        """Create a file exclusively; False if it exists."""
        owner = {
            "token": self._token,
            "host": platform.node(),
            "pid": self._pid,
            "pid_started": process.read_start_ticks(self._pid),
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
        """Return the current time by the clock that sets the file's mtime."""
        probe = self._path.with_name(f".{self._path.name}.{self._token}.time")
        probe.write_bytes(b"")
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _send_heartbeats(self, released: threading.Event) -> None:
        while not released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a full or absent disk: retry at the next heartbeat
                if not self._is_ours():
                    return
                os.utime(self._path)


def _read(path: Path) -> dict[str, Any]:
    """Return an owner file's content; {} if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
