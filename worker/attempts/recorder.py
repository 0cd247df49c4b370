"""Recorder of a run's spool and log in the database, in fenced, repeatable flushes."""

import errno
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import obstore
from obstore.store import ObjectStore
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db.database import Database, is_outage
from db.errors import StaleAttempt, StorageUnreachable
from db.files import artifact_versions, artifacts, checkpoints
from db.files.object_store import delete_files, is_in_place, put_file
from db.queue import queue
from db.runs import runs
from db.settings import Settings
from db.tables import COMMAND, TRAIN
from db.telemetry import series, step_conversion, telemetry
from db.telemetry.recording import BlobId, Recording, in_words
from halfstep import untrusted_files
from halfstep.clock import clock
from halfstep.sidecar.log_file import LogFile, forget_part
from halfstep.sidecar.system import SAMPLE_SECONDS, SystemMonitor
from halfstep.telemetry.events import (
    Artifact,
    Checkpoint,
    Event,
    File,
    Line,
    Resumed,
    SavedArtifact,
)
from halfstep.telemetry.plain_json import safe_repr
from halfstep.telemetry.spool import (
    Item,
    Position,
    SpoolReader,
    Steps,
    Unrecordable,
    frame,
    spool_files,
)
from worker.attempts.published_log import publish
from worker.attempts.renew_lease import wait_for
from worker.attempts.scratch_folders import make_folders
from worker.attempts.uploads import Stored, Uploads, files_of

#: Frames of steps and events in one transaction: about 50 ms of SQLite's write lock.
TRANSACTION_ITEMS = 1000
#: Folders of the files that are taken over.
BLOBS = "blobs"
SAVED = ("checkpoints", "artifacts", BLOBS)


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


def _is_content(path: Path, file: File) -> bool:
    """Return whether a file of the service has the size and the SHA-256 that a run states."""
    with path.open("rb") as content:
        is_same = hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        return is_same and content.tell() == file.size_bytes


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
        self._settings, self._database, self._store = settings, database, store
        self._run_id, self._attempt = run_id, attempt
        self._folder, self._scratch = make_folders(settings, run_id)
        self._stored: set[str] = set()  # files of pending items that are in the store
        self._blob_keys: dict[BlobId, str] = {}  # likewise, of named artifacts
        self._uploads = Uploads(self._send, partial(delete_files, store))  # for a bucket
        self._is_in_place = is_in_place(store, settings.data)
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
        self._spool = SpoolReader(self._spool_folder, Position(newest, sequence=0, offset=0))

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
            raise CannotRecord(self._quarantine_spool(error)) from error

    def finish(self) -> bool:
        """Log damage at the end of a spool no longer written; return if more is to flush."""
        damaged = self._spool.end()
        if damaged is not None:
            self._report_damage(damaged)
        return damaged is not None

    def stop(self) -> None:
        """Stop sending files: another attempt may write the same ones."""
        self._uploads.stop()

    def _publish_waiting(self, meanwhile: Callable[[], None]) -> None:
        """Publish only checkpoints, also those being sent, so that the run can continue."""
        for event in chain(self._recording.checkpoints, self._await_uploads(meanwhile)):
            if isinstance(event, Checkpoint):
                with suppress(Exception):  # the unrecordable item may be one of them
                    self._publish(event, meanwhile)

    def _publish(self, event: Checkpoint, meanwhile: Callable[[], None]) -> None:
        keys = self._store_files(event.files, meanwhile)
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
            return not self._uploads
        # Files before the transaction, which holds a lock.
        keys = [self._store_files(event.files, meanwhile) for event in recording.checkpoints]
        artifact_keys = self._store_files(recording.artifacts, meanwhile)
        self._store_blobs(meanwhile)

        def write(session: Session) -> list[str]:
            recording.write(session, keys, artifact_keys, self._blob_keys)
            if not recording.checkpoints:
                return []
            return checkpoints.prune(session, self._run_id, self._attempt, self._policy)

        pruned = step_conversion.write(
            self._database, write, wait=lambda convert: wait_for(convert, meanwhile)
        )
        # Rows first: no row may refer to a deleted file.
        if self._is_in_place:
            delete_files(self._store, pruned)
        else:
            self._uploads.prune(pruned)
        for key in pruned:
            path = self._settings.data / key
            path.unlink(missing_ok=True)  # for a bucket
            with suppress(OSError):
                name = path.relative_to(self._folder).as_posix()
                untrusted_files.delete(self._scratch, name)
            # A folder of shards, of which this may be the last.
            if path.parent.name.startswith("step-"):
                with suppress(OSError):
                    path.parent.rmdir()
        for event in recording.artifacts:
            forget_part(event.path, self._folder)
        self._stored.clear()
        self._blob_keys.clear()
        recording.forget()
        # After a crash, events waiting for a bucket must be read again.
        self._spool.release(delete=True, before=self._uploads.since)
        return False

    @property
    def quarantine(self) -> Path:
        """Folder of this attempt's items that could not be recorded."""
        return self._folder / f"quarantine-{self._attempt}"

    def clear(self, *, is_over: bool = False) -> None:
        """Delete the spool of this and earlier attempts, which is fully recorded.

        is_over: the run has ended; delete also its names of files that the service has.
        """
        for name in self._list_spooled():
            untrusted_files.delete(self._spool_folder, name)
        for name in SAVED if is_over else ():
            with suppress(OSError):
                untrusted_files.delete(self._scratch, name)

    @property
    def _spool_folder(self) -> Path:
        return self._scratch / "spool"

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
        recording, uploads = self._recording, self._uploads
        files = recording.files
        if self._monitor is None or not self._is_own or recording.goes_back:
            recording.publish([*self._await_uploads(meanwhile), *recording.files])
            return
        if files and not self._is_in_place:
            uploads.add(files, self._read_from or Position(0, 0, 0))
            recording.publish([])
        if uploads.can_begin:
            self._check_fence()
            uploads.begin()
        arrived = self._mark_stored(uploads.collect())
        recording.publish([*arrived, *recording.files])

    def _await_uploads(self, meanwhile: Callable[[], None]) -> Iterator[Stored]:
        """Yield the events of waiting files once these are in the store."""
        while self._uploads:
            if self._uploads.can_begin:
                self._check_fence()
                self._uploads.begin()
            wait_for(self._uploads.wait, meanwhile)
            yield from self._mark_stored(self._uploads.collect())

    def _mark_stored(self, arrived: list[Stored]) -> list[Stored]:
        self._stored.update(self._key(file) for event in arrived for file in files_of(event))
        return arrived

    def _send(self, file: File) -> None:
        """Put a file into the store; runs in a thread."""
        put_file(self._store, self._key(file), self._folder / file.path)

    def _is_for_rows(self, item: Item) -> TypeGuard[Steps | Event]:
        """Return whether to record an item; moves unrecordable ones to quarantine.

        Skips files that are not the run's.
        """
        if isinstance(item, Unrecordable):
            if item.damaged_bytes:
                self._report_damage(item)
            else:
                self._quarantine_frame(item)
            return False
        # Not for events that a dead supervisor may have reported.
        if isinstance(item, Resumed) and self._monitor:
            self.append_log(in_words(item))
        if isinstance(item, SavedArtifact):
            return all(self._take_over(file) for file in item.files)
        if not isinstance(item, Artifact | Checkpoint):
            return True
        # Read a second time, after a crash, a checkpoint may have been pruned by now.
        return all(self._take_over(file) for file in files_of(item))

    def _take_over(self, file: File) -> bool:
        """Take a file over into the service's folder; return whether it is there."""
        path = self._folder / file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.path.startswith(f"{BLOBS}/"):  # stored by its hash, for others too
                untrusted_files.copy_verified(
                    self._scratch, file.path, path, file.sha256, file.size_bytes
                )
            else:
                untrusted_files.take_over(self._scratch, file.path, path, file.size_bytes)
        except FileNotFoundError:  # taken over before a crash, if it is that file
            is_blob = file.path.startswith(f"{BLOBS}/")
            return path.is_file() and (not is_blob or _is_content(path, file))
        except OSError as error:
            if error.errno not in untrusted_files.REFUSED:
                raise
            self._report_problem(
                f"{file.path} is a link, or in a linked folder; allowed: a plain file"
            )
            return False
        except ValueError as error:
            self._report_problem(f"{file.path}: {error}")
            return False
        return True

    def _report_damage(self, damaged: Unrecordable) -> None:
        """Log spool damage in the run's log; the training itself may be healthy."""
        self.lost_bytes += damaged.damaged_bytes
        self.append_log(f"{damaged.problem}: what they held is lost")

    def _quarantine_frame(self, item: Unrecordable) -> None:
        """Save an unrecordable frame unchanged, and continue with the next one."""
        try:
            self.quarantine.mkdir(exist_ok=True)
            with (self.quarantine / "frames").open("ab") as file:
                file.write(frame(item.kind, item.payload))
            self._report_problem(f"{item.problem} (kept in {self.quarantine})")
        except OSError as problem:
            self._report_problem(f"{item.problem} (not kept in {self.quarantine}: {problem})")

    def _report_problem(self, problem: str) -> None:
        """Mark the run to end for unrecordable output; only the first fault is reported."""
        if self.problem is None:
            self.problem = f"its output cannot be recorded: {problem}"
            self.append_log(self.problem)

    def _quarantine_spool(self, error: Exception) -> str:
        """Move the spool away, as it would fail again; return a message about it."""
        traceback.print_exception(error)  # into the supervisor's log, or the worker's
        text = f"its output could not be recorded: {in_short(error)}"
        try:
            self.quarantine.mkdir(exist_ok=True)
            for name in self._list_spooled():
                untrusted_files.take_over(self._spool_folder, name, self.quarantine / name)
                untrusted_files.delete(self._spool_folder, name)
        except OSError as problem:
            return f"{text}; nor could it be moved to {self.quarantine}: {problem}"
        return f"{text}; it was moved to {self.quarantine}"

    def _list_spooled(self) -> list[str]:
        """List what this attempt and those before it spooled: a later one may be writing."""
        names = [path.name for path in spool_files(self._spool_folder)]
        return [name for name in names if int(name.partition("-")[0]) <= self._attempt]

    def _store_files(self, files: Sequence[File], meanwhile: Callable[[], None]) -> list[str]:
        """Store those files that the store lacks; return the keys of all."""
        lacking = {key: file for file in files if (key := self._key(file)) not in self._stored}
        if lacking:
            self._check_fence()
        for key, file in lacking.items():
            wait_for(partial(self._send, file), meanwhile)
            self._stored.add(key)
        return [self._key(file) for file in files]

    def _store_blobs(self, meanwhile: Callable[[], None]) -> None:
        """Store the files of named artifacts that the project does not have yet."""
        saved = (event for event in self._recording.named if isinstance(event, SavedArtifact))
        files = {(file.sha256, file.size_bytes): file for event in saved for file in event.files}
        if not files:
            return
        with self._database.reading() as session:
            project = runs.get(session, self._run_id).project
            known = artifact_versions.find_known_blobs(
                session, project, {sha256 for sha256, _ in files}
            )
        for blob, file in files.items():
            if blob not in known and blob not in self._blob_keys:
                key = artifact_versions.new_key(file.sha256)
                wait_for(partial(put_file, self._store, key, self._folder / file.path), meanwhile)
                self._blob_keys[blob] = key

    def _key(self, file: File) -> str:
        """Return the store key of a file in the run's folder."""
        return (self._folder / file.path).relative_to(self._settings.data).as_posix()

    def _check_fence(self) -> None:
        """Check that no later attempt may have stored the same key. Raises StaleAttempt."""
        with self._database.writing() as session:
            queue.lock_active_attempt(session, self._run_id, self._attempt)
