"""Compression and publication of the complete parts of a run's log."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from halfstep.sidecar.log_file import LogFile, compress
from halfstep.telemetry.events import LogPart
from worker.attempts.renew_lease import wait_for


def publish(
    log: LogFile, folder: Path, append_log: Callable[[str], None], meanwhile: Callable[[], None]
) -> Iterator[LogPart]:
    """Compress complete parts and yield their events.

    A part stays uncompressed if the disk is too full.  meanwhile: called periodically during
    compression.
    """
    for part in log.complete_parts():
        try:
            event = wait_for(partial(compress, part, folder), meanwhile)
        except OSError as error:
            log.take(part)
            append_log(f"the log remains in {part} and cannot be downloaded: {error}")
            continue
        log.take(part)
        yield event
