"""A spool whose disk may be full for a while: what comes then is lost, and counted, and no more.

A write that failed may have left half a frame, after which nothing can be read. So it goes on in
the attempt's next file, `<attempt>-<n+1>`, as soon as there is space again.
"""

from collections.abc import Callable
from pathlib import Path

from halfstep.clock import clock
from halfstep.telemetry.spool import Event, SpoolWriter, Steps

RETRY_SECONDS = 5.0


class PatientSpool:
    """Takes steps and events as SpoolWriter does, and raises nothing that the disk does."""

    def __init__(
        self, folder: Path, attempt: int, say: Callable[[str], None], sequence: int = 0
    ) -> None:
        """Raises OSError, for this once, if nothing can be written from the first.

        say: told a sentence when the disk fails, and when it is well again.  sequence: of the
        first file.
        """
        self._folder, self._attempt, self._say = folder, attempt, say
        self._writer: SpoolWriter | None = SpoolWriter(folder, attempt, sequence=sequence)
        self._sequence = sequence  # of the next file
        self._failed_at = 0.0
        self._lost_steps = self._lost_events = 0
        self._last_step = 0

    def steps(self, records: Steps) -> None:
        """Append records of STEP_DTYPE, or count them as lost."""
        self._last_step = int(records["step"][-1])
        if not self._try(lambda writer: writer.steps(records)):
            self._lost_steps += len(records)

    def event(self, event: Event) -> None:
        """Append an event, or count it as lost. Raises BadEvent."""
        if not self._try(lambda writer: writer.event(event)):
            self._lost_events += 1

    def close(self) -> None:
        """Write no more; of what was lost until the end, the end is told."""
        if self._writer is None:
            self._say(f"the disk did not get well: {self._lost()}")
        else:
            self._writer.close()

    def _try(self, write: Callable[[SpoolWriter], None]) -> bool:
        """Write, in a new file if need be; tell whether it was written."""
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
        note = {"event": "failed_diagnosis", "step": self._last_step, "diagnosis": "spool"}
        writer.event(note | {"error": self._lost()})
        self._say(f"the spool is written again: {self._lost()}")
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
            self._say(f"the spool cannot be written, and what comes now is lost: {error}")

    def _lost(self) -> str:
        return f"{self._lost_steps:,} steps and {self._lost_events:,} events were lost"
