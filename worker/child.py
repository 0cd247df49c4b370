"""The training process as its supervisor sees it: started, heard, and ended with all its ranks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import psutil

#: A longer line is cut, and more lines than these, waiting for the database, push the oldest out.
LINE_BYTES = 8192
LINES_WAITING = 100_000

#: What opens the database or names the store, which recipes have no business with.
SECRETS = ("HALFSTEP_DATABASE_URL", "HALFSTEP_STORAGE_URL", "PGPASSWORD", "PGPASSFILE")


def without_secrets() -> dict[str, str]:
    """Return our environment as a process may have it that runs a recipe's code."""
    return {name: value for name, value in os.environ.items() if name.upper() not in SECRETS}


class Child:
    """One training: a process for one device, torchrun and its ranks for more.

    Start it from the main thread: Linux ties the training's life to the thread that started it.
    """

    def __init__(self, folder: Path, attempt: int, devices: int, env: dict[str, str]) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_WAITING)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.process", str(folder), str(attempt)]
            + (["--devices", str(devices)] if devices > 1 else []),
            env={**without_secrets(), **env, "HALFSTEP_PARENT_PID": str(os.getpid())},
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
        """The process that was started: the training, or torchrun."""
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

    def kill(self) -> None:
        """End it and every descendant. torchrun gives each rank a session of its own."""
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
            for line in iter(lambda: stream.readline(LINE_BYTES), b""):
                # Of a progress bar that redraws itself, only the last state is worth a line.
                text = line.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
                self._lines.append({"time": time.time(), "stream": name, "text": text})
