"""Steps of runs in their files: what readers of steps use, wherever the steps of a run are.

A run that has ended has its steps in a file, which `db.telemetry.freeze` writes; some of them are
also rows. A later attempt adds rows, which take precedence.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, func, select, update
from sqlalchemy.orm import Session

from db.database import Database
from db.errors import StepsUnreadable
from db.files.step_files import (
    NAMES,
    WHOLE,
    Columns,
    ReadAhead,
    StepFile,
    StepFiles,
    StepRange,
    StepsNotRead,
)
from db.tables import FrozenSteps, Step
from db.telemetry import bulk_writes
from halfstep.telemetry.flags import UNKNOWN_LOSS, UNKNOWN_NORM

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: More than any step.
END = 2**62
#: The latest steps of a file that count are also rows, and so are the buckets of the pyramid that
#: contain one of them: what adds steps reads no file. `db.health.input_bound` reads as many.
LATEST_ROWS = 100


class StepRow(NamedTuple):
    """A step in the columns of the table. NaN is None."""

    step: int
    elapsed_ms: int
    step_us: int
    loss: float | None
    scale: float | None
    grad_norm: float | None
    grad_norm_clipped: float | None  # that of grad_norm where the clip changed nothing
    lr: float | None
    flags: int
    data_us: int | None

    def with_nan(self) -> "StepRow":
        """Return the step with NaN as NaN; None is then unknown.

        Rows of logged numbers by earlier versions have neither a flag nor a learning rate.
        """
        row = self
        if row.loss is None and not row.flags & UNKNOWN_LOSS:
            row = row._replace(loss=math.nan)
        is_known = not row.flags & UNKNOWN_NORM and row.lr is not None
        if row.grad_norm is None and is_known:
            row = row._replace(grad_norm=math.nan)
        if row.grad_norm_clipped is None and is_known:
            row = row._replace(grad_norm_clipped=math.nan)
        return row


@dataclass(frozen=True)
class Frozen:
    """The steps of a run in its file, except for the latest ones, which are rows.

    last: the last step of the file that counts.
    """

    files: StepFiles | ReadAhead
    file: StepFile
    last: int

    @property
    def end(self) -> int:
        """The last step for which the file is needed: all later ones that count are rows."""
        return self.last - LATEST_ROWS

    def read(self, ranges: Collection[StepRange], names: Collection[str] = NAMES) -> Columns:
        """Read columns of ranges of steps."""
        return self.files.read(self.file, self._clipped(ranges), names)

    def summaries(self, ranges: Collection[StepRange]) -> tuple[NDArray[np.int64], list[bytes]]:
        """Return the first step and the packed summary of each bucket within ranges of steps."""
        return self.files.summaries(self.file, self._clipped(ranges))

    def read_ahead(
        self,
        steps: Collection[StepRange],
        names: Collection[str],
        summaries: Collection[StepRange],
    ) -> None:
        """Read at once what `read` and `summaries` of these ranges need, instead of one by one."""
        self.files.read_ahead(self.file, self._clipped(steps), names, self._clipped(summaries))

    def read_next(self, span: StepRange, most: int) -> Columns:
        """Read all columns of the first `most` steps of a range."""
        return self.files.read_next(self.file, (span[0], min(span[1], self.end)), most)

    def ends(self, span: StepRange) -> StepRange | None:
        """Return the first and last step within a range, or None if there are none."""
        return self.files.ends(self.file, (span[0], min(span[1], self.end)))

    def _clipped(self, ranges: Collection[StepRange]) -> list[StepRange]:
        return [(first, min(last, self.end)) for first, last in ranges if first <= self.end]


#: Columns that a query of runs joins, see `loaded`.
FILE_COLUMNS = (
    *(FrozenSteps.key, FrozenSteps.size_bytes, FrozenSteps.footer_sha256),
    FrozenSteps.step,
)


def loaded(connection: Connection, columns: Sequence[Any]) -> Frozen | None:
    """Return the steps in the file of a run from FILE_COLUMNS, or None if it has none."""
    *file, last = columns
    if file[0] is None:
        return None
    files: StepFiles | ReadAhead | None = connection.get_execution_options().get("step_files")
    if files is None:
        raise StepsUnreadable.of(file[0], "this program has not opened the store")
    return Frozen(files, StepFile(*file), last)


def of_runs(connection: Connection, run_ids: Collection[int]) -> dict[int, Frozen]:
    """Return the steps in files of those of the runs that have a file."""
    if not run_ids:
        return {}
    rows = connection.execute(_files_query(), {"run_ids": list(run_ids)})
    found = {run_id: loaded(connection, columns) for run_id, *columns in rows}
    return {run_id: frozen for run_id, frozen in found.items() if frozen is not None}


@cache
def _files_query() -> Any:
    query = select(FrozenSteps.run_id, *FILE_COLUMNS)
    return query.where(FrozenSteps.run_id.in_(bindparam("run_ids", expanding=True)))


def run_ids(session: Session) -> Sequence[int]:
    """Return the ids of the runs that are frozen, in order."""
    return session.scalars(select(FrozenSteps.run_id).order_by(FrozenSteps.run_id)).all()


def usage(session: Session) -> tuple[int, int]:
    """Return the number of runs with frozen steps, and the size of their files."""
    total = func.coalesce(func.sum(FrozenSteps.size_bytes), 0)
    count, size_bytes = session.execute(select(func.count(FrozenSteps.id), total)).one()
    return count, int(size_bytes)


def last_row_and_file(connection: Connection, run_id: int) -> tuple[int | None, Frozen | None]:
    """Return the last step of a run that is a row, and the steps in its file."""
    last, *columns = connection.execute(_last_query(), {"run_id": run_id}).one()
    return last, loaded(connection, columns)


@cache
def _last_query() -> Any:
    of_run = Step.__table__.c.run_id == bindparam("run_id")
    last = select(func.max(Step.__table__.c.step).label("last")).where(of_run).subquery()
    has_file = FrozenSteps.run_id == bindparam("run_id")
    return select(last.c.last, *FILE_COLUMNS).outerjoin_from(last, FrozenSteps, has_file)


def read_rows(
    session: Session, run_id: int, *, first: int, last: int | None = None, most: int
) -> list[StepRow]:
    """Return the first `most` steps from first to last, in order."""
    connection, span = session.connection(), (first, END if last is None else last)
    given = {"run_id": run_id, "first": span[0], "last": span[1], "most": most}
    # Rows first: outside of a snapshot, they may be deleted once the file is published.
    rows = list(map(StepRow._make, connection.execute(_rows_query(), given).cursor.fetchall()))
    if _are_complete(rows, first, last, most):
        return rows
    frozen = of_runs(connection, [run_id]).get(run_id)
    return rows if frozen is None else _joined(rows, frozen.read_next(span, most))[:most]


def _are_complete(rows: list[StepRow], first: int, last: int | None, most: int) -> bool:
    """Return whether a file has no further steps for a query of rows, whatever its steps are."""
    if not rows:
        return last is None  # the last step of a file is a row
    latest = rows[-1].step
    has_gaps = latest - first + 1 > len(rows)
    return not has_gaps and (last in (None, latest) or len(rows) == most)


def rows_at(session: Session, run_id: int, steps: Collection[int]) -> list[StepRow]:
    """Return those of some steps that exist, in order."""
    connection = session.connection()
    given = {"run_id": run_id, "steps": list(steps)}
    rows = list(map(StepRow._make, connection.execute(_rows_at_query(), given).cursor.fetchall()))
    frozen = of_runs(connection, [run_id]).get(run_id)
    missing = set(steps) - {row.step for row in rows}
    if frozen is None or not missing:
        return rows
    return _joined(rows, frozen.read([(step, step) for step in sorted(missing)]))


def read_columns(
    connection: Connection, run_id: int, frozen: Frozen | None, *, first: int, most: int
) -> Columns:
    """Return the first `most` steps from a step on, as a file has them."""
    given = {"run_id": run_id, "first": first, "last": END, "most": most}
    rows = connection.execute(_stored_query(), given).cursor.fetchall()
    columns = list(zip(*rows, strict=True)) or [()] * len(NAMES)
    stored = {
        name: np.array(column, np.int64 if name in WHOLE else np.float64)
        for name, column in zip(NAMES, columns, strict=True)
    }
    if frozen is None:
        return stored
    others = frozen.read_next((first, END), most)
    is_other = ~np.isin(others["step"], stored["step"])
    joined = {name: np.concatenate([stored[name], others[name][is_other]]) for name in NAMES}
    order = np.argsort(joined["step"], kind="stable")[:most]
    return {name: values[order] for name, values in joined.items()}


def applied_norm(columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return grad_norm_clipped with grad_norm where the clip changed nothing."""
    clipped = columns["grad_norm_clipped"]
    return np.where(np.isnan(clipped), columns["grad_norm"], clipped)


def write(
    database: Database,
    change: Callable[[Session], T],
    *,
    wait: Callable[[Callable[[], None]], None] = lambda read: read(),
) -> T:
    """Make a change in a transaction that may need steps of a file, but never waits for the store.

    What it needs is read while no transaction is open, then it begins again; so `change` may be
    called several times.  wait: calls a function that may wait for the store. Raises
    StorageUnreachable.
    """
    files: StepFiles | None = database.engine.get_execution_options().get("step_files")
    reader = files and ReadAhead(files)
    while True:
        try:
            with database.writing() as session:
                session.connection(execution_options={"step_files": reader})
                return change(session)
        except StepsNotRead as error:
            fetch = error.fetch
        wait(fetch)


def truncate(connection: Connection, run_id: int, *, after: int) -> None:
    """Let no steps of a run's file count that are after a step.

    The latest ones that count become rows again: other queries read them. Of a file that is missing
    or damaged they are lost: the attempt that continues the run is recorded nevertheless.
    """
    frozen = of_runs(connection, [run_id]).get(run_id)
    if frozen is None or frozen.last <= after:
        return
    first = connection.scalar(select(func.min(Step.step)).where(Step.run_id == run_id))
    last = after if first is not None and first <= after else -END  # a file's first step is a row
    if last == after:
        try:
            _restore_rows(connection, run_id, frozen, after)
        except StepsUnreadable as error:
            logger.warning("run %d continues without its steps before %d: %s", run_id, after, error)
    connection.execute(update(FrozenSteps).where(FrozenSteps.run_id == run_id).values(step=last))


def _restore_rows(connection: Connection, run_id: int, frozen: Frozen, last: int) -> None:
    """Make the latest steps of a file up to a step rows again."""
    span = (-END, min(last, frozen.end))
    add_missing(connection, run_id, frozen.files.read_last(frozen.file, span, LATEST_ROWS))


def add_missing(connection: Connection, run_id: int, columns: Columns) -> None:
    """Write those of some steps of a file that are not rows."""
    if not len(columns["step"]):
        return
    first, last = int(columns["step"][0]), int(columns["step"][-1])
    rows = select(Step.step).where(Step.run_id == run_id, Step.step.between(first, last))
    is_missing = ~np.isin(columns["step"], connection.scalars(rows).all())
    if is_missing.any():
        missing: dict[str, bulk_writes.Column] = {
            name: values[is_missing] for name, values in columns.items()
        }
        bulk_writes.replace(connection, Step.__table__, {"run_id": run_id}, missing)


def _joined(rows: list[StepRow], columns: Columns) -> list[StepRow]:
    """Return rows and the steps of a file in order; rows take precedence."""
    known = {row.step for row in rows}
    columns = columns | {"grad_norm_clipped": applied_norm(columns)}
    values = (_listed(name, columns[name]) for name in StepRow._fields)
    others = (StepRow(*row) for row in zip(*values, strict=True))
    return sorted([*rows, *(row for row in others if row.step not in known)])


def _listed(name: str, values: NDArray[Any]) -> list[Any]:
    listed: list[Any] = values.tolist()
    if name in WHOLE:
        return listed
    convert = int if name == "data_us" else float
    return [None if value != value else convert(value) for value in listed]


def _of_run() -> Any:
    table = Step.__table__.c
    columns: list[Any] = [table[name] for name in StepRow._fields]
    at = StepRow._fields.index("grad_norm_clipped")
    columns[at] = func.coalesce(table.grad_norm_clipped, table.grad_norm)
    return select(*columns).where(table.run_id == bindparam("run_id")).order_by(table.step)


@cache
def _rows_query() -> Any:
    return _first_rows(_of_run())


@cache
def _stored_query() -> Any:
    return _first_rows(_of_run().with_only_columns(*(Step.__table__.c[name] for name in NAMES)))


@cache
def _rows_at_query() -> Any:
    return _of_run().where(Step.__table__.c.step.in_(bindparam("steps", expanding=True)))


def _first_rows(query: Any) -> Any:
    is_within = Step.__table__.c.step.between(bindparam("first"), bindparam("last"))
    return query.where(is_within).limit(bindparam("most"))
