"""The pyramid: summaries of 64, 512, 4096, … steps, so charts of any length read few rows.

`db.telemetry.step_blocks` writes those of steps, `db.telemetry.metric_pyramids` those of metrics,
of which a run may have thousands; `build` writes those of one metric from its points.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    func,
    literal,
    select,
    union_all,
)

from db.tables import Metric, MetricBucket
from db.telemetry import bulk_writes
from db.telemetry.summaries import Ints, Points, Series, Summaries, in_order, merge, pack, unpack

FANOUT = 8
SIZES = (64, 512, 4096, 32_768, 262_144)
#: More than any step.
END = 2**62

#: First and last step, both inclusive.
StepRange: TypeAlias = tuple[int, int]
#: Bucket size, first and last bucket, both inclusive.
BucketRange: TypeAlias = tuple[int, int, int]
#: Returns which buckets are is_stored, given their starts and size.
Selection: TypeAlias = Callable[[Ints, int], NDArray[np.bool_]]

#: Series that a chart can draw against the step.
STEP_SERIES = (
    Series("loss", "f4", mean=True),
    Series("scale", "f4"),
    Series("grad_norm", "f4", mean=True),
    Series("grad_norm_clipped", "f4"),
    Series("lr", "f8"),
    Series("step_us", "i4", mean=True),
    Series("data_us", "i4", mean=True),  # added last; older summaries lack it
)
#: Ranges read in one query: SQLite allows 500, and each count of ranges is a cached query.
MOST_RANGES = 8
METRIC_SERIES = (Series("value", "f8", mean=True),)


@dataclass(frozen=True)
class Source:
    """Tables and key of the points of a metric of a run and of their pyramid."""

    points: FromClause
    buckets: FromClause
    key: dict[str, Any]
    series: tuple[Series, ...]

    def of(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions that select the rows of this source in a table."""
        return [table.c[name] == value for name, value in self.key.items()]

    def read_points(self, connection: Connection, ranges: Sequence[StepRange]) -> Points:
        """Read the raw points of ranges of steps."""
        if not ranges:
            return self._points([])
        rows: list[tuple[Any, ...]] = []
        for first in range(0, len(ranges), MOST_RANGES):
            some = ranges[first : first + MOST_RANGES]
            query = _points_query(self.points, self.series, tuple(self.key), len(some))
            rows += _fetch(connection, query, self.key | _bounds(some))
        return self._points(list(zip(*sorted(rows, key=itemgetter(0)), strict=True)))

    @staticmethod
    def read_points_of_runs(
        connection: Connection, sources: Collection["Source"], span: StepRange
    ) -> Iterator[tuple["Source", Points]]:
        """Read the raw points of several runs in one query. sources: may differ only in the run."""
        by_run = {source.key["run_id"]: source for source in sources}
        first = next(iter(sources))
        query = _points_of_runs_query(first.points, first.series, tuple(first.key))
        rows = _fetch(connection, query, first.key | {"run_ids": list(by_run)} | _bounds([span]))
        if rows:
            run_ids, *columns = zip(*rows, strict=True)
            points = first._points(columns)
            for start, end in pairwise([0, *np.flatnonzero(np.diff(run_ids)) + 1, len(rows)]):
                yield by_run[run_ids[start]], points[start:end]

    def read_buckets(
        self, connection: Connection, ranges: Sequence[BucketRange]
    ) -> dict[int, Summaries]:
        """Read ranges of buckets and return their summaries by size."""
        rows = read_bucket_rows(connection, self.buckets, self.key, ranges)
        by_size = {}
        for size in {size for size, _, _ in ranges}:
            stones = [row for row in rows if row[0] == size]
            start: Ints = np.array([bucket for _, bucket, _ in stones], dtype=np.int64) * size
            packed = [summary for *_, summary in stones]
            by_size[size] = in_order([unpack(start, packed, self.series, size)])
        return by_size

    def _points(self, columns: list[tuple[Any, ...]]) -> Points:
        """Convert columns in order of step to points. NULL becomes NaN."""
        columns = columns or [()] * (3 + len(self.series))
        step, elapsed_ms, flags = (np.array(column, np.int64) for column in columns[:3])
        values = np.array(columns[3:], float).reshape(len(self.series), len(step))
        return Points(step, elapsed_ms, flags, values.T)


def metric_of(run_id: int, name: str) -> Source:
    """Return the source for one metric of a run."""
    key = {"run_id": run_id, "name": name}
    return Source(Metric.__table__, MetricBucket.__table__, key, METRIC_SERIES)


def read_bucket_rows(
    connection: Connection,
    table: FromClause,
    key: dict[str, Any],
    ranges: Sequence[BucketRange],
) -> list[tuple[Any, ...]]:
    """Read (size, bucket, summary) of ranges of buckets."""
    query = _buckets_query(table, tuple(key), len(ranges))
    sizes = {f"size_{n}": size for n, (size, _, _) in enumerate(ranges)}
    bounds = _bounds([(first, last) for _, first, last in ranges])
    return _fetch(connection, query, key | sizes | bounds)


def update(
    connection: Connection, source: Source, points: Points, *, last: int | None = None
) -> None:
    """Update the pyramid for points that were just written, given in order of step.

    last: store only buckets that end before this step.
    """
    first, until = int(points.step[0]), int(points.step[-1])
    there = source.read_buckets(connection, [siblings(first, until, size) for size in SIZES])
    below = _completed(connection, source, points)
    is_stored: Selection = lambda start, size: start + size <= (END if last is None else last)  # noqa: E731
    start, size, packed = summed_up(below, there, source.series, is_stored)
    columns: dict[str, bulk_writes.Column] = {
        "size": size,
        "bucket": start // size,
        "summary": packed,
    }
    if packed:
        bulk_writes.replace(connection, source.buckets, source.key, columns)


def all_stored(start: Ints, size: int) -> NDArray[np.bool_]:
    """Select all buckets."""
    return np.ones(len(start), bool)


def summed_up(
    points: Points,
    there: Mapping[int, Summaries],
    series: tuple[Series, ...],
    is_stored: Selection = all_stored,
    sizes: Sequence[int] = SIZES,
) -> tuple[Ints, Ints, list[bytes]]:
    """Return start, size and packed summary of each selected bucket of all sizes above points.

    there: by size, the stored buckets that may share a parent with these.  sizes: the first ones.
    """
    parts = Summaries.of(points)
    of_sizes: list[Ints] = []
    starts: list[Ints] = []
    packed: list[bytes] = []
    for size in sizes:
        buckets = merge(parts, size)
        buckets = buckets[is_stored(buckets.start, size)]
        starts.append(buckets.start)
        of_sizes.append(np.full_like(buckets.start, size))
        bucket_bytes = pack(buckets, series, size)
        packed += bucket_bytes
        others = there[size][~np.isin(there[size].start, buckets.start)]
        # Larger sizes are built from the stored, rounded summaries.
        parts = in_order([others, unpack(buckets.start, bucket_bytes, series, size)])
    return np.concatenate(starts), np.concatenate(of_sizes), packed


def build(
    connection: Connection, source: Source, *, since: int = 0, last: int | None = None
) -> None:
    """Write the missing pyramid of a source's points from step `since` on.

    last: store only buckets that end before this step.
    """
    at = since
    while (first := _next_step(connection, source, at)) is not None:
        first -= first % SIZES[3]
        at = first + SIZES[3]
        points = source.read_points(connection, [(first, at - 1)])
        update(connection, source, points, last=last)


def _next_step(connection: Connection, source: Source, at: int) -> int | None:
    step = source.points.c.step
    found: int | None = connection.scalar(
        select(func.min(step)).where(*source.of(source.points), step >= at)
    )
    return found


# Queries are cached and receive their values as parameters: SQLAlchemy takes longer to build one
# than the database to answer it.


@cache
def _points_query(
    points: FromClause, series: tuple[Series, ...], key: tuple[str, ...], ranges: int
) -> Any:
    query = select(*_columns(points, series)).where(*_of(points, key))
    return _union([query.where(_within(points.c.step, n)) for n in range(ranges)])


@cache
def _points_of_runs_query(
    points: FromClause, series: tuple[Series, ...], key: tuple[str, ...]
) -> Any:
    others = _of(points, tuple(name for name in key if name != "run_id"))
    some = points.c.run_id.in_(bindparam("run_ids", expanding=True))
    query = select(points.c.run_id, *_columns(points, series))
    query = query.where(some, *others, _within(points.c.step))
    return query.order_by(points.c.run_id, points.c.step)


@cache
def _buckets_query(buckets: FromClause, key: tuple[str, ...], ranges: int) -> Any:
    column = buckets.c
    query = select(column.size, column.bucket, column.summary).where(*_of(buckets, key))
    return _union(
        [
            query.where(column.size == bindparam(f"size_{n}"), _within(column.bucket, n))
            for n in range(ranges)
        ]
    )


def _columns(points: FromClause, series: tuple[Series, ...]) -> Iterator[ColumnElement[Any]]:
    column = points.c
    yield column.step
    yield column.elapsed_ms
    yield literal(0)  # flags
    yield from (column[name] for name, _, _ in series)


def _of(table: FromClause, key: tuple[str, ...]) -> list[ColumnElement[bool]]:
    return [table.c[name] == bindparam(name) for name in key]


def _within(column: ColumnElement[Any], number: int = 0) -> ColumnElement[bool]:
    return column.between(bindparam(f"first_{number}"), bindparam(f"last_{number}"))


def _bounds(ranges: Sequence[tuple[int, int]]) -> dict[str, int]:
    return {
        f"{end}_{n}": value
        for n, span in enumerate(ranges)
        for end, value in zip(("first", "last"), span, strict=True)
    }


def _union(queries: list[Any]) -> Any:
    """Combine queries into one.

    Each reads one range of a primary key, which a single query with OR might not.
    """
    return queries[0] if len(queries) == 1 else union_all(*queries)


def _fetch(connection: Connection, query: Any, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    # Directly from the driver: thousands of SQLAlchemy rows would take twice the time.
    return list(connection.execute(query, values).cursor.fetchall())


def siblings(first: int, last: int, size: int) -> BucketRange:
    """Return the buckets of one size that share a parent with these steps."""
    parent = size * FANOUT
    return size, first // parent * FANOUT, last // parent * FANOUT + FANOUT - 1


def _completed(connection: Connection, source: Source, points: Points) -> Points:
    """Return all points of the lowest buckets that these points touch.

    Buckets that the points fill are complete; the others, usually the first and the last, are read
    from the database.
    """
    filled, partial = split(points)
    return in_order([filled, source.read_points(connection, _ranges(partial))])


def split(points: Points) -> tuple[Points, Ints]:
    """Return the points in completely filled lowest buckets, and the other touched buckets."""
    size = SIZES[0]
    touched, where, count = np.unique(points.step // size, return_inverse=True, return_counts=True)
    is_filled = count == size
    return points[is_filled[where]], touched[~is_filled]


def _ranges(buckets: Ints) -> list[StepRange]:
    """Return the step ranges of lowest buckets, with adjacent buckets joined."""
    if not len(buckets):
        return []
    size = SIZES[0]
    stretches = np.split(buckets, np.flatnonzero(np.diff(buckets) > 1) + 1)
    return [(int(part[0]) * size, (int(part[-1]) + 1) * size - 1) for part in stretches]
