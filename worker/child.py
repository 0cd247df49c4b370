"""The process of an attempt as its supervisor sees it: started, heard, ended with all its ranks."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import psutil

#: A longer line is cut, and more lines than these, waiting for the database, push the oldest out.
LINE_BYTES = 8192
LINES_WAITING = 100_000
LAST_LINES = 20  # which an error quotes


class Child:
    """One training, or the keeper of a command, with all that they have started.

    Start it from the main thread: Linux ties the training's life to the thread that started it.
    """

    def __init__(self, argv: list[str], env: dict[str, str], hidden: Sequence[str] = ()) -> None:
        """hidden: what stands as *** in the lines that it prints."""
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_WAITING)
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
        """The process that was started: the training, or what starts its ranks."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def take_lines(self) -> list[dict[str, Any]]:
        """Return what was printed since the last call: [{time, stream, text}]."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def finish_listening(self, seconds: float = 2.0) -> None:
        """After the end, wait until all that it printed has been heard."""
        for reader in self._readers:
            reader.join(seconds)

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and every descendant, those in sessions of their own too, as torchrun's ranks."""
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
            for line in self._without_hidden(iter(lambda: stream.readline(LINE_BYTES), b"")):
                # Of a progress bar that redraws itself, only the last state is worth a line.
                text = line.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
                self._lines.append({"time": time.time(), "stream": name, "text": text})
                self.last_lines[name].append(text)

    def _without_hidden(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Hide what is to be hidden, also where a long line is cut in its midst."""
        held, most = b"", max(map(len, self._hidden), default=1) - 1
        for line in lines:
            whole = held + line
            for text in self._hidden:
                whole = whole.replace(text, b"***")
            cut = len(whole) - most if most and not whole.endswith(b"\n") else len(whole)
            held = whole[max(cut, 0) :]
            if told := whole[: max(cut, 0)]:
                yield told
        if held:
            yield held
