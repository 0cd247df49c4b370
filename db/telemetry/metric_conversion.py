"""Conversion of the metrics of a run that an earlier version recorded, as a part of its conversion.

As of steps, see db.telemetry.step_conversion: the rows of `metrics` are copied into blocks, all are
read again and compared, and then the rows are deleted.
"""

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from sqlalchemy import Connection, delete, func, select
from sqlalchemy.orm import Session

from db.database import Database
from db.tables import Metric, MetricBlock, MetricBucket, MetricTail, Run
from db.telemetry import block_codec, metric_block_writer, metric_blocks
from db.telemetry.metric_points import NAMES, MetricPoints, columns_of, no_points, points_of
from db.telemetry.pyramid import END
from db.telemetry.summaries import in_order

#: Points of a transaction.
BATCH_POINTS = 16_384

#: Locks the run. Raises an error if its metrics are not to be converted any more.
Lock: TypeAlias = Callable[[Session], Run]
#: Leaves other writers time after work that began at a moment. Raises an error to stop.
Pause: TypeAlias = Callable[[float], None]


def copy(database: Database, run_id: int, lock: Lock, changed: Exception, pause: Pause) -> None:
    """Copy the rows of a run into blocks, or continue that. Raises `changed` if another does."""
    with database.writing() as session:
        lock(session)
        connection = session.connection()
        newest, known = _newest(connection, run_id), _last_steps(connection, run_id)
    for points in batches(database, run_id, known):
        begun = monotonic()
        with database.writing() as session:
            run, connection = lock(session), session.connection()
            if _newest(connection, run_id) != newest:
                raise changed
            newest = run.revision = run.revision + 1
            metric_block_writer.append_converted(connection, run_id, newest, points)
        pause(begun)
    with database.writing() as session:
        lock(session)
        metric_block_writer.end_tail(session.connection(), run_id, is_live=False)


def verify(database: Database, run_id: int, pause: Pause) -> bool:
    """Return whether the blocks of a run have the points of its rows, to the bit."""
    number = 0
    for points in batches(database, run_id, {}):
        begun = monotonic()
        with database.reading() as session:
            for name, expected in points.by_name():
                span = (int(expected.step[0]), int(expected.step[-1]))
                connection, its = session.connection(), ([run_id], [name], span)
                parts = [
                    source.read_points(connection, [span], NAMES)
                    for source in metric_blocks.sources(connection, *its, is_converted=False)
                ]
                found = columns_of(in_order([no_points(), *parts]))
                if not block_codec.are_equal(found, columns_of(expected), NAMES):
                    return False
        number += len(points.owner)
        pause(begun)
    with database.reading() as session:
        counted = metric_blocks.count(session.connection(), run_id, is_converted=False)
    return number == counted


def delete_blocks(session: Session, run_id: int) -> None:
    """Delete what a conversion has copied."""
    for table in (MetricBlock, MetricTail):
        session.execute(delete(table).where(table.run_id == run_id))


def delete_rows(database: Database, run_id: int, pause: Pause) -> None:
    """Delete the rows of a run, in batches, and their summaries."""
    some = select(Metric.id).where(Metric.run_id == run_id).order_by(Metric.id).limit(BATCH_POINTS)
    while True:
        begun = monotonic()
        with database.writing() as session:
            deleted = delete(Metric).where(Metric.id.in_(some.scalar_subquery()))
            if not session.scalars(deleted.returning(Metric.id)).all():
                session.execute(delete(MetricBucket).where(MetricBucket.run_id == run_id))
                return
        pause(begun)


def batches(database: Database, run_id: int, known: Mapping[str, int]) -> Iterator[MetricPoints]:
    """Yield the rows of a run, at most BATCH_POINTS at a time. known: by name, a step before."""
    with database.reading() as session:
        names = session.scalars(select(Metric.name).where(Metric.run_id == run_id).distinct()).all()
    left = sorted((name, known.get(name, -END)) for name in names)[::-1]
    while left:
        parts: dict[str, list[Any]] = {}
        number = 0
        with database.reading() as session:
            while left and number < BATCH_POINTS:
                name, after = left.pop()
                rows = _rows(session.connection(), run_id, name, after, BATCH_POINTS - number)
                number += len(rows)
                if rows:
                    parts[name] = rows
                if number == BATCH_POINTS:
                    left.append((name, rows[-1][0]))
        if parts:
            yield _points_of(parts)


def _rows(connection: Connection, run_id: int, name: str, after: int, most: int) -> list[Any]:
    query = select(*(Metric.__table__.c[name] for name in NAMES))
    its = (Metric.run_id == run_id, Metric.name == name, Metric.step > after)
    ordered = query.where(*its).order_by(Metric.step).limit(most)
    return list(connection.execute(ordered).cursor.fetchall())


def _points_of(parts: Mapping[str, list[object]]) -> MetricPoints:
    owner = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts.values()])
    columns = zip(*(row for rows in parts.values() for row in rows), strict=True)
    kinds = (np.int64, np.int64, np.float64)
    arrays = [np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return MetricPoints([*parts], owner, points_of(dict(zip(NAMES, arrays, strict=True))))


def _newest(connection: Connection, run_id: int) -> int | None:
    newest = select(func.max(MetricTail.revision)).where(MetricTail.run_id == run_id)
    return connection.scalar(newest)


def _last_steps(connection: Connection, run_id: int) -> dict[str, int]:
    """Return the last copied step of each metric."""
    last = metric_blocks.last_points(connection, run_id, None, is_converted=False)
    return {name: step for name, (step, _) in last.items()}
