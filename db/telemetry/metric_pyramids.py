"""Pyramids of a run's metrics, updated for many names at once.

A bucket is stored once its metric has a point after it: for a point at every step, one row per 64
points instead of five per point. The tail after the stored buckets, at most 64 points, is read from
the points (`extremes`). The stored buckets depend only on the points.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, delete, func, select, text
from sqlalchemy.orm import Session

from db.tables import LatestMetric, Metric, MetricBucket
from db.telemetry import bulk_writes
from db.telemetry.metric_points import MetricPoints
from db.telemetry.pyramid import (
    END,
    FANOUT,
    METRIC_SERIES,
    SIZES,
    build,
    metric_of,
    split,
    summed_up,
)
from db.telemetry.summaries import Ints, Points, Summaries, in_order, unpack

#: Last step of a metric without earlier points.
NEVER = -1


def update(connection: Connection, run_id: int, metrics: MetricPoints, before: Ints) -> None:
    """Update the pyramids for points that were just written.

    before: for each name, the last step before these points, or NEVER.
    """
    lowest, highest = metrics.points.step[metrics.first], metrics.points.step[metrics.last]
    last = np.maximum(before, highest)
    is_later = (before != NEVER) & (before < last)
    first = np.where(is_later, np.minimum(lowest, before), lowest)
    # The other names complete no bucket and change no stored one.
    busy = np.flatnonzero(first // SIZES[0] < last // SIZES[0])
    for some in _portions(busy, first, last):
        axis = _Axis(first[some], last[some])
        closed = np.where(is_later[some], before[some], NEVER)
        _update(connection, run_id, metrics.of_names(some), axis, closed)


def _portions(names: Ints, first: Ints, last: Ints) -> Iterator[Ints]:
    """Split names into portions whose concatenated steps fit in an int64."""
    if not len(names):
        return
    if len(names) == 1 or float(_widths(first[names], last[names]).astype(float).sum()) < END:
        yield names
        return
    for half in np.array_split(names, 2):
        yield from _portions(half, first, last)


def _widths(first: Ints, last: Ints) -> Ints:
    top = SIZES[-1]
    return (last // top - first // top + 1) * top


@dataclass(frozen=True)
class _Axis:
    """The step ranges of several names, concatenated on one axis.

    Bucket edges stay aligned, because each name takes a multiple of the largest size.
    """

    first: Ints  # first relevant step of each name
    last: Ints  # last relevant step of each name

    @cached_property
    def starts(self) -> Ints:
        """Position at which each name begins."""
        widths = _widths(self.first, self.last)
        return np.cumsum(widths) - widths

    @cached_property
    def offsets(self) -> Ints:
        """Offset from step to position for each name."""
        return self.starts - self.first // SIZES[-1] * SIZES[-1]

    def owners(self, positions: Ints) -> Ints:
        """Return the name at each position."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def is_complete(self, start: Ints, size: int) -> NDArray[np.bool_]:
        """Return which buckets have a later point of their metric."""
        owners = self.owners(start)
        return start + size <= (self.last + self.offsets)[owners]


def _update(
    connection: Connection, run_id: int, metrics: MetricPoints, axis: _Axis, before: Ints
) -> None:
    """Update pyramids.

    before: for each name, the step that was its last until this update, or NEVER.
    """
    size = SIZES[0]
    moved = metrics.points.moved(axis.offsets[metrics.owner])
    filled, touched = split(moved)
    open_before = ((before + axis.offsets) // size)[before != NEVER]
    touched = np.union1d(touched, np.setdiff1d(open_before, filled.step // size))
    touched = touched[axis.is_complete(touched * size, size)]
    read = _read_points(connection, run_id, metrics.names, axis, touched * size)
    there = _read_siblings(connection, run_id, metrics.names, axis)
    start, sizes, packed = summed_up(
        in_order([filled, read]), there, METRIC_SERIES, axis.is_complete
    )
    if not packed:
        return
    owners = axis.owners(start)
    columns: dict[str, bulk_writes.Column] = {
        "name": [metrics.names[owner] for owner in owners.tolist()],
        "size": sizes,
        "bucket": (start - axis.offsets[owners]) // sizes,
        "summary": packed,
    }
    bulk_writes.replace(connection, MetricBucket.__table__, {"run_id": run_id}, columns)


def _read_points(
    connection: Connection, run_id: int, names: Sequence[str], axis: _Axis, starts: Ints
) -> Points:
    """Read the points of the lowest buckets that begin at these positions."""
    owners = axis.owners(starts)
    low = starts - axis.offsets[owners]
    columns = "step, elapsed_ms, value"
    of_names = [names[owner] for owner in owners.tolist()]
    rows = _select_rows(connection, "metrics", columns, run_id, of_names, low, low + SIZES[0] - 1)
    which, step, elapsed_ms, value = zip(*rows, strict=True) if rows else [()] * 4
    steps = np.array(step, np.int64)
    zeros, values = np.zeros_like(steps), np.array(value, float)[:, None]
    points = Points(steps, np.array(elapsed_ms, np.int64), zeros, values)
    return points.moved(axis.offsets[owners[np.array(which, np.int64)]])


def _read_siblings(
    connection: Connection, run_id: int, names: Sequence[str], axis: _Axis
) -> dict[int, Summaries]:
    """Read the buckets that share a stored parent with the written ones, by size."""
    siblings = {SIZES[-1]: unpack(np.array([], np.int64), [], METRIC_SERIES, SIZES[-1])}
    for size in SIZES[:-1]:
        parent = size * FANOUT
        owners = np.flatnonzero(axis.first // parent < axis.last // parent)
        low, high = (steps[owners] // parent * FANOUT for steps in (axis.first, axis.last))
        some = [names[owner] for owner in owners.tolist()]
        rows = _select_rows(
            connection, "metric_buckets", "bucket, summary", run_id, some, low, high - 1, size=size
        )
        which, bucket, packed = zip(*rows, strict=True) if rows else [()] * 3
        offsets = axis.offsets[owners[np.array(which, np.int64)]]
        start = np.array(bucket, np.int64) * size + offsets
        siblings[size] = in_order([unpack(start, list(packed), METRIC_SERIES, size)])
    return siblings


def _select_rows(
    connection: Connection,
    table: str,
    columns: str,
    run_id: int,
    names: list[str],
    low: Ints,
    high: Ints,
    *,
    size: int | None = None,
) -> list[tuple[Any, ...]]:
    """Read rows of names, each in a range of steps or buckets: (index in names, columns).

    The query makes the database look up each range by the index. Otherwise PostgreSQL reads the
    whole run and compares each row to each name while it has no statistics of a growing table.
    """
    if not names:
        return []
    number = "step" if size is None else "bucket"
    of_size = "" if size is None else "AND t.size = :size"
    selected = ", ".join(f"t.{column}" for column in columns.split(", "))
    values: dict[str, Any] = {"run_id": run_id} | ({} if size is None else {"size": size})
    if connection.dialect.name == "sqlite":
        query = f"""
            SELECT w.key, {selected} FROM json_each(:ranges) AS w CROSS JOIN {table} AS t
            WHERE t.run_id = :run_id AND t.name = json_extract(w.value, '$[0]') {of_size}
            AND t.{number} BETWEEN json_extract(w.value, '$[1]') AND json_extract(w.value, '$[2]')
        """  # noqa: S608 - our own names
        ranges = zip(names, low.tolist(), high.tolist(), strict=True)
        values["ranges"] = json.dumps(list(ranges))
    else:
        query = f"""
            SELECT w.i - 1, t.* FROM unnest(
                CAST(:names AS text[]), CAST(:low AS bigint[]), CAST(:high AS bigint[])
            ) WITH ORDINALITY AS w (name, low, high, i), LATERAL (
                SELECT {selected} FROM {table} AS t
                WHERE t.run_id = :run_id AND t.name = w.name {of_size}
                AND t.{number} BETWEEN w.low AND w.high OFFSET 0
            ) AS t
        """  # noqa: S608 - our own names
        values |= {"names": names, "low": low, "high": high}
    # Directly from the driver, as in db.telemetry.pyramid: there may be thousands of rows.
    return list(connection.execute(text(query), values).cursor.fetchall())


def truncate(session: Session, run_id: int) -> None:
    """Delete buckets that no longer have a later point, after points were deleted."""
    beyond = select(LatestMetric.name).where(
        LatestMetric.run_id == run_id,
        LatestMetric.name == MetricBucket.name,
        LatestMetric.step >= (MetricBucket.bucket + 1) * MetricBucket.size,
    )
    session.execute(delete(MetricBucket).where(MetricBucket.run_id == run_id, ~beyond.exists()))


def rebuild(session: Session, run_id: int) -> None:
    """Rebuild the pyramids of all metrics of a run from their points."""
    session.execute(delete(MetricBucket).where(MetricBucket.run_id == run_id))
    ends = select(Metric.name, func.min(Metric.step), func.max(Metric.step))
    ends = ends.where(Metric.run_id == run_id).group_by(Metric.name)
    for name, first, last in session.execute(ends).all():
        if first // SIZES[0] < last // SIZES[0]:
            build(session.connection(), metric_of(run_id, name), last=last)


class Extremes(NamedTuple):
    """Finite extremes of one metric (None if it has none) and its number of points."""

    low: float | None
    high: float | None
    points: int


def extremes(
    connection: Connection, run_ids: Collection[int], names: Collection[str] | None = None
) -> dict[tuple[int, str], Extremes]:
    """Return the extremes of each metric of runs, from buckets and their tails.

    names: only these metrics.
    """
    latest = LatestMetric.__table__.c
    conditions = [latest.run_id.in_(run_ids)]
    if names is not None:
        conditions.append(latest.name.in_(names))
    rows = connection.execute(_points_of_tails().where(*conditions)).cursor.fetchall()
    indexes = {key: index for index, key in enumerate(dict.fromkeys(row[:2] for row in rows))}
    values = np.array([value for *_, value in rows], float)
    values[~np.isfinite(values)] = np.nan
    low, high = np.full((2, len(indexes)), np.nan)
    count = np.zeros(len(indexes), np.int64)

    def add(keys: list[tuple[int, str]], lows: Any, highs: Any, counts: Any) -> None:
        index = np.array([indexes[key] for key in keys], np.int64)
        np.fmin.at(low, index, lows)
        np.fmax.at(high, index, highs)
        np.add.at(count, index, counts)

    add([row[:2] for row in rows], values, values, 1)
    for size in SIZES:
        stones = connection.execute(_buckets_of_tails(size).where(*conditions)).cursor.fetchall()
        packed = [summary for *_, summary in stones]
        parts = unpack(np.zeros(len(packed), np.int64), packed, METRIC_SERIES, size)
        keys = [row[:2] for row in stones]
        add(keys, parts.low[:, 0], parts.high[:, 0], parts.steps)
    ends = zip(indexes, low.tolist(), high.tolist(), count.tolist(), strict=True)
    return {key: Extremes(_known(least), _known(most), number) for key, least, most, number in ends}


def _known(value: float) -> float | None:
    return None if value != value else value


def _points_of_tails() -> Select[Any]:
    """Select (run, name, value) of the points after the last stored bucket."""
    latest, points = LatestMetric.__table__, Metric.__table__
    same = (points.c.run_id == latest.c.run_id) & (points.c.name == latest.c.name)
    tail = points.c.step >= latest.c.step // SIZES[0] * SIZES[0]
    query = select(points.c.run_id, points.c.name, points.c.value)
    return query.select_from(latest.join(points, same & tail))


def _buckets_of_tails(size: int) -> Select[Any]:
    """Select (run, name, summary) of stored buckets outside any larger stored one."""
    latest, buckets = LatestMetric.__table__, MetricBucket.__table__
    same = (buckets.c.run_id == latest.c.run_id) & (buckets.c.name == latest.c.name)
    same &= buckets.c.size == size
    if size != SIZES[-1]:
        same &= buckets.c.bucket >= latest.c.step // (size * FANOUT) * FANOUT
    query = select(buckets.c.run_id, buckets.c.name, buckets.c.summary)
    return query.select_from(latest.join(buckets, same))
