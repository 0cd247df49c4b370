"""Child process of a supervisor: starts it, reads its output, kills its whole tree."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

import psutil

from halfstep.sidecar.lines import Output
from halfstep.sidecar.log_file import LogFile
from halfstep.telemetry.events import Line, Stream

PIECE_BYTES = 2**16  # read at once


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
        self._log = log
        self._output = Output(hidden, log.write) if log else Output(hidden)
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
    def last_lines(self) -> Mapping[str, Sequence[str]]:
        """The last lines of "stdout" and of "stderr"."""
        return self._output.last_lines

    @property
    def pid(self) -> int:
        """Process id of the training, or of the launcher of its ranks."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def take_lines(self) -> list[Line]:
        """Return the lines printed since the last call; one with `lines` replaces skipped ones."""
        if self._log:
            self._log.flush()
        return self._output.take()

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

    def _listen(self, stream: IO[bytes], name: Stream) -> None:
        with stream:
            while printed := os.read(stream.fileno(), PIECE_BYTES):
                self._output.feed(name, printed)
        self._output.close(name)
