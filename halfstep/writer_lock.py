"""The lock of the process that writes a watched run: two would overwrite each other's rows."""

import fcntl
from pathlib import Path
from typing import IO

LOCK = "writer.lock"


class WriterLock:
    """Held until `release` or the end of the process. A child by fork has to release its copy."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def claim(self, folder: Path) -> bool:
        """Take the lock of a run's folder; False if another process holds it.

        True as well where the file system has no locks.
        """
        file = (folder / LOCK).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:
            file.close()
            return True
        self._file = file
        return True

    def release(self) -> None:
        """Close the file, which keeps the lock in a process that shares it by fork."""
        if self._file:
            self._file.close()
