"""The only writer of `metric_blocks` and `metric_tails`, which db.telemetry.metric_blocks reads.

A flush is a row of the tail. Once the tail is long, the points of all its rows are distributed to
the blocks of their metrics; the last block of a metric is written again until it is full. The
latest flush stays in the tail, from which live charts read it. A short run ends as one row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, func, select

from db.tables import LatestMetric
from db.telemetry import bulk_writes, metric_blocks, metric_points
from db.telemetry.metric_blocks import BLOCKS, TAILS, decode_block, encode_lows, join_tail, within
from db.telemetry.metric_points import MetricPoints
from db.telemetry.pyramid import END, SIZES
from db.telemetry.recorded_losses import record_losses
from db.telemetry.summaries import Ints, Points, in_order

#: Points of a block, at most.
BLOCK_POINTS = 2048
#: A block has summaries of the smallest size of which it has at most so many.
MOST_LOWS = 64
#: Points of a tail that are distributed: for each metric, at least, and at most.
NAME_POINTS, LEAST_POINTS, MOST_POINTS = 128, 2**14, 2**18
#: Metrics whose blocks one flush writes: other writers of SQLite wait meanwhile.
MOST_NAMES = 512
#: Rows of a tail from which on they are joined to one; fewer of rows with so many points.
JOINED_ROWS, JOINED_LONG_ROWS, LONG_ROW_POINTS = 64, 8, 1024
#: The tail of an ended run is distributed if it has LEAST_POINTS, and so many for each metric.
ENDED_POINTS = 64
#: Last step of a metric without earlier points.
NEVER = -1


class _Row(NamedTuple):
    """A row of a tail."""

    revision: int
    previous: int
    points: int
    data: bytes


@record_losses
def write(
    connection: Connection, run_id: int, revision: int, metrics: MetricPoints, before: Ints
) -> None:
    """Write the points of a flush; points that are recorded already are replaced.

    revision: of the run, that no earlier flush has.  before: for each name, its last step before
    these points, or NEVER. The caller holds the lock of the run. Raises StepsNotConverted.
    """
    metric_blocks.check_converted(connection, run_id)
    newest = _shorten_tail(connection, run_id, len(metrics.owner))
    late = np.flatnonzero(metrics.points.step[metrics.first] <= before)
    if len(late):
        metrics = _without_late(connection, run_id, metrics, late)
    if newest is None:  # what a client has seen of earlier points is unknown
        newest = 0 if (before == NEVER).all() else revision - 1
    data = metrics.encode(is_compressed=False)
    _insert_tail(connection, run_id, _Row(revision, newest, len(metrics.owner), data))


@record_losses
def append_converted(
    connection: Connection, run_id: int, revision: int, metrics: MetricPoints
) -> None:
    """Write points that are later than all of their metrics in blocks."""
    _shorten_tail(connection, run_id, len(metrics.owner))
    data = metrics.encode(is_compressed=True)
    _insert_tail(connection, run_id, _Row(revision, revision - 1, len(metrics.owner), data))


@record_losses
def truncate(connection: Connection, run_id: int, *, after: int) -> None:
    """Delete the points after a step. Raises StepsNotConverted."""
    metric_blocks.check_converted(connection, run_id)
    rows = _read_tail(connection, run_id)
    tail = join_tail(run_id, [row.data for row in rows])
    left = tail.chosen(tail.points.step <= after)
    if len(left.owner) < len(tail.owner):
        _replace_tail(connection, run_id, rows, left)
    its = (BLOCKS.c.run_id == run_id, BLOCKS.c.last > after)
    cut = select(BLOCKS.c.name, BLOCKS.c.first, BLOCKS.c.last, BLOCKS.c.data)
    cut = cut.where(*its, BLOCKS.c.first <= after)
    blocks = connection.execute(cut).cursor.fetchall()
    connection.execute(delete(BLOCKS).where(*its))
    made = [
        _block(name, first, None, points)
        for name, first, last, data in blocks
        for block in decode_block(run_id, name, (first, last), data)
        if len(points := within(block, (-END, after)))
    ]
    _insert(connection, run_id, made)


@record_losses
def end_tail(connection: Connection, run_id: int, *, is_live: bool = True) -> None:
    """Join the rows of a run's tail, or distribute them, at the end of an attempt.

    is_live: clients may still need the latest flush.
    """
    rows = _read_tail(connection, run_id)
    points = sum(row.points for row in rows)
    if points >= max(ENDED_POINTS * _count_names(connection, run_id), LEAST_POINTS):
        while len(rows) > is_live:
            _seal(connection, run_id, rows[:-1] if is_live else rows)
            rows = _read_tail(connection, run_id)
    if rows:
        _join(connection, run_id, rows)


def rebuild(connection: Connection, run_id: int) -> None:
    """Compute the summaries and extremes of a run's blocks again."""
    for source in metric_blocks.sources(connection, [run_id]):
        made = []
        ends = [*(head.first for head in source.heads), None]
        for index, head in enumerate(source.heads):
            points = source.decode(connection, [head], metric_points.NAMES)
            if len(points):
                made.append(
                    _block(head.name, head.first, ends[index + 1], points, is_first=index == 0)
                )
        _insert(connection, run_id, made)


def _shorten_tail(connection: Connection, run_id: int, following: int) -> int | None:
    """Distribute or join the rows of a tail if it is long; return the revision of the last one.

    following: number of points that are added.
    """
    number = func.coalesce(func.sum(TAILS.c.points), 0)
    query = select(func.count(), number, func.max(TAILS.c.revision))
    rows, points, newest = connection.execute(query.where(TAILS.c.run_id == run_id)).one()
    if rows and points + following >= _most_points(connection, run_id, int(points)):
        _seal(connection, run_id, _read_tail(connection, run_id))
    elif rows >= (JOINED_LONG_ROWS if following >= LONG_ROW_POINTS else JOINED_ROWS):
        _join(connection, run_id, _read_tail(connection, run_id))
    return None if newest is None else int(newest)


def _most_points(connection: Connection, run_id: int, points: int) -> int:
    if points < LEAST_POINTS // 2:
        return LEAST_POINTS
    number = NAME_POINTS * _count_names(connection, run_id)
    return min(max(number, LEAST_POINTS), MOST_POINTS)


def _count_names(connection: Connection, run_id: int) -> int:
    query = select(func.count()).select_from(LatestMetric).where(LatestMetric.run_id == run_id)
    return connection.scalar(query) or 0


def _read_tail(connection: Connection, run_id: int) -> list[_Row]:
    query = select(*(TAILS.c[name] for name in _Row._fields)).where(TAILS.c.run_id == run_id)
    rows = connection.execute(query.order_by(TAILS.c.revision)).cursor.fetchall()
    return [_Row(*row) for row in rows]


def _join(connection: Connection, run_id: int, rows: Sequence[_Row]) -> None:
    _replace_tail(connection, run_id, rows, join_tail(run_id, [row.data for row in rows]))


def _replace_tail(
    connection: Connection, run_id: int, rows: Sequence[_Row], points: MetricPoints
) -> None:
    """Replace rows of a tail by one."""
    its = (TAILS.c.run_id == run_id, TAILS.c.revision <= rows[-1].revision)
    connection.execute(delete(TAILS).where(*its))
    if len(points.owner):
        data = points.encode(is_compressed=True)
        row = _Row(rows[-1].revision, rows[0].previous, len(points.owner), data)
        _insert_tail(connection, run_id, row)


def _insert_tail(connection: Connection, run_id: int, row: _Row) -> None:
    connection.execute(TAILS.insert(), {"run_id": run_id, **row._asdict()})


def _seal(connection: Connection, run_id: int, rows: Sequence[_Row]) -> None:
    """Distribute the points of rows of a tail to the blocks of those metrics that have the most."""
    tail = join_tail(run_id, [row.data for row in rows])
    counts = np.bincount(tail.owner, minlength=len(tail.names))
    chosen = np.isin(tail.owner, np.argsort(-counts, kind="stable")[:MOST_NAMES])
    sealed = tail.chosen(chosen)
    opened = _last_blocks(connection, run_id, sealed.names)
    made: list[dict[str, Any]] = []
    for name, points in sealed.by_name():
        first, before, is_first = opened.get(name, (int(points.step[0]), [], True))
        made += _split(name, first, None, in_order([*before, points]), is_first=is_first)
    _insert(connection, run_id, made)
    _replace_tail(connection, run_id, rows, tail.chosen(~chosen))


def _last_blocks(
    connection: Connection, run_id: int, names: Sequence[str]
) -> dict[str, tuple[int, list[Points], bool]]:
    """Return the last block of each metric: first step, points, whether it is the only one."""
    ends = select(
        BLOCKS.c.name, func.max(BLOCKS.c.first).label("first"), func.count().label("blocks")
    )
    ends = ends.where(BLOCKS.c.run_id == run_id, BLOCKS.c.name.in_(names)).group_by(BLOCKS.c.name)
    last = ends.subquery().c
    same = (BLOCKS.c.run_id == run_id, BLOCKS.c.name == last.name, BLOCKS.c.first == last.first)
    query = select(last.name, last.first, BLOCKS.c.last, last.blocks, BLOCKS.c.data).where(*same)
    rows = connection.execute(query).cursor.fetchall()
    return {
        name: (first, decode_block(run_id, name, (first, last), data), blocks == 1)
        for name, first, last, blocks, data in rows
    }


def _split(
    name: str, first: int, end: int | None, points: Points, *, is_first: bool
) -> Iterator[dict[str, Any]]:
    """Yield the blocks of points, of which all but the last are full.

    first: the step from which on these blocks have all points.  end: first step of the block after
    them, if any.  is_first: whether there is none before. The edges between blocks are edges of
    buckets as well.
    """
    at, step = 0, points.step
    while len(step) - at > BLOCK_POINTS:
        following = int(step[at + BLOCK_POINTS])
        most = (following - int(step[at])) // 4
        edge = following - following % max(size for size in SIZES if size <= most)
        until = int(np.searchsorted(step, edge))
        yield _block(name, first, edge, points[at:until], is_first=is_first)
        at, first, is_first = until, edge, False
    yield _block(name, first, end, points[at:], is_first=is_first)


def _block(
    name: str, first: int, end: int | None, points: Points, *, is_first: bool = False
) -> dict[str, object]:
    """Return a row. It has summaries unless it is the last block, or begins or ends in a bucket."""
    values = points.values[:, 0]
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (None, None)
    last = int(points.step[-1])
    row = {"name": name, "first": first, "last": last, "points": len(points)}
    row |= {"low": low, "high": high, "size": 0, "lows": b""}
    few = [size for size in SIZES if last // size - first // size < MOST_LOWS]
    edges = [0 if is_first else first, end]
    if few and all(edge is not None and edge % few[0] == 0 for edge in edges):
        row |= {"size": few[0], "lows": encode_lows(points, first, few[0])}
    return row | {"data": metric_points.encode(points)}


def _insert(connection: Connection, run_id: int, rows: Sequence[dict[str, Any]]) -> None:
    """Insert blocks and replace those with the same first step."""
    if not rows:
        return
    # SQLite packs the pages of full blocks only if those that are written again lie apart.
    rows = sorted(rows, key=lambda row: not row["lows"])
    columns: dict[str, bulk_writes.Column] = {
        name: [row[name] for row in rows] for name in ("name", "lows", "data")
    }
    for name in ("first", "last", "points", "size"):
        columns[name] = np.array([row[name] for row in rows], np.int64)
    for name in ("low", "high"):
        columns[name] = np.array([row[name] for row in rows], np.float64)
    bulk_writes.replace(connection, BLOCKS, {"run_id": run_id}, columns)


def _without_late(
    connection: Connection, run_id: int, metrics: MetricPoints, late: Ints
) -> MetricPoints:
    """Write those points into blocks that are not later than these; return the others."""
    names = [metrics.names[index] for index in late.tolist()]
    ends = select(BLOCKS.c.name, func.max(BLOCKS.c.last))
    ends = ends.where(BLOCKS.c.run_id == run_id, BLOCKS.c.name.in_(names)).group_by(BLOCKS.c.name)
    last_of = dict(connection.execute(ends).cursor.fetchall())
    last = np.array([last_of.get(name, -END) for name in metrics.names], np.int64)
    is_late = metrics.points.step <= last[metrics.owner]
    for name, points in metrics.chosen(is_late).by_name():
        _write_late(connection, run_id, name, points)
    return metrics.chosen(~is_late)


def _write_late(connection: Connection, run_id: int, name: str, points: Points) -> None:
    """Write points among those of blocks; the blocks that they touch are written again."""
    query = select(BLOCKS.c.first, BLOCKS.c.last)
    query = query.where(BLOCKS.c.run_id == run_id, BLOCKS.c.name == name)
    firsts = [row[0] for row in connection.execute(query.order_by(BLOCKS.c.first))]
    low, high = (
        max(int(np.searchsorted(firsts, int(points.step[end]), side="right")) - 1, 0)
        for end in (0, -1)
    )
    [source] = metric_blocks.sources(connection, [run_id], [name])
    recorded = source.decode(connection, source.heads[low : high + 1], metric_points.NAMES)
    merged = in_order([recorded[~np.isin(recorded.step, points.step)], points])
    if metric_points.encode(merged) == metric_points.encode(recorded):
        return
    its = (BLOCKS.c.run_id == run_id, BLOCKS.c.name == name)
    touched = BLOCKS.c.first.in_(firsts[low : high + 1])
    connection.execute(delete(BLOCKS).where(*its, touched))
    first = min(firsts[low], int(points.step[0]))
    end = firsts[high + 1] if high + 1 < len(firsts) else None
    made = _split(name, first, end, merged, is_first=low == 0)
    _insert(connection, run_id, list(made))
