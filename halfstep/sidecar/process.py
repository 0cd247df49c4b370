"""The sidecar: a process next to a watched training that keeps its output and samples its machine.

    python -P -m halfstep.sidecar.process ARGUMENTS

It copies the output to where it went before, writes all of it to the run's log files, and lines
and system samples to a spool of its own, which the uploader sends. It outlives the training, so
that what a killed process printed last is kept, and ends when no process writes the output any
more. It never waits for the network.
"""

import json
import os
import select
import socket
import sys
import termios
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep import batch_system
from halfstep.sidecar.arguments import Arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from halfstep.sidecar.arguments import CapturedStream
    from halfstep.sidecar.lines import Output
    from halfstep.sidecar.log_file import LogFile
    from halfstep.sidecar.rank_output import NoLog, RankMonitor, RankReaders, RankSpool
    from halfstep.sidecar.system import SystemMonitor
    from halfstep.telemetry.event_fields import Stream
    from halfstep.telemetry.events import Event
    from halfstep.telemetry.patient_spool import PatientSpool

STOP, DRAINED = b"s", b"d"  # messages on the control socket, of one byte
PIECE_BYTES = 2**16  # read at once
FLUSH_SECONDS = 0.25  # between two hand-overs of lines to the spool
LOCK = "sidecar.lock"  # held while the sidecar may still write
ERRORS = "sidecar-error.txt"


def main() -> None:
    """Run the sidecar, detached, until the training and its output have ended."""
    from halfstep.telemetry.attempt_files import AttemptFiles
    from halfstep.telemetry.folder_lock import FolderLock

    arguments = Arguments.decode(sys.argv[1])
    if arguments.rank:
        keep_rank(arguments)
        return
    files = AttemptFiles(Path(arguments.folder), arguments.attempt)
    lock = FolderLock(files.folder / LOCK)
    lock.acquire()  # before the training goes on: it may end before the imports below are done
    if os.fork():
        os._exit(0)
    batch_system.ignore_signals()
    control = socket.socket(fileno=arguments.control)
    # After the fork: these imports are slow, and the training waits for the first process.
    from halfstep.clock import clock
    from halfstep.session.ranks import retract
    from halfstep.sidecar.description import describe
    from halfstep.sidecar.lines import Output
    from halfstep.sidecar.log_file import LogFile
    from halfstep.sidecar.rank_output import RankReaders
    from halfstep.sidecar.system import SystemMonitor, visible_gpus
    from halfstep.telemetry.patient_spool import PatientSpool

    with control.makefile("rb", buffering=0) as messages:
        hidden = json.loads(messages.readline())
    description = None
    if arguments.describes:
        description = threading.Thread(target=describe, args=[files, arguments, hidden])
        description.start()
    try:
        log = LogFile(files.folder, files.attempt)
        spool = PatientSpool(files.sidecar, files.attempt, lambda _: None, has_refuge=True)
        monitor = None
        if arguments.samples:
            monitor = SystemMonitor(visible_gpus(), arguments.pid)
        ranks = RankReaders(files.folder, files.attempt)
        recorder = Recorder(spool, log, Output(hidden, log.write), monitor, ranks)
        recorder.run(control, arguments.streams, clock() - arguments.elapsed_seconds)
        recorder.close(files.folder)
        if arguments.meeting:
            retract(Path(arguments.meeting), files)
    except Exception:  # its stderr is closed
        with suppress(OSError):
            (files.folder / ERRORS).write_text(traceback.format_exc())
    finally:
        if description:
            description.join()
        lock.release()


def keep_rank(arguments: Arguments) -> None:
    """Keep output and memory of a further rank, detached, until they have ended."""
    if os.fork():
        os._exit(0)
    batch_system.ignore_signals()
    control = socket.socket(fileno=arguments.control)
    from halfstep.clock import clock
    from halfstep.sidecar.lines import Output
    from halfstep.sidecar.rank_output import NoLog, RankMonitor, RankSpool

    with control.makefile("rb", buffering=0) as messages:
        hidden = json.loads(messages.readline())
    rank = arguments.rank
    spool = RankSpool(Path(arguments.meeting), rank)
    monitor = RankMonitor(rank, arguments.pid) if arguments.samples else None
    recorder = Recorder(spool, NoLog(), Output(hidden), monitor)
    with suppress(Exception):  # its stderr is closed; the output goes on where it went before
        recorder.run(control, arguments.streams, clock())
        recorder.close(Path())


class Recorder:
    """Writes the lines and samples of one attempt."""

    def __init__(
        self,
        spool: "PatientSpool | RankSpool",
        log: "LogFile | NoLog",
        output: "Output",
        monitor: "SystemMonitor | RankMonitor | None",
        ranks: "RankReaders | None" = None,
    ) -> None:
        """ranks: of the first rank."""
        self._spool, self._log, self._output, self._monitor = spool, log, output, monitor
        self._ranks = ranks
        self._is_stopped = threading.Event()  # the training has ended, or needs no more samples
        self._readers: list[Reader] = []

    def run(
        self, control: socket.socket, streams: "Sequence[CapturedStream]", started_at: float
    ) -> None:
        """Record until the training has ended and no process writes its output."""
        from halfstep.clock import clock
        from halfstep.telemetry.events import SAMPLE_SECONDS

        self._readers = [
            Reader(name, reading, original, self._output) for name, reading, original in streams
        ]
        threading.Thread(target=self._listen, args=[control], daemon=True).start()
        sampled_at = clock()
        self._sample(round((sampled_at - started_at) * 1000))  # also of a very short run
        while not self._is_stopped.is_set() or any(reader.is_alive() for reader in self._readers):
            if any(reader.is_broken for reader in self._readers):
                # Without this process the script gets the error that it would have had.
                control.shutdown(socket.SHUT_RDWR)
                return
            if not self._is_stopped.is_set() and clock() - sampled_at >= SAMPLE_SECONDS:
                sampled_at = clock()
                self._sample(round((sampled_at - started_at) * 1000))
            self._write_lines()
            self._wait()

    def close(self, folder: Path) -> None:
        """Write the rest, and compress the log."""
        from halfstep.sidecar.log_file import compress, forget_part

        self._write_lines()
        self._forward(self._ranks.drain() if self._ranks else ())
        self._log.close()
        for part in self._log.complete_parts():
            with suppress(OSError):  # a full disk: the part stays as it is
                event = compress(part, folder)
                self._spool.event(event)
                forget_part(event.path, folder)
        self._spool.close()

    def _wait(self) -> None:
        living = [reader for reader in self._readers if reader.is_alive()]
        if self._is_stopped.is_set() and living:
            living[0].join(FLUSH_SECONDS)
        else:
            self._is_stopped.wait(FLUSH_SECONDS)

    def _write_lines(self) -> None:
        from halfstep.sidecar.lines import recordable

        self._log.flush()
        for line in self._output.take():
            self._spool.event(recordable(line))
        self._forward(self._ranks.poll() if self._ranks else ())

    def _forward(self, events: "Iterable[Event]") -> None:
        """Record events of further ranks, with their lines in the log."""
        for event in events:
            self._spool.event(event)
            if text := getattr(event, "text", None):
                self._log.append_log(text)

    def _sample(self, elapsed_ms: int) -> None:
        for sample in self._monitor.take(elapsed_ms) if self._monitor else ():
            self._spool.event(sample)

    def _listen(self, control: socket.socket) -> None:
        """Wait for the training's end; answer its request to copy everything printed so far."""
        with suppress(OSError):
            while message := control.recv(1):
                if message == STOP:
                    for reader in self._readers:
                        reader.drain()
                    control.send(DRAINED)
        self._is_stopped.set()


class Reader(threading.Thread):
    """Thread that copies one channel to its original descriptor, and to the output."""

    def __init__(self, name: "Stream", reading: int, original: int, output: "Output") -> None:
        super().__init__(daemon=True)
        self._stream, self._reading, self._original = name, reading, original
        self._output = output
        self.is_broken = False  # the original descriptor accepts nothing more
        self._is_terminal = os.isatty(original)
        self._copying = threading.Lock()
        self.start()

    def run(self) -> None:
        """Copy until no process writes the channel, or the original descriptor is broken."""
        with suppress(OSError):
            while True:
                select.select([self._reading], [], [])
                with self._copying:
                    printed = _read(self._reading)
                    if not printed:
                        break
                    self._copy(printed)
        self._output.close(self._stream)

    def drain(self) -> None:
        """Return once everything printed so far is copied."""
        while self.is_alive():
            with self._copying:
                if not select.select([self._reading], [], [], 0)[0]:
                    return

    def _copy(self, printed: bytes) -> None:
        if self._is_terminal:
            self._adopt_size()
        self._output.feed(self._stream, printed)
        try:
            while printed:
                printed = printed[os.write(self._original, printed) :]
        except OSError:  # what read it has ended, as in `| head`
            self.is_broken = True
            raise

    def _adopt_size(self) -> None:
        with suppress(termios.error):
            size = termios.tcgetwinsize(self._original)
            if size != termios.tcgetwinsize(self._reading):
                termios.tcsetwinsize(self._reading, size)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, PIECE_BYTES)
    except OSError:  # the last writer of a terminal has closed it
        return b""


if __name__ == "__main__":
    main()
