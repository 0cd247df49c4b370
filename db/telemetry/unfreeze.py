"""Unfreeze: the steps of a frozen run become rows again.

The steps of the file are written as rows in batches, then the record of the file is deleted. The
file stays, as a request or a backup may still read it: `halfstep storage check` lists it. All
steps are readable at any point, and each part can be repeated.
"""

import time
from threading import Event
from typing import NamedTuple

import numpy as np
from obstore.store import ObjectStore
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.database import Database
from db.errors import Conflict, NotFound
from db.files.step_files import SUMMARIES, Columns, StepFile, StepFiles
from db.tables import ENDED, FrozenSteps, Run, Step, StepBucket
from db.telemetry import bulk_writes, frozen_steps
from db.telemetry.freeze import BATCH_ROWS, Stopped, check_file
from db.telemetry.frozen_steps import LATEST_ROWS
from db.telemetry.pyramid import SIZES

#: Attempt of a file whose rows are not to be deleted: a freeze writes another file, or ends.
NO_ATTEMPT = -1


class _Frozen(NamedTuple):
    """What must not change meanwhile."""

    key: str
    attempt: int


def unfreeze(database: Database, store: ObjectStore, run_id: int, *, stopping: Event) -> bool:
    """Move the steps of a run from its file into rows; return False if it has no file.

    A freeze of the run, interrupted or not, deletes no further rows. Raises NotFound, Conflict if
    the run is active or has changed, Stopped, StepsUnreadable, StorageUnreachable.
    """
    with database.reading() as session:
        row = _row(session, run_id)
        if row is None:
            if session.get(Run, run_id) is None:
                raise NotFound(f"There is no run {run_id}.")
            return False
        state = _check(session, row)
    check_file(store, row)
    with database.writing() as session:
        _locked(session, run_id, state).attempt = NO_ATTEMPT
    file = StepFile(row.key, row.size_bytes, row.footer_sha256)
    steps = 0
    for columns in StepFiles(lambda: store).groups(file):
        for first in range(0, len(columns["step"]), BATCH_ROWS):
            batch = {name: values[first : first + BATCH_ROWS] for name, values in columns.items()}
            begun = time.monotonic()
            with database.writing() as session:
                last = _locked(session, run_id, state).step
                _write(session, run_id, batch, last)
            steps += int((batch["step"] <= last).sum())
            if stopping.wait(time.monotonic() - begun):
                raise Stopped
    # Without a lock: the state that is checked below excludes what deletes rows.
    with database.reading() as session:
        its = (Step.run_id == run_id, Step.step <= row.step)
        if (session.scalar(select(func.count()).where(*its)) or 0) < steps:
            raise Conflict(
                f"Some of the {steps:,} steps of run {run_id} are missing in the "
                "database: try again."
            )
    with database.writing() as session:
        row = _locked(session, run_id, state)
        run = session.get_one(Run, run_id)
        run.revision += 1
        run.files_revision = run.revision
        session.delete(row)
    return True


def _row(session: Session, run_id: int) -> FrozenSteps | None:
    return session.scalar(select(FrozenSteps).where(FrozenSteps.run_id == run_id))


def _check(session: Session, row: FrozenSteps) -> _Frozen:
    """Return the state of a run that has ended. Raises Conflict."""
    run = session.get_one(Run, row.run_id)
    if run.status not in ENDED:
        raise Conflict(f"Run {run.id} is {run.status}: unfreeze it when it has ended.")
    return _Frozen(row.key, run.attempt)


def _locked(session: Session, run_id: int, state: _Frozen) -> FrozenSteps:
    """Lock a run and return the record of its file. Raises Conflict if the run has changed."""
    session.get_one(Run, run_id, with_for_update=True)
    row = _row(session, run_id)
    if row is None or _check(session, row) != state:
        raise Conflict(f"Run {run_id} has changed in the meantime: try again.")
    return row


def _write(session: Session, run_id: int, columns: Columns, last: int) -> None:
    """Write steps up to the last that counts, and summaries of buckets that end before it."""
    connection = session.connection()
    counts = columns["step"] <= last
    steps = {name: values[counts] for name, values in columns.items() if name != SUMMARIES}
    frozen_steps.add_missing(connection, run_id, steps)
    size = SIZES[0]
    bucket = columns["step"] // size
    has_one = (columns[SUMMARIES] != b"") & ((bucket + 1) * size - 1 <= last - LATEST_ROWS)
    stored = select(StepBucket.bucket).where(
        StepBucket.run_id == run_id,
        StepBucket.size == size,
        StepBucket.bucket.between(int(bucket[0]), int(bucket[-1])),
    )
    is_missing = has_one & ~np.isin(bucket, connection.scalars(stored).all())
    if is_missing.any():
        summaries: dict[str, bulk_writes.Column] = {
            "size": np.full(int(is_missing.sum()), size),
            "bucket": bucket[is_missing],
            "summary": columns[SUMMARIES][is_missing].tolist(),
        }
        bulk_writes.replace(connection, StepBucket.__table__, {"run_id": run_id}, summaries)
