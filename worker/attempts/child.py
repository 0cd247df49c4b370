"""Child process of a supervisor: starts it, reads its output, kills its whole tree."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import psutil

from worker.attempts.log_file import LogFile

LINE_BYTES = 8192  # a longer line is cut
#: Of the lines printed between two flushes, the database gets this many first and last ones.
FIRST_WAITING, LAST_WAITING = 500, 500
LAST_LINES = 20  # quoted in an error


class WaitingLines:
    """Buffer of lines for the database; keeps the first and last, counts the rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: list[dict[str, Any]] = []
        self._last: deque[dict[str, Any]] = deque(maxlen=LAST_WAITING)
        self._skipped = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add a line, from any thread."""
        with self._lock:
            if len(self._first) < FIRST_WAITING:
                self._first.append(line)
                return
            self._skipped += len(self._last) == LAST_WAITING
            self._last.append(line)

    def take(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; "lines" gives the number skipped."""
        with self._lock:
            first, self._first = self._first, []
            last, skipped, self._skipped = list(self._last), self._skipped, 0
            self._last.clear()
        gap = {"time": last[0]["time"], "stream": "halfstep", "lines": skipped} if skipped else None
        return [*first, *([gap] if gap else []), *last]


class Child:
    """Training process, or command runner, with all its descendants.

    Start it from the main thread: Linux ends the training when the thread that started it ends.
    """

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        hidden: Sequence[str] = (),
        log: LogFile | None = None,
    ) -> None:
        """hidden: texts replaced by *** in its output.  log: receives all of its output."""
        self._lines, self._log = WaitingLines(), log
        self.last_lines: dict[str, deque[str]] = {
            stream: deque(maxlen=LAST_LINES) for stream in ("stdout", "stderr")
        }
        self._hidden = [text.encode() for text in hidden]
        self._process = subprocess.Popen(
            argv,
            env={**env, "HALFSTEP_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._readers = [
            threading.Thread(target=self._listen, args=(stream, name), daemon=True)
            for stream, name in (
                (self._process.stdout, "stdout"),
                (self._process.stderr, "stderr"),
            )
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id of the training, or of the launcher of its ranks."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def take_lines(self) -> list[dict[str, Any]]:
        """Return the lines printed since the last call, as [{time, stream, text}].

        {time, stream, lines} replaces that number of skipped lines.
        """
        if self._log:
            self._log.flush()
        return self._lines.take()

    def finish_listening(self, seconds: float = 2.0) -> None:
        """Wait, after the process has ended, until all its output has been read.

        seconds: time limit for each of the two streams.
        """
        for reader in self._readers:
            reader.join(seconds)

    def terminate(self) -> None:
        """Request the process to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it and all descendants, also in other sessions, such as torchrun's ranks."""
        try:
            process = psutil.Process(self._process.pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for member in family:
            try:
                member.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def _listen(self, stream: IO[bytes], name: str) -> None:
        with stream:
            lines = self._without_hidden(iter(lambda: stream.readline(LINE_BYTES), b""))
            for line in _whole_characters(lines):
                if self._log:
                    self._log.write(line)
                # Keep only the last state of a progress bar that redraws itself.
                text = line.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
                self._lines.add({"time": time.time(), "stream": name, "text": text})
                self.last_lines[name].append(text)

    def _without_hidden(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Replace hidden texts by ***, also where a long line is cut inside one."""
        held, most = b"", max(map(len, self._hidden), default=1) - 1
        for line in lines:
            whole = held + line
            for text in self._hidden:
                whole = whole.replace(text, b"***")
            cut = len(whole) - most if most and not whole.endswith(b"\n") else len(whole)
            held = whole[max(cut, 0) :]
            if text := whole[: max(cut, 0)]:
                yield text
        if held:
            yield held


def _whole_characters(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pieces cut between UTF-8 characters, never within one."""
    held = b""
    for piece in pieces:
        whole = held + piece
        cut = len(whole) - _incomplete(whole)
        held = whole[cut:]
        if cut:
            yield whole[:cut]
    if held:
        yield held


def _incomplete(piece: bytes) -> int:
    """Return how many trailing bytes belong to an incomplete UTF-8 character."""
    for count, byte in enumerate(reversed(piece[-3:]), 1):
        if byte >= 0xC0:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return count if count < length else 0
        if byte < 0x80:
            return 0
    return 0
