"""Child process of a supervisor: starts it, reads its output, kills its whole tree."""

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from halfstep.fork_server import Forked, ForkFailed, Request, current_umask
from halfstep.isolation import PARENT
from halfstep.sidecar.lines import Output
from halfstep.sidecar.log_file import LogFile
from halfstep.telemetry.event_fields import Stream
from halfstep.telemetry.events import Line

logger = logging.getLogger(__name__)

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
        warm: socket.socket | None = None,
    ) -> None:
        """hidden: texts replaced by *** in its output.  log: receives all of its output.

        warm: client's socket of a process that forks the child; argv are then its arguments.
        Raises ForkFailed.
        """
        self._log = log
        self._output = Output(hidden, log.write) if log else Output(hidden)
        self._process: Forked | subprocess.Popen[bytes]
        streams: list[IO[bytes] | None]
        if warm:
            self._process, *streams = _fork(argv, env, warm)
        else:
            self._process = process = subprocess.Popen(
                argv,
                env={**env, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            streams = [process.stdout, process.stderr]
        logger.info("process %d", self.pid)
        self._readers = [
            threading.Thread(target=self._listen, args=(stream, name), daemon=True)
            for stream, name in zip(streams, ("stdout", "stderr"), strict=True)
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


def _fork(
    argv: list[str], env: dict[str, str], warm: socket.socket
) -> tuple[Forked, IO[bytes], IO[bytes]]:
    """Have a child forked; return it with its output and errors. Raises ForkFailed."""
    (output, its_output), (errors, its_errors) = os.pipe(), os.pipe()
    try:
        request = Request(argv, env, str(Path.cwd()), current_umask())
        process = Forked(warm, request, [its_output, its_errors])
        process.begin()
    except ForkFailed:
        os.close(output)
        os.close(errors)
        raise
    finally:
        os.close(its_output)
        os.close(its_errors)
    return process, os.fdopen(output, "rb", 0), os.fdopen(errors, "rb", 0)
