"""Freeze: the steps of a run that has ended move from rows into a file in the store.

1. The steps are written to a temporary file, which is stored under a new key.
2. The stored file is read back; the number of steps and each column must be those of the rows.
3. A row of `frozen_steps` publishes the file, unless the run has changed meanwhile.
4. The rows are deleted in batches, except those that other queries read, see `_retained`; so are
   the lowest buckets of the pyramid, which the file has.
5. The file before this one is deleted by a call ORPHAN_SECONDS after this was stored, while no
   backup runs.

Each step can be repeated, so an interrupted freeze continues. An attempt that continues the run
adds rows; at its end all steps are frozen into a new file.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import IO, Any

import obstore
from obstore.store import LocalStore, ObjectStore
from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.errors import StepsMissing, StepsUnreadable, StorageUnreachable
from db.files import step_files
from db.files.object_store import PART_BYTES, PARTS_AT_ONCE, delete_file, sha256_of
from db.files.step_files import (
    GROUP_STEPS,
    STEPS,
    SUMMARIES,
    Columns,
    CopiedSteps,
    StepFile,
    StepFiles,
    check_has_steps,
)
from db.files.storage import is_backup_running, is_recent
from db.runs.trash import DAY_SECONDS
from db.sweeps.sweeps import OPEN
from db.tables import (
    ENDED,
    FLAGGED,
    NOT_DELETED,
    FrozenSteps,
    Run,
    RunNode,
    Step,
    StepBucket,
    Trial,
)
from db.telemetry import frozen_steps, pyramid
from db.telemetry.frozen_steps import END, LATEST_ROWS
from db.telemetry.pyramid import SIZES, packed_lowest
from db.telemetry.series import SPARKLINE_POINTS, evenly_spaced
from halfstep.telemetry.flags import NONFINITE_LOSS, NOT_STEPPED, SKIPPED

#: Shorter runs stay in the database: a file of their own would save little.
LEAST_STEPS = 2_000
#: Rows per transaction: SQLite has one writer, and other writers must not wait long.
BATCH_ROWS = 5_000
#: What a freeze needs on the disk of the data folder: temporary file and stored file, and a reserve
#: for everything else.
MOST_STEP_BYTES, RESERVED_BYTES = 2 * 40, 2**27


class Stopped(Exception):
    """The freeze was stopped before its end."""


@dataclass(frozen=True)
class _State:
    """What must not change between reading the steps of a run and publishing their file."""

    attempt: int
    revision: int
    key: str | None  # of the file that the run has so far

    @classmethod
    def of(cls, run: Run, row: FrozenSteps | None) -> "_State | None":
        """Return the state of a run, or None if its steps must not be frozen."""
        if run.status not in ENDED or run.deleted_at is not None:
            return None
        return cls(run.attempt, run.revision, row.key if row else None)


def due(session: Session, days: float, *, most: int, after: int = 0) -> list[int]:
    """Return runs whose steps are to be frozen: ended for so many days, and long.

    A watched run may have ended long before it was uploaded. after: only runs after this one.
    """
    before = now() - days * DAY_SECONDS
    is_frozen = (FrozenSteps.attempt == Run.attempt) & FrozenSteps.is_settled
    in_open_trial = exists().where(Trial.run_id == Run.id, Trial.state == OPEN)
    query = select(Run.id).outerjoin(FrozenSteps, FrozenSteps.run_id == Run.id)
    query = query.where(
        NOT_DELETED,
        Run.id > after,
        Run.status.in_(ENDED),
        Run.ended_at <= before,
        or_(Run.last_report_at.is_(None), Run.last_report_at <= before),
        # It has no more steps than either: numbers may have gaps, and steps are recorded again.
        Run.step - func.coalesce(Run.parent_step, 0) >= LEAST_STEPS,
        Run.recorded_steps >= LEAST_STEPS,
        or_(FrozenSteps.id.is_(None), ~is_frozen),
        ~in_open_trial,
    )
    return list(session.scalars(query.order_by(Run.id).limit(most)))


def freeze(
    database: Database, store: ObjectStore, run_id: int, *, folder: Path, stopping: Event
) -> None:
    """Freeze the steps of a run, or continue an interrupted freeze.

    folder: for the temporary file.  Nothing happens if the run is active, deleted or without steps.
    Another call is needed if it has changed meanwhile, or for the file before this one, after
    ORPHAN_SECONDS. Raises Stopped, StepsMissing, StorageUnreachable, or the error of the store;
    then nothing has changed for readers.
    """
    with database.reading() as session:
        run, row = session.get_one(Run, run_id), _row(session, run_id)
        state = _State.of(run, row)
    if state is None:
        return
    if row is not None and row.attempt == state.attempt:
        check_file(store, row)
    else:
        _check_space(folder, run.recorded_steps)
        stored = _store(database, store, run_id, folder, stopping)
        if stored is None:
            return
        if not _publish(database, run_id, stored, state):
            delete_file(store, stored.file.key)
            return
    key = _delete_rows(database, run_id, stopping)
    if key is not None:
        _delete_previous_file(database, store, run_id, key)


@dataclass(frozen=True)
class _Stored:
    """A verified file in the store."""

    file: StepFile
    sha256: str
    last: int


def _row(session: Session, run_id: int) -> FrozenSteps | None:
    return session.scalar(select(FrozenSteps).where(FrozenSteps.run_id == run_id))


def _groups(database: Database, run_id: int) -> Iterator[Columns]:
    """Yield the steps of a run in row groups, each read in a transaction of its own."""
    first, count = -END, GROUP_STEPS
    while count == GROUP_STEPS:
        with database.reading() as session:
            connection = session.connection()
            frozen = frozen_steps.of_runs(connection, [run_id]).get(run_id)
            columns = frozen_steps.read_columns(
                connection, run_id, frozen, first=first, most=GROUP_STEPS
            )
        count = len(columns["step"])
        if count == GROUP_STEPS:
            columns = _whole_buckets(columns)
        if count:
            yield {**columns, SUMMARIES: packed_lowest(columns)}
            first = int(columns["step"][-1]) + 1


def _paced(groups: Iterator[Columns], stopping: Event) -> Iterator[Columns]:
    """Yield row groups with a pause as long as each took, in which requests get the processor.

    Raises Stopped.
    """
    pause = 0.0
    while not stopping.wait(pause):
        begun = time.monotonic()
        columns = next(groups, None)
        if columns is None:
            return
        yield columns
        pause = time.monotonic() - begun
    raise Stopped


def _whole_buckets(columns: Columns) -> Columns:
    """Return the columns without the last bucket, which may have further steps."""
    bucket = columns["step"] // SIZES[0]
    is_before = bucket < bucket[-1]
    if not is_before.any():  # all steps of a bucket
        return columns
    return {name: values[is_before] for name, values in columns.items()}


def _store(
    database: Database, store: ObjectStore, run_id: int, folder: Path, stopping: Event
) -> _Stored | None:
    """Store the steps of a run as a file under a new key and verify it.

    Returns None if there are no steps. Raises StepsMissing if there are fewer than the summaries
    count, StepsUnreadable if the stored file differs.
    """
    with database.reading() as session:
        has_files = session.scalar(select(FrozenSteps.id).limit(1)) is not None
    if has_files:  # or this file would be the only one of a store that hides the others
        check_has_steps(store)
    last = 0

    def groups() -> Iterator[Columns]:
        nonlocal last
        for columns in _paced(_groups(database, run_id), stopping):
            last = int(columns["step"][-1])
            yield columns

    with TemporaryFile(dir=folder) as file:
        written = step_files.write(file, groups)
        if not written:
            return None
        _check_complete(database, run_id, sum(steps for steps, _ in written))
        sha256, footer_sha256 = step_files.sha256_of_whole_and_footer(file)
        # Random: a file that `halfstep storage check --mend` deletes never gets a row.
        key = f"{STEPS}/{run_id}/{secrets.token_hex(8)}.parquet"
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        obstore.put(store, key, file, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
    stored = StepFile(key, size_bytes, footer_sha256)
    try:
        _sync(store, key)
        stored_groups = StepFiles(lambda: store).groups(stored)
        read = [step_files.digest(group) for group in _paced(stored_groups, stopping)]
        if read != written or sha256_of(store, key) != sha256:
            raise StepsUnreadable.of(key, "it does not contain the steps that were written")
    except BaseException:
        delete_file(store, key)
        raise
    return _Stored(stored, sha256, last)


def _check_complete(database: Database, run_id: int, steps: int) -> None:
    """Check that no steps are missing: a file with the rest would replace that which has them.

    `halfstep storage check --mend` may have deleted the record of a file.
    """
    with database.reading() as session:
        expected = pyramid.count_steps(session.connection(), run_id)
    if steps < expected:
        raise StepsMissing.of(steps, expected)


def check_file(store: ObjectStore, row: FrozenSteps, copy: IO[bytes] | None = None) -> None:
    """Check that the file of a run is intact.

    The storage may have been changed or restored since. copy: receives the content. Raises
    StepsUnreadable, StorageUnreachable.
    """
    try:
        is_intact = sha256_of(store, row.key, copy) == row.sha256
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise StorageUnreachable from error
        check_has_steps(store)
        raise StepsUnreadable.of(row.key, "the file is missing") from error
    except obstore.exceptions.BaseError as error:
        raise StorageUnreachable from error
    if not is_intact:
        raise StepsUnreadable.of(row.key, "its SHA-256 differs from the recorded one")


def copied_steps(database: Database, store: ObjectStore, run_id: int, copy: IO[bytes]) -> StepFiles:
    """Copy the file of a run; return a reader of the copy, for a transaction that reads it all.

    Raises StepsUnreadable, StorageUnreachable.
    """
    with database.reading() as session:
        row = _row(session, run_id)
    if row is not None:
        check_file(store, row, copy)
        copy.flush()
    return CopiedSteps(copy)


def _check_space(folder: Path, steps: int) -> None:
    """Check that a freeze would not fill the disk, on which live runs are recorded. Raises OSError.

    The temporary file and the stored one may both be on it.
    """
    needed, free = RESERVED_BYTES + MOST_STEP_BYTES * steps, shutil.disk_usage(folder).free
    if free < needed:
        text = f"{folder} has {free:,} bytes free, needed are {needed:,}"
        raise OSError(errno.ENOSPC, text)


def _sync(store: ObjectStore, key: str) -> None:
    """Write a file of a folder to its disk; a bucket has done so."""
    if isinstance(store, LocalStore):
        path = Path(str(store.prefix), key)
        for each in (
            path,
            *list(path.parents)[:3],
        ):  # folders: of the run, of all steps, of the store
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _publish(database: Database, run_id: int, stored: _Stored, state: _State) -> bool:
    """Record a file, unless the run has changed since its steps were read."""
    with database.writing() as session:
        run = session.get_one(Run, run_id, with_for_update=True)
        row = _row(session, run_id)
        if _State.of(run, row) != state:
            return False
        row = row or FrozenSteps(run_id=run_id, size_bytes=0, path=None)
        row.previous_key = row.key
        row.key, row.size_bytes, row.sha256 = stored.file.key, stored.file.size_bytes, stored.sha256
        row.footer_sha256 = stored.file.footer_sha256
        row.step, row.attempt, row.is_settled = stored.last, run.attempt, False
        session.add(row)
        return True


def _delete_rows(database: Database, run_id: int, stopping: Event) -> str | None:
    """Delete the rows whose steps the file has, in batches, with a pause as long as each took.

    Returns the key of the file, or None if the run continues meanwhile.
    """
    first: int | None = -END
    key: str | None = None
    # Once, without a lock: of a diverged run it reads many rows. Further attempts end the loop.
    with database.reading() as session:
        retained = _retained(session, session.get_one(Run, run_id))
    while first is not None:
        begun = time.monotonic()
        with database.writing() as session:
            run = session.get_one(Run, run_id, with_for_update=True)
            row = _row(session, run_id)
            if _State.of(run, row) is None or row is None or row.attempt != run.attempt:
                return None
            key = row.key
            first = _delete_batch(session, row, first, retained)
        if first is not None and stopping.wait(time.monotonic() - begun):
            raise Stopped
    return key


def _delete_batch(
    session: Session, row: FrozenSteps, first: int, retained: Collection[int]
) -> int | None:
    """Delete the rows of a batch from a step on; return the first step of the next batch."""
    mine = (Step.run_id == row.run_id, Step.step >= first, Step.step <= row.step)
    further = select(Step.step).where(*mine).order_by(Step.step).offset(BATCH_ROWS).limit(1)
    following = session.scalar(further)
    latest = session.scalar(
        select(Step.step)
        .where(Step.run_id == row.run_id, Step.step <= row.step)
        .order_by(Step.step.desc())
        .offset(LATEST_ROWS - 1)
        .limit(1)
    )
    if latest is None:
        return None
    # One upper limit: of several SQLite may search by the largest, and read all later rows.
    end = min(row.step if following is None else following - 1, row.step - LATEST_ROWS, latest - 1)
    is_plain = Step.flags.op("&")(SKIPPED | NONFINITE_LOSS | NOT_STEPPED) == 0
    session.connection().execute(
        delete(Step).where(
            Step.run_id == row.run_id,
            Step.step.between(first, end),
            is_plain,
            Step.step.not_in([step for step in retained if first <= step <= end]),
        )
    )
    size = SIZES[0]
    buckets = StepBucket.bucket.between(first // size, (end + 1) // size - 1)
    its = (StepBucket.run_id == row.run_id, StepBucket.size == size)
    session.connection().execute(delete(StepBucket).where(*its, buckets))
    return following


def _retained(session: Session, run: Run) -> set[int]:
    """Return steps that stay rows, in addition to the latest and the flagged ones.

    These are read by queries of many runs, or next to a flagged step.
    """

    def step_of(query: Any) -> int | None:
        found: int | None = session.scalar(query.where(Step.run_id == run.id))
        return found

    is_finite = Step.flags.op("&")(NONFINITE_LOSS) == 0
    steps = [
        step_of(select(func.min(Step.step))),
        step_of(select(Step.step).where(is_finite).order_by(Step.step.desc()).limit(1)),
    ]
    nonfinite = step_of(
        select(func.min(Step.step))
        .with_hint(Step, "INDEXED BY ix_steps_nonfinite", "sqlite")
        .where(FLAGGED["nonfinite"])
    )
    steps += [] if nonfinite is None else [nonfinite - 1]
    resumed = select(RunNode.resumed_step).where(RunNode.run_id == run.id)
    for step in session.scalars(resumed):
        steps += [] if step is None else [step, step + 1]
    return {step for step in steps if step is not None} | {*evenly_spaced(run, SPARKLINE_POINTS)}


def _delete_previous_file(database: Database, store: ObjectStore, run_id: int, key: str) -> None:
    """Delete the file before this one, unless this was stored recently or a backup runs.

    A backup copies files after it has read their rows, and a request reads one likewise. No other
    file is deleted: another database may have recorded it.
    """
    with database.reading() as session:
        row, is_needed = _row(session, run_id), is_backup_running(session)
    if row is None or row.key != key:
        return
    if row.previous_key is not None:
        # A backup that begins only now reads the row as it is.
        if is_needed or is_recent(obstore.head(store, key)):
            return
        delete_file(store, row.previous_key)
    with database.writing() as session:
        its = (FrozenSteps.run_id == run_id, FrozenSteps.key == key)
        session.execute(update(FrozenSteps).where(*its).values(is_settled=True, previous_key=None))
