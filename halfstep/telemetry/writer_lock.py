"""The lock of the process that writes a watched run: two would overwrite each other's rows."""

from pathlib import Path

from halfstep.telemetry.folder_lock import FolderLock

LOCK = "writer.lock"


class WriterLock:
    """Held until `release` or the end of the process. A child by fork has to release its copy."""

    def __init__(self) -> None:
        self._lock: FolderLock | None = None

    def claim(self, folder: Path) -> bool:
        """Take the lock of a run's folder; False if another process holds it."""
        self._lock = FolderLock(folder / LOCK)
        return self._lock.acquire()

    def release(self) -> None:
        """Give the lock up; in a child by fork only its copy."""
        if self._lock:
            self._lock.release()
