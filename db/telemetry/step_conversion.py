"""Conversion of the steps and metrics that earlier versions recorded into blocks, run by run.

1. The steps of a run, rows and those of its Parquet file, are copied into blocks, a part in each
   transaction. No one reads or writes steps of the run meanwhile: `StepsNotConverted`.
2. All are read again and compared with the blocks. From then on the blocks are read.
3. The same is done with its metrics, see `db.telemetry.metric_conversion`.
4. The rows are deleted in batches, except those of flagged steps, and then the file.

Each part can be repeated, so an interrupted conversion continues. What records steps converts their
run first (`write`); a server converts the others in the background.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import monotonic
from typing import TypeVar

import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, exists, or_, select
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.errors import StepsMissing, StepsNotConverted, StepsUnreadable
from db.files import step_files
from db.files.step_files import StepFile, copy_steps
from db.files.storage import is_backup_running
from db.tables import (
    ACTIVE,
    FrozenSteps,
    Metric,
    Run,
    RunNode,
    Step,
    StepBlock,
    StepBucket,
    StepConversion,
)
from db.telemetry import block_codec, loss_curves, metric_conversion, step_block_writer, step_blocks
from db.telemetry.block_codec import NAMES, WHOLE, Columns
from db.telemetry.pyramid import END, SIZES, STEP_SERIES
from db.telemetry.summaries import unpack

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Steps of a transaction: SQLite has one writer, and other writers must not wait long.
BATCH_STEPS = 16_384
#: The latest steps of a file that count are also rows.
LATEST_ROWS = 100


class Stopped(Exception):
    """The conversion was stopped before its end."""


class _Changed(Exception):
    """Another process converts the run, or has erased it."""


@dataclass(frozen=True)
class _Recorded:
    """The steps of a run in the form of earlier versions; a row takes precedence over the file."""

    run_id: int
    file: StepFile | None
    end: int  # the last step for which the file is read
    lost: bool  # a row group of the file may be damaged
    is_own: bool  # no one else records the run

    def parts(self) -> Iterator[tuple[int, int, Columns]]:
        """Yield ranges that contain all steps: first, last, and the steps that the file has."""
        first = -END
        if self.file is not None:
            for group, (_, last) in enumerate(self._spans(self.file)):
                columns = self._group(self.file, group)
                yield first, last, block_codec.chosen(columns, columns["step"] <= self.end)
                first = last + 1
        yield first, END, block_codec.empty()

    def batches(self, read: Callable[[int, int], Columns]) -> Iterator[Columns]:
        """Yield all steps in order, at most BATCH_STEPS at a time.

        read: returns the first so many rows of a range.
        """
        for start, last, others in self.parts():
            first = start
            while True:
                rows = read(first, last)
                is_other = (others["step"] >= first) & ~np.isin(others["step"], rows["step"])
                columns = block_codec.join([rows, block_codec.chosen(others, is_other)])
                order = np.argsort(columns["step"], kind="stable")[:BATCH_STEPS]
                if not len(order):
                    break
                yield block_codec.chosen(columns, order)
                first = int(columns["step"][order[-1]]) + 1

    def _spans(self, file: StepFile) -> list[tuple[int, int]]:
        try:
            return file.spans()
        except StepsUnreadable as error:
            self._forgive(error)
            return []

    def _group(self, file: StepFile, group: int) -> Columns:
        try:
            return file.read(group)
        except StepsUnreadable as error:
            self._forgive(error)
            return block_codec.empty()

    def _forgive(self, error: StepsUnreadable) -> None:
        if not self.lost:
            raise error
        logger.warning("run %d is converted without some steps: %s", self.run_id, error)


def write(
    database: Database,
    change: Callable[[Session], T],
    *,
    wait: Callable[[Callable[[], None]], None] = lambda convert: convert(),
) -> T:
    """Make a change in a transaction; before, convert the run whose steps it needs.

    `change` may be called several times.  wait: calls a function that may take long. Steps of a
    file that is missing or damaged are lost: recording continues nevertheless. Raises
    StorageUnreachable.
    """
    while True:
        try:
            with database.writing() as session:
                return change(session)
        except StepsNotConverted as error:
            run_id = error.run_id
        wait(partial(convert, database, run_id, lost=True, is_own=True))


def note_due(session: Session, *, steps: bool) -> None:
    """Record all runs whose data is not in blocks, as of a backup by an earlier version.

    steps: that of steps as well, not only of metrics.
    """
    if steps:
        rows = exists().where(Step.run_id == Run.id)
        file = exists().where(FrozenSteps.run_id == Run.id)
        for run_id in session.scalars(select(Run.id).where(or_(rows, file))):
            session.add(StepConversion(run_id=run_id))
    for run_id in session.scalars(select(Metric.run_id).distinct()):
        conversion = session.get(StepConversion, run_id)
        if conversion is None:
            conversion = StepConversion(run_id=run_id, is_verified=True)
            session.add(conversion)
        conversion.metrics_wait = True
    session.flush()


def unread(session: Session) -> list[int]:
    """Return the runs whose steps are not in blocks yet."""
    return list(session.scalars(select(StepConversion.run_id).where(~StepConversion.is_verified)))


def due(session: Session) -> list[int]:
    """Return the runs to convert, the newest first."""
    query = select(StepConversion.run_id).join(Run, Run.id == StepConversion.run_id)
    query = query.where(~Run.erasing, ~_is_recorded_elsewhere())
    return list(session.scalars(query.order_by(Run.id.desc())))


def _is_recorded_elsewhere() -> ColumnElement[bool]:
    """Return the condition that a process of an earlier version may still record rows.

    Its lease has not expired: a supervisor ends its training before.
    """
    is_same = (StepConversion.attempt.is_not(None)) & (StepConversion.attempt == Run.attempt)
    is_of_attempt = (RunNode.run_id == Run.id) & (RunNode.attempt == Run.attempt)
    has_lease = exists().where(is_of_attempt, RunNode.lease_expires_at > now())
    return is_same & Run.status.in_(ACTIVE) & has_lease


def convert(
    database: Database,
    run_id: int,
    *,
    lost: bool = False,
    is_own: bool = False,
    stopping: Event | None = None,
) -> None:
    """Convert the steps of a run, or continue that.

    lost: steps of a file that is missing or damaged are left out.  is_own: the caller records the
    run; others do nothing while a process of an earlier version may. Raises StepsUnreadable,
    StepsMissing if there are fewer steps than the summaries count, StorageUnreachable, Stopped.
    """
    stopping = stopping or Event()
    open_store = database.open_store
    with database.reading() as session:
        conversion = session.get(StepConversion, run_id)
        row = session.scalar(select(FrozenSteps).where(FrozenSteps.run_id == run_id))
        is_due = is_own or run_id in due(session)
    if conversion is None or not is_due:
        return
    try:
        if not conversion.is_verified:
            with ExitStack() as stack:
                file, end = None, -END
                if row is not None:
                    file = stack.enter_context(copy_steps(open_store, row, lost=lost))
                    end = row.step - LATEST_ROWS
                recorded = _Recorded(run_id, file, end, lost, is_own)
                _copy(database, recorded, stopping)
                _verify(database, recorded, stopping)
        if conversion.metrics_wait:
            _convert_metrics(database, run_id, stopping, is_own=is_own)
        _delete_rows(database, run_id, stopping)
        metric_conversion.delete_rows(database, run_id, partial(_pause, stopping))
        _finish(database, run_id, row)
    except _Changed:
        return


def _copy(database: Database, recorded: _Recorded, stopping: Event) -> None:
    run_id = recorded.run_id
    with database.writing() as session:
        conversion = _lock(session, run_id, is_own=recorded.is_own)
        if conversion.steps is None:
            conversion.steps = _count(session.connection(), run_id)
        last = step_blocks.last_step(session.connection(), run_id)
    for batch in recorded.batches(partial(_read_rows, database, run_id)):
        columns = batch
        if last is not None:  # an interrupted conversion continues
            columns = block_codec.chosen(batch, batch["step"] > last)
        if not len(columns["step"]):
            continue
        begun = monotonic()
        points = np.zeros(len(columns["step"]), loss_curves.POINT)
        points["step"], points["loss"] = columns["step"], columns["loss"]
        with database.writing() as session:
            _lock(session, run_id, is_own=recorded.is_own)
            connection = session.connection()
            if step_blocks.last_step(connection, run_id) != last:
                raise _Changed
            step_block_writer.append_converted(connection, run_id, columns)
            loss_curves.add_points(connection, run_id, points)
        last = int(columns["step"][-1])
        _pause(stopping, begun)


def _verify(database: Database, recorded: _Recorded, stopping: Event) -> None:
    """Compare the blocks of a run with what they were made of, and let them be read."""
    run_id, steps, is_equal = recorded.run_id, 0, True
    for columns in recorded.batches(partial(_read_rows, database, run_id)):
        begun = monotonic()
        with database.reading() as session:
            span = (int(columns["step"][0]), int(columns["step"][-1]))
            copied_steps = step_blocks.read_converted(session.connection(), run_id, *span)
        is_equal = is_equal and block_codec.are_equal(columns, copied_steps)
        steps += len(columns["step"])
        _pause(stopping, begun)
    problem: StepsMissing | None = None
    with database.writing() as session:
        conversion = _lock(session, run_id, is_own=recorded.is_own)
        connection, expected = session.connection(), conversion.steps or 0
        if not is_equal or steps != step_blocks.count(connection, run_id):
            session.execute(delete(StepBlock).where(StepBlock.run_id == run_id))
            loss_curves.truncate(connection, run_id, after=-END)
            text = f"The blocks of run {run_id} differ from its steps, which stay as they are."
            problem = StepsMissing(text)
        # Without a file nothing can be restored; larger summaries count steps of a lost one too.
        elif steps < expected and recorded.file is not None and not recorded.lost:
            problem = StepsMissing.of(steps, expected)
        else:
            conversion.is_verified = True
            step_block_writer.take_over_buckets(connection, run_id, lost=steps < expected)
            run = session.get_one(Run, run_id)
            run.revision += 1
            if steps:
                run.last_elapsed_ms, run.lost_since = step_blocks.end_of(connection, run_id)
    if problem is not None:
        raise problem


def _delete_rows(database: Database, run_id: int, stopping: Event) -> None:
    """Delete the rows of steps that are not flagged, in batches."""
    first = -END
    is_plain = Step.flags.op("&")(step_blocks.FLAGS) == 0
    while True:
        begun = monotonic()
        with database.writing() as session:
            its = (Step.run_id == run_id, Step.step >= first)
            query = select(Step.step).where(*its).order_by(Step.step)
            last = session.scalar(query.offset(BATCH_STEPS).limit(1))
            span = Step.step.between(first, END if last is None else last)
            session.execute(delete(Step).where(Step.run_id == run_id, span, is_plain))
        if last is None:
            return
        first = last + 1
        _pause(stopping, begun)


def _finish(database: Database, run_id: int, row: FrozenSteps | None) -> None:
    """Delete the record of a conversion and of the file, then the file.

    A backup may still copy a file whose row it has read; `storage check` lists what stays.
    """
    with database.writing() as session:
        session.execute(delete(StepConversion).where(StepConversion.run_id == run_id))
        session.execute(delete(FrozenSteps).where(FrozenSteps.run_id == run_id))
        is_needed = is_backup_running(session)
    if row is not None and database.open_store is not None and not is_needed:
        step_files.delete(database.open_store, [key for key in (row.key, row.previous_key) if key])


def _convert_metrics(database: Database, run_id: int, stopping: Event, *, is_own: bool) -> None:
    def lock(session: Session) -> Run:
        _lock(session, run_id, is_own=is_own, of_metrics=True)
        return session.get_one(Run, run_id)

    pause = partial(_pause, stopping)
    metric_conversion.copy(database, run_id, lock, _Changed(), pause)
    is_equal = metric_conversion.verify(database, run_id, pause)
    with database.writing() as session:
        run = lock(session)
        if is_equal:
            session.get_one(StepConversion, run_id).metrics_wait = False
            run.revision += 1
        else:
            metric_conversion.delete_blocks(session, run_id)
    if not is_equal:
        message = f"The blocks of metrics of run {run_id} differ from its points, which stay."
        raise StepsMissing(message)


def _lock(
    session: Session, run_id: int, *, is_own: bool, of_metrics: bool = False
) -> StepConversion:
    """Lock a run that is to be converted. Raises _Changed."""
    run = session.get(Run, run_id, with_for_update=True, populate_existing=True)
    conversion = session.get(StepConversion, run_id, populate_existing=True)
    if run is None or run.erasing or conversion is None:
        raise _Changed
    if not conversion.metrics_wait if of_metrics else conversion.is_verified:
        raise _Changed
    if not is_own:
        query = select(Run.id).join(StepConversion, StepConversion.run_id == Run.id)
        query = query.where(Run.id == run.id, _is_recorded_elsewhere())
        if session.scalar(query) is not None:
            raise _Changed
    return conversion


def _pause(stopping: Event, begun: float) -> None:
    """Leave other writers as much time as a batch took. Raises Stopped."""
    if stopping.wait(monotonic() - begun):
        raise Stopped


def _count(connection: Connection, run_id: int) -> int:
    """Count the steps of a run by the summaries of an earlier version."""
    query = select(StepBucket.summary).where(
        StepBucket.run_id == run_id, StepBucket.size == SIZES[-1]
    )
    packed = list(connection.scalars(query))
    start = np.zeros(len(packed), np.int64)
    return int(unpack(start, packed, STEP_SERIES, SIZES[-1]).steps.sum())


def _read_rows(database: Database, run_id: int, first: int, last: int) -> Columns:
    """Return the first BATCH_STEPS rows of a range of steps."""
    table = Step.__table__
    query = select(*(table.c[name] for name in NAMES)).where(
        table.c.run_id == run_id, table.c.step.between(first, last)
    )
    with database.reading() as session:
        ordered = query.order_by(table.c.step).limit(BATCH_STEPS)
        rows = session.connection().execute(ordered).cursor.fetchall()
    columns: list[object] = list(zip(*rows, strict=True)) or [()] * len(NAMES)
    return {
        name: np.array(column, np.int64 if name in WHOLE else np.float64)
        for name, column in zip(NAMES, columns, strict=True)
    }
