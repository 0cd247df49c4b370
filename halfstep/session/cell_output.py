"""Output of a notebook's cells, which is kept as well as displayed."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from halfstep.sidecar.lines import Output
from halfstep.telemetry.event_fields import Stream
from halfstep.telemetry.events import Line

PIECE_BYTES = 2**16  # read at once
DRAIN_SECONDS = 1.0  # most that the end waits for what is in the pipe


class CellOutput:
    """Copies of sys.stdout and sys.stderr, whose writes also go to a run's log.

    A kernel also shows what C libraries and child processes print: it has replaced the file
    descriptors by pipes of its own. Then these are copied, too.
    """

    def __init__(self, hidden: Sequence[str]) -> None:
        """Take the output until `stop`. hidden: texts that are replaced by ***."""
        self._output = Output(hidden)
        self._copies = {
            "stdout": Copy(sys.stdout, "stdout", self._output),
            "stderr": Copy(sys.stderr, "stderr", self._output),
        }
        self._descriptors = []
        for descriptor, copy in zip((1, 2), self._copies.values(), strict=True):
            if getattr(copy.original, "watch_fd_thread", None):  # of ipykernel
                with suppress(OSError):  # no descriptor is left: what Python prints is still kept
                    self._descriptors += [DescriptorCopy(descriptor, copy.stream, self._output)]
        sys.stdout, sys.stderr = self._copies["stdout"], self._copies["stderr"]

    def take(self) -> list[Line]:
        """Return the lines printed since the last call."""
        return self._output.take()

    def stop(self) -> None:
        """Restore the streams, unless the notebook has replaced them; complete the last lines."""
        for descriptor in self._descriptors:
            descriptor.restore()
        deadline = time.monotonic() + DRAIN_SECONDS
        for descriptor in self._descriptors:
            descriptor.join(max(0.0, deadline - time.monotonic()))
        for name, copy in self._copies.items():
            if getattr(sys, name) is copy:
                setattr(sys, name, copy.original)
            self._output.close(copy.stream)


class Copy:
    """A stream that also feeds an output; everything else is the original's."""

    def __init__(self, original: IO[str], stream: Stream, output: Output) -> None:
        self.original, self.stream, self._output = original, stream, output

    def write(self, text: str) -> int:
        """Write to the original stream and to the output."""
        written = self.original.write(text)
        if isinstance(text, str):
            self._output.feed(self.stream, text.encode(errors="replace"))
        return written

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.original, name)


class DescriptorCopy(threading.Thread):
    """Thread that copies what is written to a file descriptor, and feeds it to an output."""

    def __init__(self, descriptor: int, stream: Stream, output: Output) -> None:
        super().__init__(name=f"halfstep-{stream}", daemon=True)
        self._descriptor, self._stream, self._output = descriptor, stream, output
        self._reading, writing = os.pipe()
        try:
            self._pipe = os.fstat(writing).st_ino
            self._before, self._copied_to = os.dup(descriptor), os.dup(descriptor)
            os.dup2(writing, descriptor)
        finally:
            os.close(writing)
        self.start()

    def run(self) -> None:
        """Copy until no process writes any more."""
        with suppress(OSError):  # the kernel reads nothing any more
            while printed := os.read(self._reading, PIECE_BYTES):
                self._output.feed(self._stream, printed)
                while printed:
                    printed = printed[os.write(self._copied_to, printed) :]
        os.close(self._reading)
        os.close(self._copied_to)

    def restore(self) -> None:
        """Restore the descriptor, unless the script has redirected it.

        Child processes that still write are copied further on.
        """
        if os.fstat(self._descriptor).st_ino == self._pipe:
            os.dup2(self._before, self._descriptor)
        os.close(self._before)
