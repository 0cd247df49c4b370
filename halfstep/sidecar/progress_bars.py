"""Progress bars that move the cursor up, such as nested ones of tqdm and those of rich.

A terminal emulator (pyte) shows what such a program prints. A line is settled once it is above the
rows that the cursor has returned to; only settled lines are kept, so that the log has a bar once.
"""

from collections.abc import Iterable

import pyte
from pyte.modes import LNM

from halfstep.clock import clock

ROWS, COLUMNS = 60, 400
#: Time after the cursor last moved up for which lines may still change.
MOVING_SECONDS = 30.0
#: So many bytes at once, without such a move, are not of progress bars.
MOST_BYTES = 2**18


class ProgressBars:
    """Lines of one stream, since its cursor first moved up."""

    def __init__(self, above: Iterable[str] = ()) -> None:
        """above: lines that are kept already, to which the cursor may move."""
        self._screen = _Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        for line in above:
            self._stream.feed(line.encode() + b"\n")
        self._screen.skip()
        self._moved_at = clock()

    def feed(self, printed: bytes, *, moves_up: bool) -> list[str]:
        """Add output, cut anywhere; return the lines that are settled now.

        moves_up: whether it moves the cursor up.
        """
        if moves_up:
            self._moved_at = clock()
        self._stream.feed(printed)
        return self._screen.take_settled()

    def is_over(self, following_bytes: int = 0) -> bool:
        """Return whether the lines no longer change. following_bytes: without a move up."""
        return following_bytes > MOST_BYTES or clock() - self._moved_at > MOVING_SECONDS

    def flush(self) -> list[str]:
        """Return all other lines."""
        return self._screen.rest()


class _Screen(pyte.Screen):
    """A screen that collects the lines above those that the cursor returns to."""

    def __init__(self, columns: int, lines: int) -> None:
        self._height = 0  # rows that the cursor has moved up at once, at most
        self._kept = 0  # rows at the top that are settled
        self._lowest = 0  # row with text, or the cursor's
        self._settled: list[str] = []
        super().__init__(columns, lines)
        self.set_mode(LNM)

    def cursor_up(self, count: int | None = None) -> None:
        """Move the cursor up."""
        before = self.cursor.y
        super().cursor_up(count)
        self._height = max(self._height, before - self.cursor.y)
        self._kept = min(self._kept, self.cursor.y)

    def index(self) -> None:
        """Move the cursor down, or scroll."""
        if self.cursor.y == self.lines - 1:
            if not self._kept:
                self._keep(0)
            self._kept = max(self._kept - 1, 0)
        super().index()
        self._lowest = max(self._lowest, self.cursor.y)

    def skip(self) -> None:
        """Take all lines above the cursor as kept."""
        self._kept, self._settled = self.cursor.y, []

    def take_settled(self) -> list[str]:
        """Return the lines that have become settled."""
        while self._lowest and not self._text(self._lowest) and self.cursor.y < self._lowest:
            self._lowest -= 1  # erased
        while self._kept < self._lowest - self._height:
            self._keep(self._kept)
            self._kept += 1
        settled, self._settled = self._settled, []
        return settled

    def rest(self) -> list[str]:
        """Return the settled lines and all others."""
        for row in range(self._kept, self.lines):
            self._keep(row)
        settled, self._settled = self._settled, []
        return settled

    def _keep(self, row: int) -> None:
        if text := self._text(row):
            self._settled.append(text)

    def _text(self, row: int) -> str:
        line = self.buffer[row]
        return "".join(line[column].data for column in range(self.columns)).rstrip()
