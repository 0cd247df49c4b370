"""Lock of the process that writes a watched run: two would overwrite each other's rows."""

from pathlib import Path

from halfstep.telemetry.folder_lock import FolderLock

LOCK = "writer.lock"


class WriterLock:
    """Held until `release` or the end of the process. A forked child must release its copy."""

    def __init__(self) -> None:
        self._lock: FolderLock | None = None

    def claim(self, folder: Path) -> bool:
        """Take the lock of a run's folder; False if another process holds it."""
        self._lock = FolderLock(folder / LOCK)
        return self._lock.acquire()

    def release(self) -> None:
        """Release the lock; in a forked child this closes only the child's copy."""
        if self._lock:
            self._lock.release()
