"""Points of metrics in blocks: the reader of all that need points.

A metric has blocks of its own, in order of step. What its run has recorded since is the tail: a row
for each flush, with the points of all names, that are later than those of the blocks. Each block
except the last of a metric has the summaries of its points (`lows`), of the smallest size of which
it has few.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, starmap
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Select, TextClause, bindparam, func, select, text

from db.errors import StepsNotConverted
from db.tables import LatestMetric, MetricBlock, MetricTail, StepConversion
from db.telemetry import block_codec, damage, metric_points
from db.telemetry.damage import FLUSH, METRIC, Damage
from db.telemetry.metric_points import NAMES, MetricPoints, no_points
from db.telemetry.pyramid import END, SIZES, BucketRange, StepRange
from db.telemetry.summaries import (
    Points,
    Series,
    Summaries,
    in_order,
    layout,
    merge,
    pack,
    unpack,
)

SERIES = (Series("value", "f8", mean=True),)
#: Columns that charts draw.
DRAWN = ("step", "value")
#: Blocks that one query reads.
READ_BLOCKS = 512

BLOCKS: Any = MetricBlock.__table__
TAILS: Any = MetricTail.__table__


class Head(NamedTuple):
    """A block without its content."""

    run_id: int
    name: str
    first: int
    last: int
    points: int
    size: int


class Point(NamedTuple):
    """A point of a metric."""

    name: str
    step: int
    elapsed_ms: int
    value: float


class Extremes(NamedTuple):
    """Finite extremes of one metric (None if it has none) and its number of points."""

    low: float | None
    high: float | None
    points: int


@dataclass(frozen=True)
class MetricSource:
    """The points of one metric of a run within limits, for charts."""

    key: dict[str, Any]  # run_id and name
    limits: StepRange
    heads: list[Head]  # of the blocks that overlap the limits
    tail: Points
    series = SERIES

    @property
    def most_points(self) -> int:
        """A number that it has no more points than."""
        return sum(head.points for head in self.heads) + len(self.tail)

    def span(self, connection: Connection) -> StepRange | None:
        """Return the first and last step, or None without points."""
        ends = [self._first_of(connection, order) for order in (self.heads, self.heads[::-1])]
        steps = [int(part.step[at]) for at, part in zip((0, -1), ends, strict=True) if len(part)]
        steps += [int(self.tail.step[at]) for at in (0, -1) if len(self.tail)]
        return (min(steps), max(steps)) if steps else None

    def _first_of(self, connection: Connection, heads: Iterable[Head]) -> Points:
        parts = (self.decode(connection, [head]) for head in heads)
        return next((part for part in parts if len(part)), no_points())

    def read_points(
        self,
        connection: Connection,
        ranges: Sequence[StepRange],
        names: Sequence[str] = DRAWN,
    ) -> Points:
        """Read the points of ranges of steps. names: columns; the time is 0 without elapsed_ms."""
        heads = [
            head
            for head in self.heads
            if any(head.first <= last and head.last >= first for first, last in ranges)
        ]
        points = in_order([self.decode(connection, heads, names), self.tail])
        is_within = np.zeros(len(points), bool)
        for first, last in ranges:
            is_within |= (points.step >= first) & (points.step <= last)
        return points[is_within]

    def read_buckets(
        self, connection: Connection, ranges: Sequence[BucketRange]
    ) -> dict[int, Summaries]:
        """Read ranges of buckets and return their summaries by size."""
        spans = [(low * size, (high + 1) * size - 1, size) for size, low, high in ranges]
        lows, others = list[Head](), list[Head]()
        for head in self.heads:
            sizes = [
                size for first, last, size in spans if head.first <= last and head.last >= first
            ]
            if sizes:
                (lows if 0 < head.size <= min(sizes) else others).append(head)
        points = in_order([self.decode(connection, others), self.tail])
        summaries = self._lows(connection, lows)
        return {
            size: in_order(
                [
                    _within(points, summaries, low * size, (high + 1) * size, size)
                    for bucket_size, low, high in ranges
                    if bucket_size == size
                ]
            )
            for size in {size for size, _, _ in ranges}
        }

    def decode(
        self, connection: Connection, heads: Sequence[Head], names: Sequence[str] = DRAWN
    ) -> Points:
        """Return the points of blocks within the limits."""
        parts, last = [no_points()], {head.first: head.last for head in heads}
        for first, data in self._read(connection, "data", heads):
            span = (first, last[first])
            parts += decode_block(self.key["run_id"], self.key["name"], span, data, names=names)
        return within(in_order(parts), self.limits)

    def _lows(self, connection: Connection, heads: Sequence[Head]) -> dict[int, Summaries]:
        """Return the summaries of blocks by size; those of a damaged block are computed."""
        sizes = {head.first: head.size for head in heads}
        found: dict[int, list[tuple[int, bytes]]] = {}
        parts: dict[int, list[Summaries]] = {}
        for first, lows in self._read(connection, "lows", heads):
            size = sizes[first]
            try:
                kind, content = block_codec.content_of(lows)
                if kind != block_codec.METRIC_LOWS:
                    raise block_codec.Damaged(f"its format is {kind}")
                found.setdefault(size, []).append((first // size, content))
            except block_codec.Damaged:
                [head] = [head for head in heads if head.first == first]
                points = self.decode(connection, [head])
                parts.setdefault(size, []).append(raise_to({0: Summaries.of(points)}, size))
        for size, some in found.items():
            parts.setdefault(size, []).append(_unpack_summaries(some, size))
        return {size: in_order(some) for size, some in parts.items()}

    def _read(
        self, connection: Connection, content: str, heads: Sequence[Head]
    ) -> Iterator[tuple[int, bytes]]:
        query = _content_query(content)
        for at in range(0, len(heads), READ_BLOCKS):
            firsts = [head.first for head in heads[at : at + READ_BLOCKS]]
            yield from connection.execute(query, self.key | {"firsts": firsts}).cursor.fetchall()


def sources(
    connection: Connection,
    run_ids: Collection[int],
    names: Collection[str] | None = None,
    limits: StepRange = (-END, END),
    *,
    columns: Sequence[str] = NAMES,
    is_converted: bool = True,
) -> list[MetricSource]:
    """Return the metrics of runs, in order of name.

    names: only these.  columns: of their tails.  is_converted: False if a conversion is reading.
    Raises StepsNotConverted.
    """
    of_tails = tails(connection, run_ids, names, columns=columns, is_converted=is_converted)
    heads: dict[tuple[str, int], list[Head]] = {}
    for head in _heads(connection, run_ids, names, limits):
        heads.setdefault((head.name, head.run_id), []).append(head)
    tail = {
        (name, run_id): within(points, limits)
        for run_id, of_run in of_tails.items()
        for name, points in of_run.by_name()
    }
    return [
        MetricSource(
            {"run_id": run_id, "name": name},
            limits,
            heads.get((name, run_id), []),
            tail.get((name, run_id), no_points()),
        )
        for name, run_id in sorted({*heads, *tail})
    ]


def read_points(
    connection: Connection, some: Sequence[MetricSource], names: Sequence[str] = DRAWN
) -> Iterator[tuple[MetricSource, Points]]:
    """Read all points of metrics with few blocks, in one query. some: with the same limits."""
    keys = {key: {source.key[key] for source in some if source.heads} for key in ("run_id", "name")}
    parts: dict[tuple[int, str], list[Points]] = {}
    if keys["name"]:
        first, last = some[0].limits
        given = {"run_ids": [*keys["run_id"]], "names": [*keys["name"]]}
        query = _overlapping_query(("run_id", "name", "first", "last", "data"), are_named=True)
        rows = connection.execute(query, given | {"first": first, "last": last}).cursor.fetchall()
        for run_id, name, *span, data in rows:
            read = decode_block(run_id, name, (span[0], span[1]), data, names=names)
            parts.setdefault((run_id, name), []).extend(read)
    for source in some:
        mine = parts.get((source.key["run_id"], source.key["name"]), [])
        points = in_order([no_points(), *mine])
        yield source, in_order([within(points, source.limits), source.tail])


def tails(
    connection: Connection,
    run_ids: Collection[int],
    names: Collection[str] | None = None,
    *,
    columns: Sequence[str] = NAMES,
    is_converted: bool = True,
) -> dict[int, MetricPoints]:
    """Return the points of the tail of each run. names: only these. Raises StepsNotConverted."""
    rows = connection.execute(_tails_query(), {"run_ids": list(run_ids)}).cursor.fetchall()
    found = {}
    for run_id, of_run in groupby(rows, lambda row: row[0]):
        parts = []
        for _, waits, data in of_run:
            if waits is not None and is_converted:
                raise StepsNotConverted(run_id)
            if data is not None:
                parts.append(data)
        found[run_id] = join_tail(run_id, parts, names, columns)
    return found


def join_tail(
    run_id: int,
    parts: Sequence[bytes],
    names: Collection[str] | None = None,
    columns: Sequence[str] = NAMES,
) -> MetricPoints:
    """Return the points of the rows of a tail; a damaged one is left out."""
    try:
        return MetricPoints.join(parts, names, columns)
    except block_codec.Damaged as error:
        damage.note(Damage(run_id, FLUSH), error)
        return MetricPoints.join(filter(block_codec.is_intact, parts), names, columns)


def decode_block(
    run_id: int, name: str, span: StepRange, data: bytes, *, names: Sequence[str] = NAMES
) -> list[Points]:
    """Return the points of a block; none if it is damaged. span: its first and last step."""
    try:
        return [metric_points.decode(data, names)]
    except block_codec.Damaged as error:
        damage.note(Damage(run_id, METRIC, *span, name), error)
        return []


def within(points: Points, span: StepRange) -> Points:
    """Return the points of a range of steps."""
    low = np.searchsorted(points.step, span[0])
    return points[low : np.searchsorted(points.step, span[1], side="right")]


def raise_to(parts: dict[int, Summaries], size: int) -> Summaries:
    """Merge summaries of smaller sizes into those of a size, one size after the other.

    parts: by size, of different points; 0: of single points.
    """
    merged = parts.get(0, Summaries.of(no_points()))
    for smaller in SIZES[: SIZES.index(size) + 1]:
        merged = merge(merged, smaller)
        if smaller in parts:
            merged = in_order([merged, parts[smaller]])
    return merged


def _within(
    points: Points, summaries: dict[int, Summaries], first: int, end: int, size: int
) -> Summaries:
    """Return the summaries of a size of the steps from first to before end."""
    parts = {0: Summaries.of(within(points, (first, end - 1)))}
    for smaller, some in summaries.items():
        if smaller <= size:
            parts[smaller] = some[(some.start >= first) & (some.start < end)]
    return raise_to(parts, size)


def encode_lows(points: Points, first: int, size: int) -> bytes:
    """Return the summaries of a block that begins at step `first`: bucket offsets, then packed."""
    summaries = raise_to({0: Summaries.of(points)}, size)
    offsets = (summaries.start // size - first // size).astype(np.uint8)
    packed = pack(summaries, SERIES, size)
    return block_codec.add_checksum(block_codec.METRIC_LOWS, offsets.tobytes() + b"".join(packed))


def _unpack_summaries(some: Sequence[tuple[int, bytes]], size: int) -> Summaries:
    """Return the summaries of blocks of the same size. some: first bucket and content of each."""
    length = 1 + layout(SERIES, size).itemsize
    counts = [len(content) // length for _, content in some]
    offsets = b"".join(content[:count] for count, (_, content) in zip(counts, some, strict=True))
    first = np.repeat(np.array([bucket for bucket, _ in some], np.int64), counts)
    packed = [content[count:] for count, (_, content) in zip(counts, some, strict=True)]
    return unpack((first + np.frombuffer(offsets, np.uint8)) * size, packed, SERIES, size)


def extremes(
    connection: Connection, run_ids: Collection[int], names: Collection[str] | None = None
) -> dict[tuple[int, str], Extremes]:
    """Return the extremes of each metric of runs. names: only these."""
    query = select(
        BLOCKS.c.run_id,
        BLOCKS.c.name,
        func.min(BLOCKS.c.low),
        func.max(BLOCKS.c.high),
        func.sum(BLOCKS.c.points),
    ).where(BLOCKS.c.run_id.in_(run_ids))
    if names is not None:
        query = query.where(BLOCKS.c.name.in_(names))
    rows = connection.execute(query.group_by(BLOCKS.c.run_id, BLOCKS.c.name)).cursor.fetchall()
    found = {(row[0], row[1]): Extremes(row[2], row[3], int(row[4])) for row in rows}
    for run_id, tail in tails(connection, run_ids, names, columns=DRAWN).items():
        if not tail.names:
            continue
        values = tail.points.values[:, 0]
        values = np.where(np.isfinite(values), values, np.nan)
        low, high = (of.reduceat(values, tail.first).tolist() for of in (np.fmin, np.fmax))
        counts = (tail.last - tail.first + 1).tolist()
        for name, *mine in zip(tail.names, low, high, counts, strict=True):
            before = found.get((run_id, name), Extremes(None, None, 0))
            found[run_id, name] = Extremes(
                _to_number(np.fmin(_or_nan(before.low), mine[0])),
                _to_number(np.fmax(_or_nan(before.high), mine[1])),
                before.points + mine[2],
            )
    return found


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _to_number(value: Any) -> float | None:
    return None if value != value else float(value)


def count(connection: Connection, run_id: int, *, is_converted: bool = True) -> int:
    """Count the points of a run."""
    number = select(func.coalesce(func.sum(BLOCKS.c.points), 0)).where(BLOCKS.c.run_id == run_id)
    steps = tails(connection, [run_id], columns=("step",), is_converted=is_converted)
    tail = steps.get(run_id, MetricPoints.none())
    return int(connection.scalar(number) or 0) + len(tail.owner)


def points_at(connection: Connection, run_id: int, name: str, steps: Collection[int]) -> Points:
    """Return the points of a metric at some steps."""
    ranges = [(step, step) for step in steps]
    for source in sources(connection, [run_id], [name]):
        return source.read_points(connection, ranges, NAMES)
    return no_points()


def first_finite(
    connection: Connection, run_id: int, name: str, step: int = -END, *, number: int = 1
) -> float | None:
    """Return the first finite value of a metric from a step on, or the one of a number."""
    for source in sources(connection, [run_id], [name], (step, END)):
        spans = [(head.first, head.last) for head in source.heads] or [(step, END)]
        for first, last in [*spans[:-1], (spans[-1][0], END)]:
            values = source.read_points(connection, [(first, last)]).values[:, 0]
            finite = values[np.isfinite(values)]
            if len(finite) >= number:
                return float(finite[number - 1])
            number -= len(finite)
    return None


def last_points(
    connection: Connection,
    run_id: int,
    names: Collection[str] | None = None,
    *,
    is_converted: bool = True,
) -> dict[str, tuple[int, float]]:
    """Return step and value of the last point of each metric. names: only these."""
    found = {}
    for source in sources(connection, [run_id], names, is_converted=is_converted):
        last = source.tail if len(source.tail) else source._first_of(connection, source.heads[::-1])
        if len(last):
            found[source.key["name"]] = int(last.step[-1]), float(last.values[-1, 0])
    return found


def last_elapsed_ms(connection: Connection, run_id: int) -> int | None:
    """Return the latest time of all points of a run."""
    parts = [
        source.read_points(connection, [(-END, END)], NAMES)
        for source in sources(connection, [run_id])
    ]
    return max((int(part.elapsed_ms.max()) for part in parts if len(part)), default=None)


def page(
    connection: Connection,
    run_id: int,
    *,
    after: tuple[str, int] = ("", -END),
    limit: int,
) -> list[Point]:
    """Return the first `limit` points after a name and step, in order of name and step."""
    latest = select(LatestMetric.name).where(LatestMetric.run_id == run_id)
    names = sorted(connection.scalars(latest))
    names = names[bisect_left(names, after[0]) :][: limit + 1]  # each has a point
    tail = tails(connection, [run_id], names).get(run_id, MetricPoints.none())
    at, found = dict(zip(tail.names, range(len(tail.names)), strict=True)), list[Point]()
    limits = (-END, END)
    heads = [
        head
        for at in range(0, len(names), READ_BLOCKS)
        for head in _heads(connection, [run_id], names[at : at + READ_BLOCKS], limits)
    ]
    by_name = {name: list(some) for name, some in groupby(heads, lambda head: head.name)}
    for name in names:
        first = after[1] + 1 if name == after[0] else -END
        mine = [head for head in by_name.get(name, []) if head.last >= first]
        source = MetricSource({"run_id": run_id, "name": name}, (first, END), mine, no_points())
        parts = (source.decode(connection, [head], NAMES) for head in mine)
        tail_part = within(tail.of_index(at[name]), (first, END)) if name in at else no_points()
        for part in chain(parts, [tail_part]):
            found += to_points(name, part[: limit - len(found)])
            if len(found) == limit:
                return found
    return found


def to_points(name: str, points: Points) -> Iterator[Point]:
    """Yield the points of a metric."""
    columns = (points.step, points.elapsed_ms, points.values[:, 0])
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield Point(name, *row)


class News(NamedTuple):
    """Points of the flushes after one."""

    points: list[Point]
    flush: int  # the last of these flushes
    is_full: bool  # there are more
    is_complete: bool  # False if earlier flushes are in blocks already


def news(
    connection: Connection,
    run_id: int,
    since: int,
    names: Collection[str] | None,
    most: int,
) -> News:
    """Return the points of the flushes after one, whole flushes of about `most` points."""
    query = select(TAILS.c.revision, TAILS.c.previous, TAILS.c.data)
    query = query.where(TAILS.c.run_id == run_id, TAILS.c.revision > since)
    points: list[Point] = []
    flush, is_complete, is_full = since, True, False
    for revision, previous, data in connection.execute(query.order_by(TAILS.c.revision)).all():
        if len(points) >= most:
            is_full = True
            break
        is_complete = is_complete and previous <= flush
        flush = revision
        for name, some in join_tail(run_id, [data], names).by_name():
            points += to_points(name, some)
    return News(points, flush, is_full, is_complete)


def _heads(
    connection: Connection,
    run_ids: Collection[int],
    names: Collection[str] | None,
    span: StepRange,
) -> list[Head]:
    given: dict[str, Any] = {"run_ids": list(run_ids), "first": span[0], "last": span[1]}
    if names is not None:
        given["names"] = list(names)
    query = _overlapping_query(Head._fields, are_named=names is not None)
    return list(starmap(Head, connection.execute(query, given).cursor.fetchall()))


@cache
def _overlapping_query(columns: tuple[str, ...], *, are_named: bool) -> Any:
    its = [BLOCKS.c.run_id.in_(bindparam("run_ids", expanding=True))]
    if are_named:
        its.append(BLOCKS.c.name.in_(bindparam("names", expanding=True)))
    its += [BLOCKS.c.first <= bindparam("last"), BLOCKS.c.last >= bindparam("first")]
    query = select(*(BLOCKS.c[name] for name in columns)).where(*its)
    return query.order_by(BLOCKS.c.run_id, BLOCKS.c.name, BLOCKS.c.first)


@cache
def _content_query(content: str) -> Any:
    its = (BLOCKS.c.run_id == bindparam("run_id"), BLOCKS.c.name == bindparam("name"))
    some = BLOCKS.c.first.in_(bindparam("firsts", expanding=True))
    return select(BLOCKS.c.first, BLOCKS.c[content]).where(*its, some).order_by(BLOCKS.c.first)


@cache
def _tails_query() -> TextClause:
    return text(
        """
        SELECT r.id, w.run_id, t.data FROM runs AS r
        LEFT JOIN step_conversions AS w ON w.run_id = r.id AND w.metrics_wait
        LEFT JOIN metric_tails AS t ON t.run_id = r.id
        WHERE r.id IN :run_ids ORDER BY r.id, t.revision
        """
    ).bindparams(bindparam("run_ids", expanding=True))


def check_converted(connection: Connection, run_id: int) -> None:
    """Check that the metrics of a run are in blocks. Raises StepsNotConverted."""
    if connection.execute(_waits_query(), {"run_id": run_id}).cursor.fetchone() is not None:
        raise StepsNotConverted(run_id)


@cache
def _waits_query() -> Select[int]:
    query = select(StepConversion.run_id).where(StepConversion.run_id == bindparam("run_id"))
    return query.where(StepConversion.metrics_wait)
