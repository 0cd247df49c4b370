"""The pyramid: summaries of 64, 512, 4096, … steps, so charts of any length read few rows.

`update` writes it in the transaction that writes the points; `rebuild` rebuilds it from them.
A run may have thousands of metrics: `db.telemetry.metric_pyramids` updates their pyramids.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    delete,
    func,
    literal,
    select,
    union_all,
)
from sqlalchemy.orm import Session

from db.errors import StepsMissing, StepsUnreadable
from db.files.step_files import Columns
from db.tables import Metric, MetricBucket, Step, StepBucket
from db.telemetry import bulk_writes, frozen_steps
from db.telemetry.frozen_steps import LATEST_ROWS, Frozen
from db.telemetry.summaries import Ints, Points, Series, Summaries, in_order, merge, pack, unpack

logger = logging.getLogger(__name__)

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
EMPTY: Ints = np.empty(0, np.int64)
METRIC_SERIES = (Series("value", "f8", mean=True),)


@dataclass(frozen=True)
class Source:
    """Tables and key of points and their pyramid: a run's steps or one of its metrics."""

    points: FromClause
    buckets: FromClause
    key: dict[str, Any]
    series: tuple[Series, ...]  # the requested series
    stored: tuple[Series, ...]  # series that the pyramid stores
    frozen: Frozen | None = None  # further points in a file

    def of(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions that select the rows of this source in a table."""
        return [table.c[name] == value for name, value in self.key.items()]


def steps_of(connection: Connection, run_id: int) -> Source:
    """Return the source for the steps of a run, wherever they are."""
    return source_of(run_id, frozen_steps.of_runs(connection, [run_id]).get(run_id))


def source_of(run_id: int, frozen: Frozen | None, names: Collection[str] | None = None) -> Source:
    """Return the source for the steps of a run, which may have a file. names: only these series."""
    series = tuple(each for each in STEP_SERIES if names is None or each.name in names)
    tables = (Step.__table__, StepBucket.__table__)
    return Source(*tables, {"run_id": run_id}, series, STEP_SERIES, frozen)


def metric_of(run_id: int, name: str) -> Source:
    """Return the source for one metric of a run."""
    key = {"run_id": run_id, "name": name}
    return Source(Metric.__table__, MetricBucket.__table__, key, METRIC_SERIES, METRIC_SERIES)


def update(
    connection: Connection,
    source: Source,
    points: Points,
    *,
    last: int | None = None,
    in_file: Mapping[int, bytes] = MappingProxyType({}),
) -> None:
    """Update the pyramid for points that were just written, given in order of step.

    last: store only buckets that end before this step.  in_file: summaries of the lowest buckets
    by their start; equal ones are not stored.
    """
    first, until = int(points.step[0]), int(points.step[-1])
    there = read_buckets(connection, source, [_siblings(first, until, size) for size in SIZES])
    below = _completed(connection, source, points)
    is_stored: Selection = lambda start, size: start + size <= (END if last is None else last)  # noqa: E731
    start, size, packed = summed_up(below, there, source.series, is_stored)
    lowest = zip(start.tolist(), packed, strict=True)
    differs = np.array([in_file.get(at) != summary for at, summary in lowest], bool)
    is_new = (size != SIZES[0]) | differs
    columns: dict[str, bulk_writes.Column] = {
        "size": size[is_new],
        "bucket": (start // size)[is_new],
        "summary": list(compress(packed, is_new)),
    }
    if is_new.any():
        bulk_writes.replace(connection, source.buckets, source.key, columns)


def update_recorded(connection: Connection, source: Source, points: Points) -> None:
    """Update the pyramid of a run's steps, from rows only if its file is missing or damaged.

    A file of an earlier attempt must not prevent the recording of this one.
    """
    try:
        update(connection, source, points)
    except StepsUnreadable as error:
        logger.warning("summaries near step %d lack earlier steps: %s", points.step[0], error)
        update(connection, replace(source, frozen=None), points)


def summed_up(
    points: Points, there: Mapping[int, Summaries], series: tuple[Series, ...], is_stored: Selection
) -> tuple[Ints, Ints, list[bytes]]:
    """Return start, size and packed summary of each selected bucket of all sizes above points.

    there: by size, the stored buckets that may share a parent with these.
    """
    parts = Summaries.of(points)
    sizes: list[Ints] = []
    starts: list[Ints] = []
    packed: list[bytes] = []
    for size in SIZES:
        buckets = merge(parts, size)
        buckets = buckets[is_stored(buckets.start, size)]
        starts.append(buckets.start)
        sizes.append(np.full_like(buckets.start, size))
        bucket_bytes = pack(buckets, series, size)
        packed += bucket_bytes
        others = there[size][~np.isin(there[size].start, buckets.start)]
        # Larger sizes are built from the stored, rounded summaries.
        parts = in_order([others, unpack(buckets.start, bucket_bytes, series, size)])
    return np.concatenate(starts), np.concatenate(sizes), packed


def rebuild(session: Session, run_id: int, *, lost: bool = False) -> None:
    """Rebuild the pyramid of a run's steps.

    Raises StepsMissing if it counts steps that the run no longer has, unless `lost`: it has all
    that is left of them.
    """
    connection = session.connection()
    expected = 0 if lost else count_steps(connection, run_id)
    session.execute(delete(StepBucket).where(StepBucket.run_id == run_id))
    build(connection, steps_of(connection, run_id))
    if (steps := count_steps(connection, run_id)) < expected:
        raise StepsMissing.of(steps, expected)


def truncate(connection: Connection, run_id: int, *, after: int) -> None:
    """Delete the buckets with steps after a step, after those were deleted; write those before it.

    Reads few steps of a long run: the lowest buckets of the latest rows, and one path to the top.
    If the file is missing or damaged, those that are rows; recording the next steps completes it.
    """
    for size in SIZES:
        beyond = (StepBucket.size == size, StepBucket.bucket >= (after + 1) // size)
        connection.execute(delete(StepBucket).where(StepBucket.run_id == run_id, *beyond))
    last = connection.scalar(select(func.max(Step.step)).where(Step.run_id == run_id))
    if last is None:
        return
    source = steps_of(connection, run_id)
    first = min(last, after - LATEST_ROWS + 1) // SIZES[1] * SIZES[1]
    try:
        update(connection, source, read_points(connection, source, [(first, after)]))
    except StepsUnreadable:  # logged by `frozen_steps.truncate`
        source = replace(source, frozen=None)
        # Not from `first`: buckets that are stored are better than what the rows have of them.
        deleted = ((after + 1) // SIZES[1] * SIZES[1], after)
        points = read_points(connection, source, [deleted])
        if len(points):
            update(connection, source, points)


def packed_lowest(columns: Columns) -> NDArray[np.object_]:
    """Return the packed summary of each lowest bucket at its first step, empty at the others."""
    columns = columns | {"grad_norm_clipped": frozen_steps.applied_norm(columns)}
    values = np.column_stack([columns[series.name] for series in STEP_SERIES])
    step = columns["step"]
    points = Points(step, columns["elapsed_ms"], columns["flags"], values)
    packed = np.full(len(step), b"", np.object_)
    buckets = merge(Summaries.of(points), SIZES[0])
    first = np.diff(step // SIZES[0], prepend=-1) > 0
    packed[first] = np.array(pack(buckets, STEP_SERIES, SIZES[0]), np.object_)
    return packed


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
        points = read_points(connection, source, [(first, at - 1)])
        starts, packed = _lowest_in_file(source.frozen, [(first, at - 1)])
        in_file = dict(zip(starts.tolist(), packed, strict=True))
        update(connection, source, points, last=last, in_file=in_file)


def _next_step(connection: Connection, source: Source, at: int) -> int | None:
    step = source.points.c.step
    stored = select(func.min(step)).where(*source.of(source.points), step >= at)
    ends = source.frozen.ends((at, END)) if source.frozen else None
    steps = [connection.scalar(stored), ends[0] if ends else None]
    return min((step for step in steps if step is not None), default=None)


def count_skips(connection: Connection, run_id: int) -> int:
    """Count all skipped steps of a run."""
    return int(_largest(connection, run_id).skips.sum())


def count_steps(connection: Connection, run_id: int) -> int:
    """Count all recorded steps of a run, also those that neither rows nor a file have any more."""
    return int(_largest(connection, run_id).steps.sum())


def steps_per_second(connection: Connection, run_id: int) -> float | None:
    """Return the mean steps per second of a run, or None if it has no timed steps."""
    largest = _largest(connection, run_id)
    step_us = largest.mean[:, [series.name for series in STEP_SERIES].index("step_us")]
    total_us = float((step_us * largest.steps).sum())
    return 1e6 * int(largest.steps.sum()) / total_us if total_us > 0 else None


def _largest(connection: Connection, run_id: int) -> Summaries:
    top, source = SIZES[-1], source_of(run_id, None)  # reads no points
    return read_buckets(connection, source, [(top, 0, END)])[top]


def read_points(connection: Connection, source: Source, ranges: list[StepRange]) -> Points:
    """Read the raw points of ranges of steps."""
    if not ranges:
        return _points([], source)
    rows: list[tuple[Any, ...]] = []
    for first in range(0, len(ranges), MOST_RANGES):
        some = ranges[first : first + MOST_RANGES]
        query = _points_query(source.points, source.series, tuple(source.key), len(some))
        rows += _fetch(connection, query, source.key | _bounds(some))
    points = _points(list(zip(*sorted(rows, key=itemgetter(0)), strict=True)), source)
    return _with_frozen(points, source, ranges)


def _with_frozen(points: Points, source: Source, ranges: list[StepRange]) -> Points:
    """Add the steps of the source's file that are in these ranges; rows take precedence."""
    if source.frozen is None:
        return points
    lacking = [
        (first, last)
        for first, last in ranges
        if ((points.step >= first) & (points.step <= last)).sum() < last - first + 1
    ]
    names = [series.name for series in source.series]
    columns = source.frozen.read(lacking, _columns_of(source))
    if "grad_norm_clipped" in names:
        columns = columns | {"grad_norm_clipped": frozen_steps.applied_norm(columns)}
    values = np.column_stack([columns[name] for name in names])
    stored = Points(columns["step"], columns["elapsed_ms"], columns["flags"], values)
    return in_order([points, stored[~np.isin(stored.step, points.step)]])


def _columns_of(source: Source) -> set[str]:
    """Return the columns of a file that the series of a source need."""
    names = {"elapsed_ms", "flags", *(series.name for series in source.series)}
    return names | {"grad_norm"} if "grad_norm_clipped" in names else names


def read_ahead(source: Source, ranges: list[StepRange], buckets: list[BucketRange]) -> None:
    """Read at once what `read_points` and `read_buckets` of these ranges need of a file."""
    if source.frozen is not None:
        size = SIZES[0]
        spans = [(low * size, (high + 1) * size - 1) for each, low, high in buckets if each == size]
        source.frozen.read_ahead(ranges, _columns_of(source), spans)


def read_points_of_runs(
    connection: Connection, sources: Collection[Source], span: StepRange
) -> Iterator[tuple[Source, Points]]:
    """Read the raw points of several runs in one query.

    sources: may differ only in the run.
    """
    by_run = {source.key["run_id"]: source for source in sources}
    first = next(iter(sources))
    query = _points_of_runs_query(first.points, first.series, tuple(first.key))
    rows = _fetch(connection, query, first.key | {"run_ids": list(by_run)} | _bounds([span]))
    if rows:
        run_ids, *columns = zip(*rows, strict=True)
        points = _points(columns, first)
        for start, end in pairwise([0, *np.flatnonzero(np.diff(run_ids)) + 1, len(rows)]):
            source = by_run.pop(run_ids[start])
            yield source, _with_frozen(points[start:end], source, [span])
    for source in by_run.values():
        if source.frozen is not None:
            yield source, _with_frozen(_points([], source), source, [span])


def _points(columns: list[tuple[Any, ...]], source: Source) -> Points:
    """Convert columns in order of step to points. NULL becomes NaN."""
    columns = columns or [()] * (3 + len(source.series))
    step, elapsed_ms, flags = (np.array(column, np.int64) for column in columns[:3])
    values = np.array(columns[3:], float).reshape(len(source.series), len(step))
    return Points(step, elapsed_ms, flags, values.T)


def read_buckets(
    connection: Connection, source: Source, ranges: list[BucketRange]
) -> dict[int, Summaries]:
    """Read ranges of buckets and return their summaries by size."""
    query = _buckets_query(source.buckets, tuple(source.key), len(ranges))
    sizes = {f"size_{n}": size for n, (size, _, _) in enumerate(ranges)}
    bounds = _bounds([(first, last) for _, first, last in ranges])
    rows = _fetch(connection, query, source.key | sizes | bounds)
    by_size = {}
    for size in {size for size, _, _ in ranges}:
        stones = [row for row in rows if row[0] == size]
        start: Ints = np.array([bucket for _, bucket, _ in stones], dtype=np.int64) * size
        packed = [summary for *_, summary in stones]
        summaries = [unpack(start, packed, source.stored, size, source.series)]
        if size == SIZES[0] and source.frozen:
            of_size = [(first, last) for at, first, last in ranges if at == size]
            spans = [(first * size, (last + 1) * size - 1) for first, last in of_size]
            further, packed = _lowest_in_file(source.frozen, spans, start)
            others = unpack(further, packed, source.stored, size, source.series)
            summaries.append(others[~np.isin(further, start)])
        by_size[size] = in_order(summaries)
    return by_size


def _lowest_in_file(
    frozen: Frozen | None, spans: list[StepRange], stored: Ints = EMPTY
) -> tuple[Ints, list[bytes]]:
    """Return start and packed summary of the lowest buckets of a file within spans of buckets.

    stored: starts of buckets that are rows; a span is not read if these are all.
    """
    if frozen is None:
        return EMPTY, []
    size = SIZES[0]
    last = (frozen.end + 1) // size * size - 1  # of a whole bucket
    parts = [(start, min(end, last)) for start, end in spans if start < last]
    lacking = [
        (start, end)
        for start, end in parts
        if ((stored >= start) & (stored <= end)).sum() < (end + 1 - start) // size
    ]
    step, packed = frozen.summaries(lacking)
    return step // size * size, packed


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
    yield column.flags if "flags" in column else literal(0)
    for name, _, _ in series:
        # NULL where the clip changed nothing.
        is_clipped = name == "grad_norm_clipped"
        yield func.coalesce(column[name], column.grad_norm) if is_clipped else column[name]


def _of(table: FromClause, key: tuple[str, ...]) -> list[ColumnElement[bool]]:
    return [table.c[name] == bindparam(name) for name in key]


def _within(column: ColumnElement[Any], number: int = 0) -> ColumnElement[bool]:
    return column.between(bindparam(f"first_{number}"), bindparam(f"last_{number}"))


def _bounds(ranges: list[tuple[int, int]]) -> dict[str, int]:
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


def _siblings(first: int, last: int, size: int) -> BucketRange:
    """Return the buckets of one size that share a parent with these steps."""
    parent = size * FANOUT
    return size, first // parent * FANOUT, last // parent * FANOUT + FANOUT - 1


def _completed(connection: Connection, source: Source, points: Points) -> Points:
    """Return all points of the lowest buckets that these points touch.

    Buckets that the points fill are complete; the others, usually the first and the last, are read
    from the database.
    """
    filled, partial = split(points)
    return in_order([filled, read_points(connection, source, _ranges(partial))])


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
