"""Output of a process: whole lines for its log, and a bounded number of them for the database."""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from msgspec.structs import replace

from halfstep.telemetry.event_fields import Stream
from halfstep.telemetry.events import Line
from halfstep.telemetry.plain_json import clean

LINE_BYTES = 8192  # a longer line is cut into several
#: Of the lines printed between two calls of `take`, this many first and last ones are kept.
FIRST_WAITING, LAST_WAITING = 500, 500
LAST_LINES = 20  # quoted in an error
#: Cursor up, and to the beginning of a line above.
MOVES_UP = re.compile(rb"\x1b\[[0-9]*[AF]")

if TYPE_CHECKING:
    from halfstep.sidecar.progress_bars import ProgressBars


class Output:
    """Redacts output, writes its whole lines to a log, and keeps some of them. Thread-safe.

    The cost per line is that of `bytes.split`: a program may print a million lines in a second.
    """

    def __init__(
        self, hidden: Sequence[str] = (), log: Callable[[bytes], None] = lambda _: None
    ) -> None:
        """hidden: texts replaced by ***.  log: receives whole lines, with their line ends."""
        self.last_lines: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        self._hidden = [text.encode() for text in hidden]
        self._held_back = max(map(len, self._hidden), default=1) - 1
        self._log = log
        self._lock = threading.Lock()
        self._held: dict[Stream, bytes] = defaultdict(
            bytes
        )  # may be the beginning of a hidden text
        self._rest: dict[Stream, bytes] = defaultdict(bytes)  # a line without its end
        self._first: list[tuple[float, Stream, bytes]] = []
        self._last: deque[tuple[float, Stream, bytes]] = deque(maxlen=LAST_WAITING)
        self._skipped = 0
        self._finished: dict[Stream, bytes] = {}  # a bar that may still get others below it
        self._bars: dict[Stream, ProgressBars] = {}  # of streams whose cursor moves up

    def feed(self, stream: Stream, printed: bytes) -> None:
        """Add output of a stream, cut anywhere."""
        with self._lock:
            self._feed(stream, self._redact(stream, printed))

    def close(self, stream: Stream) -> None:
        """Add the rest of a stream that has ended, a last line without its end included."""
        with self._lock:
            self._feed(stream, self._held.pop(stream, b""))
            if rest := self._rest.pop(stream, b""):
                self._add(stream, rest, rest.removesuffix(b"\n").split(b"\n"))
            self._end_bars(stream)

    def take(self) -> list[Line]:
        """Return the lines since the last call; one with `lines` replaces skipped ones."""
        with self._lock:
            for stream in [key for key, bars in self._bars.items() if bars.is_over()]:
                self._end_bars(stream)
            for stream, rest in self._rest.items():
                bar = rest[: rest.rfind(b"\n") + 1]
                if bar and bar == self._finished.get(stream):  # since the last call
                    self._rest[stream] = rest[len(bar) :]
                    self._add(stream, bar, [bar[:-1]])
                self._finished[stream] = bar
            first, self._first = self._first, []
            last, skipped, self._skipped = list(self._last), self._skipped, 0
            self._last.clear()
        gap = [Line(time=last[0][0], stream="halfstep", lines=skipped)] if skipped else []
        return [*map(_line, first), *gap, *map(_line, last)]

    def _redact(self, stream: Stream, printed: bytes) -> bytes:
        if not self._hidden:
            return printed
        whole = self._held[stream] + printed
        for text in self._hidden:
            whole = whole.replace(text, b"***")
        cut = len(whole) if whole.endswith(b"\n") else max(len(whole) - self._held_back, 0)
        self._held[stream] = whole[cut:]
        return whole[:cut]

    def _feed(self, stream: Stream, printed: bytes) -> None:
        whole = self._rest[stream] + printed
        moves_up = b"\x1b[" in whole and MOVES_UP.search(whole) is not None
        bars = self._bars.get(stream)
        if bars and not moves_up and bars.is_over(len(printed)):
            self._end_bars(stream)
        if stream in self._bars or moves_up:
            self._rest[stream] = b""
            self._feed_bars(stream, whole, moves_up=moves_up)
            return
        cut = whole.rfind(b"\n") + 1
        if whole[cut : cut + 1] in (b"", b"\r"):  # another bar may be drawn below the last one
            cut -= len(_last_bar(whole[:cut]))  # which is held until the second `take`
        if len(whole) - cut > LINE_BYTES:
            cut = len(whole) - _incomplete(whole)
        self._rest[stream] = whole[cut:]
        if complete := whole[:cut]:
            self._add(stream, complete, complete.removesuffix(b"\n").split(b"\n"))

    def _feed_bars(self, stream: Stream, printed: bytes, *, moves_up: bool) -> None:
        from halfstep.sidecar.progress_bars import ProgressBars  # deferred: few programs need it

        if stream not in self._bars:
            self._bars[stream] = ProgressBars(self.last_lines[stream])
        self._log(printed)
        try:
            settled = self._bars[stream].feed(printed, moves_up=moves_up)
        except Exception:  # of a sequence that the emulator does not know
            del self._bars[stream]
            settled = printed.decode(errors="replace").split("\n")
        self._keep(stream, [line.encode() for line in settled])

    def _end_bars(self, stream: Stream) -> None:
        if bars := self._bars.pop(stream, None):
            self._keep(stream, [line.encode() for line in bars.flush()])

    def _add(self, stream: Stream, complete: bytes, lines: list[bytes]) -> None:
        self._log(complete)
        self._keep(stream, lines)

    def _keep(self, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        if max(map(len, lines)) > LINE_BYTES:
            lines = [piece for line in lines for piece in _pieces(line)]
        self.last_lines[stream].extend(map(_decode, lines[-LAST_LINES:]))
        now = time.time()
        room = FIRST_WAITING - len(self._first)
        self._first.extend(zip(repeat(now), repeat(stream), lines[: max(room, 0)], strict=False))
        later = lines[max(room, 0) :]
        self._skipped += max(len(self._last) + len(later) - LAST_WAITING, 0)
        self._last.extend(zip(repeat(now), repeat(stream), later, strict=False))


def recordable(line: Line) -> Line:
    """Return a line without characters that cannot be stored."""
    return replace(line, text=clean(line.text)) if isinstance(line.text, str) else line


def _line(entry: tuple[float, Stream, bytes]) -> Line:
    moment, stream, line = entry
    return Line(time=moment, stream=stream, text=_decode(line))


def _decode(line: bytes) -> str:
    """Decode a line; of a progress bar that redraws itself only the last state."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


def _last_bar(whole: bytes) -> bytes:
    """Return the last line if it has been redrawn, as by a progress bar."""
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    return last if b"\r" in last.rstrip(b"\r\n") and len(last) <= LINE_BYTES else b""


def _pieces(line: bytes) -> Iterator[bytes]:
    """Cut a line into pieces, between UTF-8 characters."""
    while len(line) > LINE_BYTES:
        piece = line[:LINE_BYTES]
        cut = LINE_BYTES - _incomplete(piece)
        yield line[:cut]
        line = line[cut:]
    yield line


def _incomplete(piece: bytes) -> int:
    """Return how many trailing bytes belong to an incomplete UTF-8 character."""
    for count, byte in enumerate(reversed(piece[-3:]), 1):
        if byte >= 0xC0:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return count if count < length else 0
        if byte < 0x80:
            return 0
    return 0
