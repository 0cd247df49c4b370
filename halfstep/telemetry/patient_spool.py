"""A spool writer that survives a full or read-only disk, and the removal of its folder.

A failed write may leave half a frame, after which nothing can be read. Writing therefore continues
in the attempt's next file, `<attempt>-<n+1>`: in the run's refuge, or without one as soon as there
is space again; records of that time are lost and counted. A removed file is written again.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from halfstep.clock import clock
from halfstep.telemetry import refuge
from halfstep.telemetry.events import Event, FailedDiagnosis
from halfstep.telemetry.spool import SpoolWriter, Steps

RETRY_SECONDS = 5.0
LOOK_SECONDS = 1.0  # between two checks whether the file has been removed


class PatientSpool:
    """Same interface as SpoolWriter, but I/O errors are reported instead of raised."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        say: Callable[[str], None],
        sequence: int = 0,
        *,
        has_refuge: bool = False,
        on_removed: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the spool. Raises OSError if its first file cannot be created, nor in the refuge.

        say: called with a message when writing fails and when it works again.
        sequence: number of the first file.  has_refuge: the spool's reader reads the run's
        refuge, too.  on_removed: called when the folder was removed and the spool written again.
        """
        self.lock = threading.RLock()  # of a write; a caller may hold it for several
        self._folder, self._attempt, self._say = folder, attempt, say
        self._has_refuge, self._on_removed = has_refuge, on_removed
        self._sequence = sequence  # of the next file
        self._failed_at, self._looked_at = 0.0, clock()
        self._lost_steps = self._lost_events = 0
        self._last_step = 0
        self._writer: SpoolWriter | None = None
        try:
            self._writer = SpoolWriter(folder, attempt, sequence=sequence)
        except FileExistsError:
            raise
        except OSError:
            if not self._write_in_refuge(lambda _: None):
                raise

    def steps(self, records: Steps) -> None:
        """Append records of STEP_DTYPE; if the write fails, count them as lost."""
        with self.lock:
            self._last_step = int(records["step"][-1])
            if not self._try(lambda writer: writer.steps(records)):
                self._lost_steps += len(records)

    def event(self, event: Event) -> None:
        """Append an event; if the write fails, count it as lost. Raises BadEvent."""
        with self.lock:
            if not self._try(lambda writer: writer.event(event)):
                self._lost_events += 1

    def close(self) -> None:
        """Close the spool; report the records lost since the disk failed, if it still does."""
        self._looked_at = 0.0
        self._try(lambda _: None)
        if self._writer is None:
            self._say(f"the spool still could not be written: {self._lost()}")
        else:
            self._writer.close()

    def _try(self, write: Callable[[SpoolWriter], None]) -> bool:
        """Write, in a new file after a failure; return whether the write succeeded."""
        try:
            writer = self._writer or self._reopen()
            if writer is None:
                return False
            if clock() - self._looked_at > LOOK_SECONDS:
                self._look(writer)
            write(writer)
        except OSError as error:
            return self._fail(error, write)
        return True

    def _look(self, writer: SpoolWriter) -> None:
        """Write the file again if it has been removed. Raises OSError."""
        self._looked_at = clock()
        if writer.is_removed():
            writer.write_again()
            self._on_removed()

    def _reopen(self) -> SpoolWriter | None:
        if clock() - self._failed_at < RETRY_SECONDS:
            return None
        writer = SpoolWriter(self._folder, self._attempt, sequence=self._sequence)
        self._writer = writer
        lost = self._lost()
        writer.event(FailedDiagnosis(step=self._last_step, diagnosis="spool", error=lost))
        self._say(f"the spool can be written again: {self._lost()}")
        self._lost_steps = self._lost_events = 0
        return writer

    def _fail(self, error: OSError, write: Callable[[SpoolWriter], None]) -> bool:
        """Continue in the refuge; return whether the write succeeded there."""
        self._failed_at = clock()
        if self._writer is None:
            return False
        self._sequence = self._writer.sequence + 1
        self._writer.close()
        self._writer = None
        if self._write_in_refuge(write):
            self._say(f"the spool cannot be written, and continues in {self._folder}: {error}")
            return True
        if not self._lost_steps and not self._lost_events:
            self._say(f"the spool cannot be written; data is lost until it can: {error}")
        return False

    def _write_in_refuge(self, write: Callable[[SpoolWriter], None]) -> bool:
        if not self._has_refuge:
            return False
        self._has_refuge = False  # a second failure is the refuge's
        try:
            folder = refuge.open_refuge(self._folder.parent) / self._folder.name
            writer = SpoolWriter(folder, self._attempt, sequence=self._sequence)
            write(writer)
        except OSError:
            return False
        self._folder, self._writer = folder, writer
        return True

    def _lost(self) -> str:
        return f"{self._lost_steps:,} steps and {self._lost_events:,} events were lost"
