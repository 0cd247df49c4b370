"""Recorder of a run's spool and log in the database, in fenced, repeatable flushes."""

import errno
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, TypeGuard

import obstore
from obstore.store import ObjectStore
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db.database import Database, is_outage
from db.errors import StaleAttempt, StorageUnreachable
from db.files import artifacts, checkpoints
from db.runs import runs
from db.settings import Settings
from db.tables import COMMAND, TRAIN
from db.telemetry import series, step_conversion, telemetry
from db.telemetry.recording import Recording, in_words
from halfstep import untrusted_files
from halfstep.clock import clock
from halfstep.sidecar.log_file import LogFile, forget_part
from halfstep.sidecar.system import SystemMonitor
from halfstep.telemetry.events import (
    SAMPLE_SECONDS,
    Artifact,
    Checkpoint,
    Event,
    Line,
    Resumed,
    SavedArtifact,
)
from halfstep.telemetry.plain_json import safe_repr
from halfstep.telemetry.spool import Item, Position, SpoolReader, Steps, Unrecordable
from worker.attempts.published_log import publish
from worker.attempts.renew_lease import wait_for
from worker.attempts.scratch_folders import SAVED, make_folders, take_over
from worker.attempts.spool_files import SpoolFiles
from worker.attempts.stored_files import StoredFiles
from worker.attempts.uploads import files_of

#: Frames of steps and events in one transaction: about 50 ms of SQLite's write lock.
TRANSACTION_ITEMS = 1000


class CannotRecord(Exception):
    """Output of a training that cannot be recorded; the message says where it was moved."""


def may_pass(error: Exception) -> bool:
    """Return whether the error is a database, store or disk outage that may pass."""
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    is_store = isinstance(error, obstore.exceptions.BaseError | StorageUnreachable)
    return is_full or is_outage(error) or is_store


def in_short(error: Exception) -> str:
    """Return an error's type and first line, without a database error's statement."""
    message = str(error.orig if isinstance(error, DBAPIError) else error)
    return f"{type(error).__name__}: {safe_repr(message.partition(chr(10))[0])}"


class Recorder:
    """Recorder of one attempt; first records what earlier attempts left in the spool.

    Except if a later attempt has already recorded: the database then has the later one's steps.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: ObjectStore,
        run_id: int,
        attempt: int,
    ) -> None:
        self._database, self._run_id, self._attempt = database, run_id, attempt
        self._folder, self._scratch = make_folders(settings, run_id)
        self._spool_files = SpoolFiles(self._scratch / "spool", self._folder, attempt)
        self._files = StoredFiles(settings, database, store, run_id, attempt)
        self._is_own = False  # the items last read are of this attempt
        self._read_from: Position | None = None  # position before the items last read
        self._has_sent_off = False  # files of pending items
        self._monitor: SystemMonitor | None = None
        self._sample_due = 0.0
        self._policy: dict[str, Any] = {}
        self.problem: str | None = None  # why the run must end: unrecordable output
        self.lost_bytes = 0  # damaged bytes of the spool
        self.log = LogFile(self._folder, attempt)
        with database.reading() as session:
            last = series.log_lines(session, run_id, most=1)
            newest = telemetry.newest_attempt(session, run_id, attempt)
            run = runs.get(session, run_id)
        self._recording = Recording(
            run_id,
            attempt,
            has_begun=newest == attempt,  # by a supervisor that has died
            last_line=last[0].number if last else 0,
            may_log_alone=run.step == 0 and (run.source == COMMAND or run.task != TRAIN),
            begins_anew=True,
            shares_log=run.nodes > 1,
        )
        # Files of an older attempt, left on a disconnected machine, would overwrite later records.
        self._spool = SpoolReader(self._spool_files.folder, Position(newest, sequence=0, offset=0))

    @property
    def has_begun(self) -> bool:
        """Whether a step of this attempt is recorded."""
        return self._recording.has_begun

    def begin(self, monitor: SystemMonitor, started_at: float, policy: dict[str, Any]) -> None:
        """Start to sample devices and apply the checkpoint retention policy.

        started_at: the run's first start, by halfstep.clock.
        """
        self._monitor, self._started_at, self._policy = monitor, started_at, policy

    def append_log(self, text: str) -> None:
        """Add a line from Halfstep to the run's log."""
        self._recording.append_log(text)
        self.log.append_log(text)

    def flush(
        self,
        take_lines: Callable[[], list[Line]] = list,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bool:
        """Record new items in one transaction; return whether none were left.

        meanwhile: called periodically while files are sent to the store and later items wait. For a
        training being followed, nothing waits for a bucket.

        After a failure, taken items stay pending and no more are taken from the spool: during an
        outage the spool grows but memory does not. On a permanent failure the whole spool is put
        aside; a disk error is not a training error. Raises StaleAttempt, OSError, CannotRecord.
        """
        try:
            return self._flush(take_lines, meanwhile)
        except Exception as error:
            if isinstance(error, StaleAttempt | OSError) or may_pass(error):
                raise
            with suppress(Exception):
                self._publish_waiting(meanwhile)
            traceback.print_exception(error)  # into the supervisor's log, or the worker's
            text = f"its output could not be recorded: {in_short(error)}"
            raise CannotRecord(f"{text}; {self._spool_files.quarantine()}") from error

    def finish(self) -> bool:
        """Log damage at the end of a spool no longer written; return if more is to flush."""
        damaged = self._spool.end()
        if damaged is not None:
            self._report_damage(damaged)
        return damaged is not None

    def stop(self) -> None:
        """Stop sending files: another attempt may write the same ones."""
        self._files.uploads.stop()

    def _publish_waiting(self, meanwhile: Callable[[], None]) -> None:
        """Publish only checkpoints, also those being sent, so that the run can continue."""
        for event in chain(self._recording.checkpoints, self._files.await_uploads(meanwhile)):
            if isinstance(event, Checkpoint):
                with suppress(Exception):  # the unrecordable item may be one of them
                    self._publish(event, meanwhile)

    def _publish(self, event: Checkpoint, meanwhile: Callable[[], None]) -> None:
        keys = self._files.store(event.files, meanwhile)
        with self._database.writing() as session:
            checkpoints.publish(session, self._run_id, self._attempt, event, keys)

    def _flush(self, take_lines: Callable[[], list[Line]], meanwhile: Callable[[], None]) -> bool:
        recording = self._recording
        if not recording.is_taken:
            for line in take_lines():
                recording.log(line)
            self._collect()
            parts = publish(self.log, self._folder, recording.append_log, meanwhile)
            recording.artifacts += map(artifacts.log_artifact, parts)
            self._has_sent_off = False
        if not self._has_sent_off:
            self._send_off(meanwhile)
            self._has_sent_off = True
        if not recording:
            return not self._files.uploads
        # Files before the transaction, which holds a lock.
        keys = [self._files.store(event.files, meanwhile) for event in recording.checkpoints]
        artifact_keys = self._files.store(recording.artifacts, meanwhile)
        blob_keys = self._files.store_blobs(recording.named, meanwhile)

        def write(session: Session) -> list[str]:
            recording.write(session, keys, artifact_keys, blob_keys)
            if not recording.checkpoints:
                return []
            return checkpoints.prune(session, self._run_id, self._attempt, self._policy)

        pruned = step_conversion.write(
            self._database, write, wait=lambda convert: wait_for(convert, meanwhile)
        )
        self._files.delete(pruned)  # rows first: no row may refer to a deleted file
        for event in recording.artifacts:
            forget_part(event.path, self._folder)
        self._files.forget()
        recording.forget()
        # After a crash, events waiting for a bucket must be read again.
        self._spool.release(delete=True, before=self._files.uploads.since)
        return False

    def clear(self, *, is_over: bool = False) -> None:
        """Delete the spool of this and earlier attempts, which is fully recorded.

        is_over: the run has ended; delete also its names of files that the service has.
        """
        self._spool_files.delete()
        for name in SAVED if is_over else ():
            with suppress(OSError):
                untrusted_files.delete(self._scratch, name)

    def _collect(self) -> None:
        self._read_from = self._spool.position()
        items = self._spool.poll(limit_items=TRANSACTION_ITEMS)
        position = self._spool.position()
        self._is_own = position is not None and position.attempt == self._attempt
        taken = [item for item in items if self._is_for_rows(item)]
        self._recording.take(taken, is_own=self._is_own)
        if self._monitor and time.monotonic() >= self._sample_due:
            self._sample_due = time.monotonic() + SAMPLE_SECONDS
            elapsed_ms = round((clock() - self._started_at) * 1000)
            self._recording.pending.samples += self._monitor.take(elapsed_ms)

    def _send_off(self, meanwhile: Callable[[], None]) -> None:
        """Send files to a bucket; publish those already sent.

        After a rollback, waits for its files: earlier events come first.
        """
        recording, files = self._recording, self._files
        if self._monitor is None or not self._is_own or recording.goes_back:
            recording.publish([*files.await_uploads(meanwhile), *recording.files])
            return
        if recording.files and not files.is_in_place:
            files.uploads.add(recording.files, self._read_from or Position(0, 0, 0))
            recording.publish([])
        recording.publish([*files.collect_uploads(), *recording.files])

    def _is_for_rows(self, item: Item) -> TypeGuard[Steps | Event]:
        """Return whether to record an item; moves unrecordable ones to quarantine.

        Skips files that are not the run's.
        """
        if isinstance(item, Unrecordable):
            if item.damaged_bytes:
                self._report_damage(item)
            else:
                self._report_problem(self._spool_files.quarantine_frame(item))
            return False
        # Not for events that a dead supervisor may have reported.
        if isinstance(item, Resumed) and self._monitor:
            self.append_log(in_words(item))
        if not isinstance(item, Artifact | Checkpoint | SavedArtifact):
            return True
        try:
            # Read a second time, after a crash, a checkpoint may have been pruned by now.
            return all(take_over(self._scratch, self._folder, file) for file in files_of(item))
        except ValueError as error:
            self._report_problem(str(error))
            return False

    def _report_damage(self, damaged: Unrecordable) -> None:
        """Log spool damage in the run's log; the training itself may be healthy."""
        self.lost_bytes += damaged.damaged_bytes
        self.append_log(f"{damaged.problem}: what they held is lost")

    def _report_problem(self, problem: str) -> None:
        """Mark the run to end for unrecordable output; only the first fault is reported."""
        if self.problem is None:
            self.problem = f"its output cannot be recorded: {problem}"
            self.append_log(self.problem)
