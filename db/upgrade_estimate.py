"""Estimate of the time and the disk space of an upgrade, measured on a sample of the database.

Some steps and points of its runs are copied into a scratch database, in a file on the same disk or
in a schema of the same server, and migrated and converted there by the code of an upgrade.
"""

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeAlias

import numpy as np
from obstore.store import LocalStore
from sqlalchemy import ColumnElement, Connection, MetaData, event, func, select, text
from sqlalchemy.exc import DBAPIError

from db import database_copy
from db.database import Database
from db.errors import StepsUnreadable, StorageUnreachable
from db.files import step_files
from db.tables import FrozenSteps, LossCurve, MetricBlock, MetricTail, StepBlock, StepConversion
from db.tables.base import OfRun
from db.telemetry import step_conversion

#: Revisions since which files of steps, blocks of steps and blocks of metrics exist.
FILES, STEPS, METRICS = "0044", "0053", "0056"
#: Runs of a sample, and rows of each.
RUNS, ROWS = 8, 8192
SCRATCH = "halfstep_check"
#: A sample of one step and one point, which shows what each run takes.
SINGLE = "single"
BLOCKS: dict[type[OfRun], ColumnElement[int]] = {
    StepBlock: func.length(StepBlock.data) + func.coalesce(func.length(StepBlock.lows), 0),
    LossCurve: func.length(LossCurve.points),
    MetricBlock: func.length(MetricBlock.data) + func.length(MetricBlock.lows),
    MetricTail: func.length(MetricTail.data),
}
#: What the row of a block takes besides: half of the last page of its bytes, and its key.
ROW_BYTES = 2048
#: Columns of unique values, which are nullable.
UNIQUE = ("idempotency_key", "watch_id")
#: Executes a statement, and returns the number of rows.
Execute: TypeAlias = Callable[[str], int]


class NotMeasured(Exception):
    """A scratch database cannot be made."""


@dataclass
class Estimate:
    """Seconds and bytes of an upgrade, and what it converts."""

    copy_seconds: float = 0.0
    migration_seconds: float = 0.0
    conversion_seconds: float = 0.0
    runs: int = 0
    steps: int = 0
    points: int = 0
    copy_bytes: int = 0
    conversion_bytes: int = 0


class _Waiting(NamedTuple):
    """What an upgrade converts."""

    runs: int
    steps: dict[int, int]  # number of steps of each run that are rows
    files: dict[int, int]  # number of steps of each run with a file
    points: int
    points_of: Counter[int]  # runs of some of the points, and how many of each

    def count_by_kind(self) -> dict[str, int]:
        """Return the numbers of steps and points by kind of a sample."""
        steps, files = sum(self.steps.values()), sum(self.files.values())
        return {"steps": steps, "files": files, "metrics": self.points}


class _Sample(NamedTuple):
    """A run of the scratch database, and how many rows of which kind it has."""

    run_id: int
    kind: str  # SINGLE, or a key of _Waiting.count_by_kind
    rows: int
    file: FrozenSteps | None = None


def estimate(database: Database, revision: str, folder: Path, *, is_due: bool) -> Estimate:
    """Estimate an upgrade of a database. Raises NotMeasured.

    revision: of the tables.  folder: for scratch files of PostgreSQL.  is_due: whether migrations
    are.
    """
    with database.reading() as session:
        waiting = _find_waiting(session.connection(), revision)
    numbers, file = waiting.count_by_kind(), database.file
    found = Estimate(
        runs=waiting.runs, steps=numbers["steps"] + numbers["files"], points=waiting.points
    )
    try:
        if is_due and file is not None:
            found.copy_bytes = database_copy.estimate_needed_bytes(file)
            found.copy_seconds = database_copy.estimate_seconds(file)
        if is_due:
            with _open_scratch(database, revision, folder) as scratch:
                found.migration_seconds = _time(scratch.migrate)
        if waiting.runs:
            with _open_scratch(database, revision, folder) as scratch:
                samples = scratch.fill(waiting)
                taken = _time(scratch.migrate)
                if is_due:
                    copied = sum(sample.rows for sample in samples if sample.file is None)
                    rows = max(taken - found.migration_seconds, 0.0) / max(copied, 1)
                    found.migration_seconds += rows * (numbers["steps"] + numbers["metrics"])
                _add_conversion(found, scratch, samples, numbers)
    except (DBAPIError, OSError, StepsUnreadable, StorageUnreachable) as error:
        reason = str(getattr(error, "orig", error)).strip().partition("\n")[0]
        raise NotMeasured(reason) from error
    return found


def measure_free_bytes(database: Database) -> int | None:
    """Return the free space of the disk of a database, None if it may be of another machine."""
    if database.file is not None:
        return shutil.disk_usage(database.file.parent).free
    url = database.engine.url
    host = str(url.host or url.query.get("host", ""))
    if not host.startswith("/") and host not in ("", "localhost", "127.0.0.1", "::1"):
        return None
    try:
        with database.reading() as session:
            folder = session.scalar(text("SHOW data_directory"))
        return shutil.disk_usage(str(folder)).free
    except (DBAPIError, OSError):  # not permitted, or the server is in a container
        return None


def _add_conversion(
    found: Estimate, scratch: "_Scratch", samples: list[_Sample], numbers: dict[str, int]
) -> None:
    """Convert the runs of a sample, and add what all of them take."""
    taken = {sample.run_id: scratch.convert(sample) for sample in samples}
    singles = [taken[sample.run_id] for sample in samples if sample.kind == SINGLE]
    run_seconds = min(singles, default=0.0)
    found.conversion_seconds = run_seconds * found.runs
    for kind, number in numbers.items():
        mine = [sample for sample in samples if sample.kind == kind]
        if rows := sum(sample.rows for sample in mine):
            seconds = sum(max(taken[sample.run_id] - run_seconds, 0.0) for sample in mine)
            found.conversion_seconds += seconds / rows * number
            found.conversion_bytes += round(scratch.measure_block_bytes(mine) / rows * number)


def _time(call: Callable[[], object]) -> float:
    begun = monotonic()
    call()
    return monotonic() - begun


def _find_waiting(connection: Connection, revision: str) -> _Waiting:
    """Return what is to be converted, about: points are counted by the range of their numbers."""

    def ids(query: str) -> list[int]:
        return list(connection.scalars(text(query)))

    rows = connection.execute(text("SELECT id, step FROM runs WHERE step > 0 ORDER BY id"))
    steps = {int(row[0]): int(row[1]) for row in rows}
    runs = len(steps)
    if revision >= STEPS:
        waiting = ids("SELECT run_id FROM step_conversions WHERE NOT is_verified")
        steps = {run_id: steps.get(run_id, 0) for run_id in waiting}
    if revision >= METRICS:
        runs = len(ids("SELECT run_id FROM step_conversions"))
    has_file = ids("SELECT run_id FROM frozen_steps") if revision >= FILES else []
    files = {run_id: steps.pop(run_id) for run_id in has_file if run_id in steps}
    low, high = connection.execute(text("SELECT min(id), max(id) FROM metrics")).one()
    points = 0 if low is None else high - low + 1
    points_of: Counter[int] = Counter()
    for place in _spread(points):
        query = text("SELECT run_id FROM metrics WHERE id >= :id ORDER BY id LIMIT 1")
        points_of[connection.scalar(query, {"id": low + place})] += 1
    return _Waiting(runs, steps, files, points, points_of)


def _spread(number: int) -> list[int]:
    """Return some of so many places, at equal distances."""
    return [number * (2 * index + 1) // (2 * RUNS) for index in range(RUNS)] if number else []


def _pick(steps: dict[int, int]) -> Counter[int]:
    """Return the runs of some of all steps, and how many of each."""
    ends, runs = np.cumsum([*steps.values()]), [*steps]
    places = _spread(sum(steps.values()))
    return Counter(runs[index] for index in np.searchsorted(ends, places, side="right"))


@contextmanager
def _open_scratch(original: Database, revision: str, folder: Path) -> Iterator["_Scratch"]:
    """Yield a scratch database with the tables of a revision, and remove it."""
    file = original.file
    parent = folder if file is None else file.parent
    with tempfile.TemporaryDirectory(prefix=f".{SCRATCH}-", dir=parent) as name:
        own = Path(name)
        url = f"sqlite:///{own / 'scratch.db'}"
        if file is None:
            url = original.engine.url.render_as_string(hide_password=False)
        database = Database(url, lambda: LocalStore(own))
        try:
            with _make_schema(original, database) if file is None else nullcontext():
                scratch = _Scratch(database, original, own)
                scratch.upgrade(revision)
                yield scratch
        finally:
            database.dispose()


@contextmanager
def _make_schema(original: Database, database: Database) -> Iterator[None]:
    """Make a schema for all transactions of a database, and drop it at the end."""

    def enter(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise NotMeasured("a statement without a transaction would change the original")
        connection.exec_driver_sql(f"SET LOCAL search_path = {SCRATCH}")

    drop = text(f"DROP SCHEMA IF EXISTS {SCRATCH} CASCADE")  # of a killed process
    with original.writing() as session:
        session.execute(drop)
        session.execute(text(f"CREATE SCHEMA {SCRATCH}"))
    event.listen(database.engine, "begin", enter)
    try:
        yield
    finally:
        with original.writing() as session:
            session.execute(drop)


class _Scratch:
    """A scratch database with the tables of an earlier revision."""

    def __init__(self, database: Database, original: Database, folder: Path) -> None:
        self.database, self.original, self.folder = database, original, folder
        self.tables, self._source = MetaData(), "original"
        if original.file is None:
            with original.reading() as session:
                self._source = str(session.scalar(text("SELECT current_schema()")))

    def upgrade(self, revision: str) -> None:
        """Migrate it to a revision."""
        from alembic.command import upgrade

        upgrade(self.database.migrations(), revision)

    def migrate(self) -> None:
        """Migrate it to this version."""
        self.upgrade("head")

    def fill(self, waiting: _Waiting) -> list[_Sample]:
        """Copy a sample of what waits."""
        with self.database.reading() as session:
            self.tables.reflect(session.connection(), only=["users", "runs", "steps", "metrics"])
        steps, points, files = _pick(waiting.steps), waiting.points_of, _pick(waiting.files)
        singles = [*steps, *points][:1] * 3
        samples: list[_Sample] = []
        with self._open_transaction() as execute:
            self._copy(execute, "users")
            for number, run_id in enumerate([*singles, *steps, *points, *files], start=1):
                self._copy(execute, "runs", f"id = {run_id}", number)
            for run_id in singles:
                number = len(samples) + 1
                for table in ("steps", "metrics"):
                    self._copy_rows(execute, table, run_id, number, 1)
                samples.append(_Sample(number, SINGLE, 0))
            for table, picked in (("steps", steps), ("metrics", points)):
                for run_id, times in picked.items():
                    number = len(samples) + 1
                    rows = self._copy_rows(execute, table, run_id, number, times * ROWS)
                    samples.append(_Sample(number, table, rows))
        for run_id in files:
            number = len(samples) + 1
            file, rows = self._copy_file(run_id, number)
            samples.append(_Sample(number, "files", rows, file))
        return samples

    def convert(self, sample: _Sample) -> float:
        """Convert a run, and return the seconds."""
        run_id, of_metrics = sample.run_id, sample.kind == "metrics"
        waits = of_metrics or sample.kind == SINGLE
        conversion = StepConversion(run_id=run_id, is_verified=of_metrics, metrics_wait=waits)
        with self.database.writing() as session:
            session.merge(conversion)
            if sample.file is not None:
                session.add(sample.file)
        convert = partial(step_conversion.convert, lost=True, is_own=True)
        return _time(lambda: convert(self.database, run_id))

    def measure_block_bytes(self, samples: list[_Sample]) -> int:
        """Return the bytes that the blocks of runs take."""
        run_ids, total = [sample.run_id for sample in samples], 0
        with self.database.reading() as session:
            for table, sizes in BLOCKS.items():
                query = select(func.sum(sizes), func.count()).where(table.run_id.in_(run_ids))
                size, rows = session.execute(query).one()
                total += int(size or 0) + rows * ROW_BYTES
        return total

    @contextmanager
    def _open_transaction(self) -> Iterator[Execute]:
        """Yield a function that executes statements, in a transaction that locks nothing else."""
        file = self.original.file
        if file is None:
            with self.database.writing() as session:
                connection = session.connection()
                yield lambda statement: connection.exec_driver_sql(statement).rowcount
            return
        with closing(sqlite3.connect(str(self.database.file))) as scratch, scratch:
            scratch.execute("ATTACH ? AS original", (str(file),))
            yield lambda statement: scratch.execute(statement).rowcount

    def _copy_rows(self, execute: Execute, table: str, run_id: int, number: int, most: int) -> int:
        order = "step" if table == "steps" else "name, step"
        which = f"run_id = {run_id} ORDER BY {order} LIMIT {most}"
        return self._copy(execute, table, which, number)

    def _copy(
        self, execute: Execute, name: str, which: str = "true", number: int | None = None
    ) -> int:
        """Copy rows of the original, and let them reference users and the run `number` only."""
        values = {
            column.name: f'"{column.name}"'
            for column in self.tables.tables[name].c
            if not (column.nullable and column.foreign_keys) and column.name not in UNIQUE
        }
        if number is not None:
            values["id" if name == "runs" else "run_id"] = str(number)
            if name == "metrics":
                del values["id"]
        names, selected = ", ".join(f'"{name}"' for name in values), ", ".join(values.values())
        rows = f"SELECT {selected} FROM {self._source}.{name} WHERE {which}"  # noqa: S608
        return execute(f"INSERT INTO {name} ({names}) {rows}")

    def _copy_file(self, run_id: int, number: int) -> tuple[FrozenSteps, int]:
        """Copy some steps of a file of the original."""
        from pyarrow import parquet

        columns = "key, sha256 FROM frozen_steps WHERE run_id = :run"
        with self.original.reading() as session:
            key, digest = session.execute(text(f"SELECT {columns}"), {"run": run_id}).one()
        path = self.folder / f"{number}.parquet"
        row = FrozenSteps(key=key, sha256=digest)
        with step_files.copy_steps(self.original.open_store, row, lost=False) as file:
            table = parquet.ParquetFile(file.copy).read_row_group(0)[:ROWS]
        parquet.write_table(table, path)
        made = FrozenSteps(
            run_id=number,
            key=path.name,
            size_bytes=path.stat().st_size,
            sha256=sha256(path.read_bytes()).hexdigest(),
            step=table["step"][-1].as_py() + step_conversion.LATEST_ROWS,
            footer_sha256="",
            attempt=0,
            is_settled=True,
        )
        return made, table.num_rows
