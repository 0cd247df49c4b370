"""Capture of a watched script's output by the sidecar, from inside the training process.

The file descriptors 1 and 2 become pipes, or a terminal's if they are one, so that the output of
libraries and child processes is captured too. The sidecar (process.py) copies everything to where
it went before, and keeps it. If the sidecar dies, a thread notices, restores the descriptors, and
copies what child processes still print: the script never blocks and never gets an error.
"""

import atexit
import fcntl
import json
import os
import selectors
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from halfstep.sidecar.arguments import Arguments, CapturedStream
from halfstep.sidecar.process import DRAINED, PIECE_BYTES, STOP
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.event_fields import Stream

OUT, ERR = 1, 2
DRAIN_SECONDS = 2.0  # most that the script's end waits for the sidecar to copy the output
PIPE_BYTES = 2**20  # as large as Linux allows by default


class Descriptor(NamedTuple):
    """A file descriptor, which the script may have closed, and reused for a file of its own."""

    number: int
    identity: tuple[int, int, int]

    @classmethod
    def of(cls, number: int) -> Self:
        """Raises OSError if it is closed."""
        status = os.fstat(number)
        return cls(number, (status.st_dev, status.st_ino, status.st_rdev))

    def is_ours(self) -> bool:
        """Return whether it is still open on the same file."""
        with suppress(OSError):
            return Descriptor.of(self.number) == self
        return False

    def close(self) -> None:
        """Close it, unless the script did."""
        if self.is_ours():
            os.close(self.number)


class Channel(NamedTuple):
    """A captured output: a pipe or a terminal in the place of the original descriptor."""

    name: Stream
    captured: tuple[int, ...]  # 1, 2 or both
    original: Descriptor
    reading: Descriptor
    writing: Descriptor


class Sidecar:
    """Handle of the process that keeps this script's output and samples its machine."""

    def __init__(
        self,
        files: AttemptFiles | None,
        *,
        captures: bool,
        samples: bool,
        describes: bool = False,
        script: Path | None = None,
        keeps_code: bool = False,
        hidden: Sequence[str] = (),
        elapsed_seconds: float = 0.0,
        rank: int = 0,
        meeting: Path | None = None,
    ) -> None:
        """Start the sidecar.

        files: None of a further rank; its `meeting` file then has them, once they exist.
        captures: take the output.  samples: sample the machine.  describes: record git state and
        packages, with keeps_code also the script's text.  hidden: texts replaced by *** in the
        output.  elapsed_seconds: the run's age.  Raises OSError, with the output as it was.
        """
        self._channels: list[Channel] = []
        self._drained = threading.Event()
        self._is_stopping = False
        self._pid = os.getpid()
        self._control, theirs = socket.socketpair()
        self._socket = Descriptor.of(self._control.fileno())
        try:
            if captures:
                self._channels = _channels()
            arguments = Arguments(
                folder=str(files.folder) if files else "",
                attempt=files.attempt if files else 0,
                rank=rank,
                meeting=str(meeting or ""),
                control=theirs.fileno(),
                streams=[
                    CapturedStream(channel.name, channel.reading.number, channel.original.number)
                    for channel in self._channels
                ],
                samples=samples,
                describes=describes,
                script=str(script or ""),
                keeps_code=keeps_code,
                pid=os.getpid(),
                elapsed_seconds=elapsed_seconds,
            )
            self._start(theirs, arguments, hidden)
            self._redirect()
        except BaseException:
            self._control.close()
            _close(self._channels)
            raise
        finally:
            theirs.close()
        threading.Thread(target=self._guard, name="halfstep-sidecar", daemon=True).start()
        atexit.register(self.stop)  # after a traceback is printed

    def stop(self) -> None:
        """Restore the output, once the sidecar has copied what was printed."""
        if os.getpid() != self._pid or self._is_stopping:
            return
        self._is_stopping = True
        atexit.unregister(self.stop)
        _flush()
        self._restore()
        if not self._socket.is_ours():
            return
        with suppress(OSError):
            self._control.send(STOP)
            self._control.shutdown(socket.SHUT_WR)
            self._drained.wait(DRAIN_SECONDS)

    def original(self, descriptor: int) -> int | None:
        """Return where a captured descriptor went before; None if it is not captured now."""
        for channel in () if self._is_stopping else self._channels:
            if descriptor in channel.captured and channel.original.is_ours():
                return channel.original.number
        return None

    def leave(self) -> None:
        """Close a forked child's copies; its output stays captured."""
        self._leave_control()
        _close(self._channels)

    def _start(
        self,
        theirs: socket.socket,
        arguments: Arguments,
        hidden: Sequence[str],
    ) -> None:
        passed = [theirs.fileno()]
        for channel in self._channels:
            passed += [channel.reading.number, channel.original.number]
        ours = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")])),
            "OPENBLAS_NUM_THREADS": "1",  # numpy then allocates no stack per processor
        }
        command = [sys.executable, "-P", "-m", "halfstep.sidecar.process", arguments.encode()]
        # The secrets, which a command line would show to every user of the machine.
        self._control.sendall(json.dumps(list(hidden)).encode() + b"\n")
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C ends the script, and the sidecar after it
        ) as starter:  # which forks and ends at once, as the uploader does
            starter.wait()
        if starter.returncode:
            raise OSError(f"the sidecar ended with exit code {starter.returncode}")

    def _redirect(self) -> None:
        _flush()
        for channel in self._channels:
            for descriptor in channel.captured:
                os.dup2(channel.writing.number, descriptor)
            channel.writing.close()

    def _restore(self) -> None:
        """Return the descriptors to where they went, unless the script has redirected them."""
        for channel in self._channels:
            for descriptor in channel.captured:
                is_captured = Descriptor(descriptor, channel.writing.identity).is_ours()
                if is_captured and channel.original.is_ours():
                    os.dup2(channel.original.number, descriptor)

    def _guard(self) -> None:
        """Wait until the sidecar has ended; then copy what processes still print."""
        with suppress(OSError):
            while message := self._control.recv(1):
                if message == DRAINED:
                    self._drained.set()
        self._drained.set()
        self._leave_control()
        with suppress(OSError):
            if not self._is_stopping:
                self._restore()
            _copy(self._channels)

    def _leave_control(self) -> None:
        if self._socket.is_ours():
            self._control.close()
        else:
            self._control.detach()


def is_interactive() -> bool:
    """Return whether a person types the script's lines, into Python or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _channels() -> list[Channel]:
    """Open a channel for stdout and one for stderr, or one for both if they go the same way."""
    if not (_is_open(OUT) and _is_open(ERR)):
        return []
    # With one channel the order of lines stays as the script printed them.
    is_one = os.path.sameopenfile(OUT, ERR)
    named: list[tuple[Stream, tuple[int, ...]]] = [("stdout", (OUT,)), ("stderr", (ERR,))]
    if is_one:
        named = [("stdout", (OUT, ERR))]
    channels: list[Channel] = []
    try:
        for name, captured in named:
            original = os.dup(captured[0])
            ends = _terminal(original) if os.isatty(original) else _pipe()
            channels.append(Channel(name, captured, *map(Descriptor.of, (original, *ends))))
    except OSError:
        _close(channels)
        raise
    return channels


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    with suppress(OSError):  # more than this user may have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def _terminal(original: int) -> tuple[int, int]:
    """Open a terminal with the original's size and settings."""
    reading, writing = os.openpty()
    attributes = termios.tcgetattr(original)
    attributes[1] &= ~termios.OPOST  # the original itself changes line ends
    termios.tcsetattr(writing, termios.TCSANOW, attributes)
    termios.tcsetwinsize(writing, termios.tcgetwinsize(original))
    return reading, writing


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        return bool(os.fstat(descriptor))
    return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _close(channels: Sequence[Channel]) -> None:
    for channel in channels:
        for descriptor in (channel.reading, channel.writing, channel.original):
            descriptor.close()


def _copy(channels: Sequence[Channel]) -> None:
    """Copy what processes still write to the channels, until all have ended.

    Raises OSError if what they are copied to has failed.
    """
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            if channel.reading.is_ours() and channel.original.is_ours():
                selector.register(channel.reading.number, selectors.EVENT_READ, channel)
        while selector.get_map():
            for key, _ in selector.select():
                if not _copy_piece(key.data):
                    selector.unregister(key.fd)
    _close(channels)


def _copy_piece(channel: Channel) -> bool:
    """Copy what can be read at once; return whether there may be more."""
    try:
        printed = os.read(channel.reading.number, PIECE_BYTES)
        rest = printed
        while rest:
            rest = rest[os.write(channel.original.number, rest) :]
    except OSError:  # a terminal without a writer, or an original whose reader has ended
        printed = b""
    if not printed:
        channel.reading.close()
    return bool(printed)
