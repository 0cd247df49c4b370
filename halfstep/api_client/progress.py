"""Progress on one line of stderr, if that is a terminal."""

import sys
from typing import Self

from halfstep.clock import clock
from halfstep.number_formats import count as count_text
from halfstep.number_formats import size as size_text

SECONDS = 0.1  # between two updates
WIDTH = 24


class Progress:
    """Progress bar; call it with done and total. As a context manager, it is erased at the end."""

    def __init__(self, what: str, *, in_bytes: bool = False) -> None:
        self._what, self._in_bytes = what, in_bytes
        self._is_seen = sys.stderr is not None and sys.stderr.isatty()
        self._drawn_at = -SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Erase the line before other output; the next call draws it again."""
        if self._is_seen:
            self._write("")
            self._drawn_at = -SECONDS

    def __call__(self, done: int, total: int = 0) -> None:
        """Draw the progress. total: 0 if unknown."""
        now = clock()
        if not self._is_seen or (now - self._drawn_at < SECONDS and done != total):
            return
        self._drawn_at = now
        figures = self._figure(done)
        if total:
            filled = WIDTH * min(done, total) // total
            bar = "█" * filled + "░" * (WIDTH - filled)
            figures = f"{bar} {100 * done // total:3}%  {figures} of {self._figure(total)}"
        self._write(f"{self._what}  {figures}")

    def _figure(self, number: float) -> str:
        if not self._in_bytes:
            return count_text(int(number))
        return size_text(number)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(f"\r\033[2K{text}")
            sys.stderr.flush()
        except OSError:  # a terminal that was closed
            self._is_seen = False
