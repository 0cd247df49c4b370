"""What Python prints in a notebook's cells, kept beside its display."""

import sys
from collections.abc import Sequence
from typing import IO, Any

from halfstep.sidecar.lines import Output
from halfstep.telemetry.events import Line, Stream


class CellOutput:
    """Copies of sys.stdout and sys.stderr, whose writes also go to a run's log."""

    def __init__(self, hidden: Sequence[str]) -> None:
        """Take the output until `stop`. hidden: texts that are replaced by ***."""
        self._output = Output(hidden)
        self._copies = {
            "stdout": Copy(sys.stdout, "stdout", self._output),
            "stderr": Copy(sys.stderr, "stderr", self._output),
        }
        sys.stdout, sys.stderr = self._copies["stdout"], self._copies["stderr"]

    def take(self) -> list[Line]:
        """Return the lines printed since the last call."""
        return self._output.take()

    def stop(self) -> None:
        """Restore the streams, unless the notebook has replaced them; complete the last lines."""
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
