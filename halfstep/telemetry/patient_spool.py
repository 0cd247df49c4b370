"""A spool writer that survives a full disk: records of that time are lost and counted.

A failed write may leave half a frame, after which nothing can be read. Writing therefore continues
in the attempt's next file, `<attempt>-<n+1>`, as soon as there is space again.
"""

from collections.abc import Callable
from pathlib import Path

from halfstep.clock import clock
from halfstep.telemetry.events import Event, FailedDiagnosis
from halfstep.telemetry.spool import SpoolWriter, Steps

RETRY_SECONDS = 5.0


class PatientSpool:
    """Same interface as SpoolWriter, but I/O errors are reported instead of raised."""

    def __init__(
        self, folder: Path, attempt: int, say: Callable[[str], None], sequence: int = 0
    ) -> None:
        """Open the spool. Raises OSError if its first file cannot be created.

        say: called with a message when writing fails and when it works again.
        sequence: number of the first file.
        """
        self._folder, self._attempt, self._say = folder, attempt, say
        self._writer: SpoolWriter | None = SpoolWriter(folder, attempt, sequence=sequence)
        self._sequence = sequence  # of the next file
        self._failed_at = 0.0
        self._lost_steps = self._lost_events = 0
        self._last_step = 0

    def steps(self, records: Steps) -> None:
        """Append records of STEP_DTYPE; if the write fails, count them as lost."""
        self._last_step = int(records["step"][-1])
        if not self._try(lambda writer: writer.steps(records)):
            self._lost_steps += len(records)

    def event(self, event: Event) -> None:
        """Append an event; if the write fails, count it as lost. Raises BadEvent."""
        if not self._try(lambda writer: writer.event(event)):
            self._lost_events += 1

    def close(self) -> None:
        """Close the spool; report the records lost since the disk failed, if it still does."""
        if self._writer is None:
            self._say(f"the spool still could not be written: {self._lost()}")
        else:
            self._writer.close()

    def _try(self, write: Callable[[SpoolWriter], None]) -> bool:
        """Write, in a new file after a failure; return whether the write succeeded."""
        try:
            writer = self._writer or self._reopened()
            if writer is None:
                return False
            write(writer)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _reopened(self) -> SpoolWriter | None:
        if clock() - self._failed_at < RETRY_SECONDS:
            return None
        writer = SpoolWriter(self._folder, self._attempt, sequence=self._sequence)
        self._writer = writer
        lost = self._lost()
        writer.event(FailedDiagnosis(step=self._last_step, diagnosis="spool", error=lost))
        self._say(f"the spool can be written again: {self._lost()}")
        self._lost_steps = self._lost_events = 0
        return writer

    def _fail(self, error: OSError) -> None:
        self._failed_at = clock()
        if self._writer is None:
            return
        self._sequence = self._writer.sequence + 1
        self._writer.close()
        self._writer = None
        if not self._lost_steps and not self._lost_events:
            self._say(f"the spool cannot be written; data is lost until it can: {error}")

    def _lost(self) -> str:
        return f"{self._lost_steps:,} steps and {self._lost_events:,} events were lost"
