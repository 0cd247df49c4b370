"""The files that recipes lie in, looked at now and then: people edit them while a worker is up."""

from pathlib import Path

from worker.environment import digest


class Sources:
    """What the files of recipes were at the last look."""

    def __init__(self, files: dict[str, Path]) -> None:
        """files: by name of the recipe."""
        self._files = files
        self._seen: dict[str, tuple[int, int] | None] = {}

    def changed(self) -> dict[str, str | None]:
        """Return the SHA-256 of those that are not as they were, or were not looked at yet."""
        changed = {}
        for name, path in self._files.items():
            mark = _mark(path)
            if name not in self._seen or self._seen[name] != mark:
                self._seen[name] = mark
                changed[name] = digest(path)
        return changed


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
