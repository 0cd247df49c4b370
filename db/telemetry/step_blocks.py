"""Steps of runs in blocks: the reader of all that need steps.

A run has sealed blocks and a tail of small ones. A sealed block has its summaries of 64 steps, and
`step_buckets` has those of 512 and more steps of sealed blocks; readers add the tail.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, groupby, starmap
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, TextClause, bindparam, func, select, text

from db.errors import StepsNotConverted
from db.tables import StepBlock, StepBucket, StepConversion
from db.telemetry import block_codec, damage
from db.telemetry.block_codec import NAMES, Columns
from db.telemetry.damage import STEPS, Damage
from db.telemetry.pyramid import (
    END,
    SIZES,
    STEP_SERIES,
    BucketRange,
    StepRange,
    siblings,
    sum_up,
)
from db.telemetry.summaries import Ints, Points, Series, Summaries, in_order, merge, pack, unpack
from halfstep.telemetry.flags import NONFINITE_LOSS, NOT_STEPPED, SKIPPED

#: Step numbers of a range: the edges of sealed blocks are edges of ranges.
RANGE = SIZES[2]
FLAGS = SKIPPED | NONFINITE_LOSS | NOT_STEPPED

BLOCKS: Any = StepBlock.__table__


class Newest(NamedTuple):
    """The last block of a run."""

    first: int
    last: int
    is_sealed: bool

    @property
    def end(self) -> int:
        """The last step that this block may get; later ones are of a new block."""
        return (self.last // RANGE + 1) * RANGE - 1 if self.is_sealed else self.last


class Block(NamedTuple):
    """A block and its column `data`, or `lows` if these were requested."""

    run_id: int
    first: int
    last: int
    is_sealed: bool
    content: bytes

    @property
    def is_small(self) -> bool:
        """Whether it is a part of the tail that is not compressed."""
        return self.content[:1] == bytes([block_codec.RECORDS])


def newest_block(connection: Connection, run_id: int, until: int = END) -> Newest | None:
    """Return the last block that begins until a step."""
    given = {"run_id": run_id, "until": until}
    row = connection.execute(_newest_query(), given).cursor.fetchone()
    return None if row is None else Newest(*row)


@cache
def _newest_query() -> Any:
    query = select(BLOCKS.c.first, BLOCKS.c.last, BLOCKS.c.is_sealed)
    of_run = (BLOCKS.c.run_id == bindparam("run_id"), BLOCKS.c.first <= bindparam("until"))
    return query.where(*of_run).order_by(BLOCKS.c.first.desc()).limit(1)


@dataclass(frozen=True)
class StepSource:
    """The steps of a run, for charts."""

    key: dict[str, Any]  # run_id
    series: tuple[Series, ...]  # the requested series
    damaged: list[StepRange] = field(default_factory=list)  # blocks that could not be read

    @classmethod
    def of(cls, run_id: int, names: Collection[str] | None = None) -> Self:
        """Return the steps of a run. names: only these series."""
        series = tuple(each for each in STEP_SERIES if names is None or each.name in names)
        return cls({"run_id": run_id}, series)

    def read_points(self, connection: Connection, ranges: Sequence[StepRange]) -> Points:
        """Read the steps of ranges, which do not overlap."""
        run_id, names = self.key["run_id"], _names_of(self.series)
        parts = [
            within(self._join(overlapping(connection, run_id, span), names), span)
            for span in ranges
            if span[0] <= span[1]
        ]
        return points_of(block_codec.join(parts, names), self.series)

    @staticmethod
    def read_points_of_runs(
        connection: Connection, sources: Collection["StepSource"], span: StepRange
    ) -> Iterator[tuple["StepSource", Points]]:
        """Read the steps of several runs in one query. sources: may differ only in the run."""
        by_run = {source.key["run_id"]: source for source in sources}
        rows = _overlapping_of_runs(connection, list(by_run), span)
        for run_id, of_run in groupby(rows, lambda block: block.run_id):
            source = by_run[run_id]
            columns = within(source._join(list(of_run), _names_of(source.series)), span)
            if len(columns["step"]):
                yield source, points_of(columns, source.series)

    def read_buckets(
        self, connection: Connection, ranges: Sequence[BucketRange]
    ) -> dict[int, Summaries]:
        """Read ranges of buckets and return their summaries by size."""
        run_id, by_size = self.key["run_id"], {}
        ranges = [span for span in ranges if span[1] <= span[2]]
        if not ranges:
            return {}
        stored = read_stored_buckets(
            connection, run_id, [span for span in ranges if span[0] != SIZES[0]], self.series
        )
        tail = self._tail(connection, ranges)
        for size in {size for size, _, _ in ranges}:
            buckets = [(low, high) for bucket_size, low, high in ranges if bucket_size == size]
            parts = []
            if size == SIZES[0]:
                parts += [self._lows(connection, *bucket) for bucket in buckets]
            if size in stored:
                is_other = ~np.isin(stored[size].start, tail[size].start)
                parts.append(stored[size][is_other])
            at = tail[size].start // size
            is_within = np.any([(at >= low) & (at <= high) for low, high in buckets], axis=0)
            by_size[size] = in_order([*parts, tail[size][is_within]])
        return by_size

    def _join(self, rows: Sequence[Block], names: Collection[str]) -> Columns:
        return join_steps(rows, names, self.damaged)

    def _tail(self, connection: Connection, ranges: Sequence[BucketRange]) -> dict[int, Summaries]:
        """Return the buckets of each size that have steps of the tail, as if it were sealed."""
        run_id, series = self.key["run_id"], self.series
        last = max((high + 1) * size - 1 for size, _, high in ranges)
        columns = self._join(tail_blocks(connection, run_id, last), _names_of(series))
        none = unpack(np.empty(0, np.int64), [], series, SIZES[0])
        if not len(columns["step"]):
            return dict.fromkeys(SIZES, none)
        there = dict.fromkeys(SIZES, none)
        largest = max(size for size, _, _ in ranges)
        if largest > RANGE:  # one of them may have sealed steps too
            span = (int(columns["step"][0]), int(columns["step"][-1]))
            above = [siblings(*span, size) for size in SIZES[2:]]
            there |= read_stored_buckets(connection, run_id, above, series)
        sizes = SIZES[: SIZES.index(largest) + 1]
        points = points_of(columns, series)
        start, size, packed = sum_up(points, there, series, sizes=sizes)
        return {
            bucket_size: unpack(
                start[size == bucket_size],
                list(compress(packed, size == bucket_size)),
                series,
                bucket_size,
            )
            for bucket_size in sizes
        }

    def _lows(self, connection: Connection, low: int, high: int) -> Summaries:
        """Return the summaries of 64 steps of sealed blocks within a range of buckets."""
        size = SIZES[0]
        span = (low * size, (high + 1) * size - 1)
        numbers, packed = [np.empty(0, np.int64)], list[bytes]()
        for block in overlapping(connection, self.key["run_id"], span, content="lows"):
            if block.is_sealed:
                found, summaries = self._lows_of(connection, block)
                is_within = (found >= low) & (found <= high)
                numbers.append(found[is_within])
                packed += compress(summaries, is_within)
        start = np.concatenate(numbers) * size
        return unpack(start, packed, STEP_SERIES, size, self.series)

    def _lows_of(self, connection: Connection, block: Block) -> tuple[Ints, list[bytes]]:
        try:
            return block_codec.decode_lows(block.content)
        except block_codec.Damaged:
            span = (block.first, block.last)
            columns = self._join(overlapping(connection, block.run_id, span), NAMES)
            low = merge(Summaries.of(points_of(columns, STEP_SERIES)), SIZES[0])
            return low.start // SIZES[0], pack(low, STEP_SERIES, SIZES[0])


def points_of(columns: Columns, series: Sequence[Series]) -> Points:
    """Return the values of series at steps."""
    values = np.empty((len(columns["step"]), len(series)))
    for index, each in enumerate(series):
        is_clipped = each.name == "grad_norm_clipped"
        values[:, index] = get_applied_norm(columns) if is_clipped else columns[each.name]
    return Points(columns["step"], columns["elapsed_ms"], columns["flags"], values)


def get_applied_norm(columns: Columns) -> NDArray[np.generic]:
    """Return grad_norm_clipped with grad_norm where the clip changed nothing."""
    clipped = columns["grad_norm_clipped"]
    return np.where(np.isnan(clipped), columns["grad_norm"], clipped)


def _names_of(series: Collection[Series]) -> set[str]:
    names = {"step", "elapsed_ms", "flags", *(each.name for each in series)}
    return names | {"grad_norm"} if "grad_norm_clipped" in names else names


def read_columns(
    connection: Connection, run_id: int, span: StepRange, *, most: int = END
) -> Columns:
    """Return the first `most` steps of a range."""
    parts, number = [], 0
    for block in blocks(connection, run_id, span):
        parts.append(within(join_steps([block], NAMES), span))
        number += len(parts[-1]["step"])
        if number >= most:
            break
    return block_codec.chosen(block_codec.join(parts), slice(0, most))


def read_converted(connection: Connection, run_id: int, first: int, last: int) -> Columns:
    """Return the steps of a range of a run that is being converted."""
    query = select(*(BLOCKS.c[name] for name in (*Block._fields[:-1], "data")))
    its = (BLOCKS.c.run_id == run_id, BLOCKS.c.first <= last, BLOCKS.c.last >= first)
    rows = _fetch(connection, query.where(*its).order_by(BLOCKS.c.first), {})
    return within(join_steps(rows, NAMES), (first, last))


def blocks(connection: Connection, run_id: int, span: StepRange = (-END, END)) -> Iterator[Block]:
    """Yield the blocks of a run that overlap a range of steps, in order, a few at a time."""
    first, most = span[0], 1
    while rows := overlapping(connection, run_id, (first, span[1]), most=most):
        yield from rows
        first, most = rows[-1].last + 1, min(4 * most, 64)


def latest(
    connection: Connection, run_ids: Collection[int], names: Collection[str], *, steps: int
) -> dict[int, Columns]:
    """Return columns of the steps after `Run.step - steps` of each run that has such steps.

    Runs that are not converted yet are left out.
    """
    names = {"step", *names}
    given = {"run_ids": list(run_ids), "steps": steps}
    rows = connection.execute(_latest_query(), given).cursor.fetchall() if run_ids else []
    found = {}
    for run_id, of_run in groupby(rows, lambda row: row[1]):
        parts = list(of_run)
        columns = join_steps([Block(*row[1:]) for row in parts], names)
        columns = within(columns, (parts[0][0] - steps + 1, END))
        if len(columns["step"]):
            found[run_id] = columns
    return found


def largest(connection: Connection, run_ids: Collection[int]) -> dict[int, Summaries]:
    """Return summaries of all steps of runs, from their largest buckets and their tails."""
    query = select(StepBucket.run_id, StepBucket.bucket, StepBucket.summary)
    query = query.where(StepBucket.run_id.in_(run_ids), StepBucket.size == SIZES[-1])
    parts: dict[int, list[Summaries]] = {}
    stored = connection.execute(query.order_by(StepBucket.run_id, StepBucket.bucket)).all()
    for run_id, of_run in groupby(stored, lambda row: row[0]):
        buckets, packed = zip(*((row[1], row[2]) for row in of_run), strict=True)
        start = np.array(buckets, np.int64) * SIZES[-1]
        parts[run_id] = [unpack(start, list(packed), STEP_SERIES, SIZES[-1])]
    tails = _fetch(connection, _tails_query(), {"run_ids": list(run_ids)})
    for run_id, tail in groupby(tails, lambda block: block.run_id):
        points = points_of(join_steps(list(tail), NAMES), STEP_SERIES)
        parts.setdefault(run_id, []).append(Summaries.of(points))
    return {run_id: in_order(some) for run_id, some in parts.items()}


def steps_per_second(connection: Connection, run_id: int) -> float | None:
    """Return the mean steps per second of a run, or None if it has no timed steps."""
    summaries = largest(connection, [run_id]).get(run_id)
    if summaries is None:
        return None
    step_us = summaries.mean[:, [series.name for series in STEP_SERIES].index("step_us")]
    total_us = float((step_us * summaries.steps).sum())
    return 1e6 * int(summaries.steps.sum()) / total_us if total_us > 0 else None


def end_of(connection: Connection, run_id: int) -> tuple[int | None, int | None]:
    """Return the time of the last step, and the step from which on no loss was finite, if any."""
    elapsed_ms, lost_since, end = None, None, END
    while (newest := newest_block(connection, run_id, end)) is not None:
        columns = join_steps(overlapping(connection, run_id, (newest.first, newest.last)), NAMES)
        is_lost = columns["flags"] & NONFINITE_LOSS != 0
        if elapsed_ms is None and len(is_lost):
            elapsed_ms = int(columns["elapsed_ms"][-1])
        finite = np.flatnonzero(~is_lost)
        if len(finite) < len(is_lost) and (not len(finite) or finite[-1] < len(is_lost) - 1):
            lost_since = int(columns["step"][finite[-1] + 1 if len(finite) else 0])
        if len(finite):
            break
        end = newest.first - 1
    return elapsed_ms, lost_since


def count(connection: Connection, run_id: int) -> int:
    """Count the recorded steps of a run."""
    query = select(func.coalesce(func.sum(BLOCKS.c.steps), 0)).where(BLOCKS.c.run_id == run_id)
    return int(connection.scalar(query) or 0)


def count_summarized_steps(connection: Connection, run_id: int) -> int:
    """Count the steps of a run by its summaries, also those that no block has any more."""
    summaries = largest(connection, [run_id]).get(run_id)
    return 0 if summaries is None else int(summaries.steps.sum())


def last_step(connection: Connection, run_id: int) -> int | None:
    """Return the last recorded step of a run."""
    newest = newest_block(connection, run_id)
    return None if newest is None else newest.last


def spans(
    connection: Connection, run_ids: Collection[int], limits: StepRange
) -> dict[int, StepRange]:
    """Return the first and last recorded step within limits of each run that has any.

    Raises StepsNotConverted.
    """
    given = {"run_ids": list(run_ids), "first": limits[0], "last": limits[1]}
    found = {}
    rows = connection.execute(_spans_query(), given).cursor.fetchall()
    for run_id, waits, *edges in rows:
        _check_converted(run_id, waits)
        span = _span(connection, run_id, limits, _Edges(*edges))
        if span is not None:
            found[run_id] = span
    return found


class _Edges(NamedTuple):
    """Blocks of a run at the edges of a range of steps; None: there is no such block."""

    before: int | None  # last step of the block that begins before the range
    is_dense: bool | None  # it has each step until then
    following: int | None  # first step of the next block
    last: int | None  # last step of the last block that begins before the range's end
    is_last_dense: bool | None


def _span(
    connection: Connection, run_id: int, limits: StepRange, edges: _Edges
) -> StepRange | None:
    """Return the first and last step within limits."""
    first = edges.following
    if edges.before is not None and edges.before >= limits[0]:
        first = limits[0] if edges.is_dense else None
    if edges.last is None:
        return None
    end = edges.last if edges.last <= limits[1] else limits[1] if edges.is_last_dense else None
    if first is not None and end is not None:
        return (first, end) if first <= end else None
    # Where steps are sparse, their numbers have to be read.
    steps = [
        columns["step"]
        for block in blocks(connection, run_id, limits)
        if len((columns := within(join_steps([block], {"step"}), limits))["step"])
    ]
    return (int(steps[0][0]), int(steps[-1][-1])) if steps else None


def overlapping(
    connection: Connection,
    run_id: int,
    span: StepRange,
    *,
    content: str = "data",
    most: int = END,
) -> list[Block]:
    """Return the blocks of a run with steps in a range, and their column `content`."""
    return _overlapping_of_runs(connection, [run_id], span, content=content, most=most)


def _overlapping_of_runs(
    connection: Connection,
    run_ids: Sequence[int],
    span: StepRange,
    *,
    content: str = "data",
    most: int = END,
) -> list[Block]:
    """Return the blocks that overlap a range of steps, of each run in order.

    content: the column that is read.  most: the first so many blocks. Raises StepsNotConverted.
    """
    given = {"run_ids": run_ids, "first": span[0], "last": span[1], "most": most}
    rows = connection.execute(_overlapping_query(content), given).cursor.fetchall()
    for waits, run_id, *_ in rows:
        _check_converted(run_id, waits)
    return [Block(*row[1:]) for row in rows if row[2] is not None]


def check_converted(connection: Connection, run_id: int) -> None:
    """Check that the steps of a run are in blocks. Raises StepsNotConverted."""
    row = connection.execute(_conversion_query(), {"run_id": run_id}).cursor.fetchone()
    _check_converted(run_id, row)


@cache
def _conversion_query() -> Select[int]:
    query = select(StepConversion.run_id).where(StepConversion.run_id == bindparam("run_id"))
    return query.where(~StepConversion.is_verified)


def _check_converted(run_id: int, waits: object) -> None:
    if waits is not None:
        raise StepsNotConverted(run_id)


def tail_blocks(connection: Connection, run_id: int, last: int = END) -> list[Block]:
    """Return the blocks of a run's tail that begin until a step."""
    return _fetch(connection, _tail_query(), {"run_id": run_id, "last": last})


def _fetch(connection: Connection, query: Any, given: dict[str, object]) -> list[Block]:
    # Directly from the driver: thousands of SQLAlchemy rows would take twice the time.
    return list(starmap(Block, connection.execute(query, given).cursor.fetchall()))


#: The last block that begins until a step. Blocks do not overlap, so only this one may contain it.
_BEFORE = "FROM step_blocks WHERE run_id = r.id AND first <= {} ORDER BY first DESC LIMIT 1"
_OF_RUNS = """FROM runs AS r
LEFT JOIN step_conversions AS w ON w.run_id = r.id AND NOT w.is_verified"""
_RUN_IDS: Any = bindparam("run_ids", expanding=True)


@cache
def _overlapping_query(content: str) -> TextClause:
    # The start as a value: databases look it up in the key, instead of reading all earlier blocks.
    return text(
        f"""
        WITH starts AS MATERIALIZED (
            SELECT r.id, w.run_id AS waits,
            coalesce((SELECT first {_BEFORE.format(":first")}), :first) AS start
            {_OF_RUNS} WHERE r.id IN :run_ids
        )
        SELECT s.waits, s.id, b.first, b.last, b.is_sealed, b.{content} FROM starts AS s
        LEFT JOIN step_blocks AS b ON b.run_id = s.id AND b.first >= s.start
        AND b.first <= :last AND b.last >= :first
        ORDER BY s.id, b.first LIMIT :most
        """  # noqa: S608 - our own names
    ).bindparams(_RUN_IDS)


@cache
def _latest_query() -> TextClause:
    limit = "r.step - CAST(:steps AS bigint)"
    return text(
        f"""
        WITH starts AS MATERIALIZED (
            SELECT r.id, r.step,
            coalesce((SELECT first {_BEFORE.format(limit)}), {limit}) AS start
            {_OF_RUNS} WHERE r.id IN :run_ids AND w.run_id IS NULL
        )
        SELECT s.step, b.run_id, b.first, b.last, b.is_sealed, b.data FROM starts AS s
        JOIN step_blocks AS b ON b.run_id = s.id AND b.first >= s.start
        AND b.last > s.step - :steps
        ORDER BY b.run_id, b.first
        """  # noqa: S608 - our own names
    ).bindparams(_RUN_IDS)


@cache
def _spans_query() -> TextClause:
    is_dense = "last - first + 1 = steps"
    return text(
        f"""
        SELECT r.id, w.run_id,
        (SELECT last {_BEFORE.format(":first")}), (SELECT {is_dense} {_BEFORE.format(":first")}),
        (SELECT min(first) FROM step_blocks WHERE run_id = r.id AND first > :first),
        (SELECT last {_BEFORE.format(":last")}), (SELECT {is_dense} {_BEFORE.format(":last")})
        {_OF_RUNS} WHERE r.id IN :run_ids
        """  # noqa: S608 - our own names
    ).bindparams(_RUN_IDS)


_OF_TAIL = "SELECT run_id, first, last, is_sealed, data FROM step_blocks WHERE NOT is_sealed AND"


@cache
def _tail_query() -> TextClause:
    return text(f"{_OF_TAIL} run_id = :run_id AND first <= :last ORDER BY first")


@cache
def _tails_query() -> TextClause:
    query = text(f"{_OF_TAIL} run_id IN :run_ids ORDER BY run_id, first")
    return query.bindparams(_RUN_IDS)


def join_steps(
    rows: Sequence[Block], names: Collection[str], damaged: list[StepRange] | None = None
) -> Columns:
    """Return columns of the steps of blocks; a damaged one is left out and noted."""
    parts = []
    for is_small, some in groupby(rows, lambda block: block.is_small):
        blocks = list(some)
        if is_small and len(blocks) > 1:  # the parts of a tail, decoded at once
            try:
                content = block_codec.join_records([block.content for block in blocks])
                parts.append(block_codec.decode(content, names))
                continue
            except block_codec.Damaged:
                pass  # which of them
        parts += _readable(blocks, names, damaged)
    return block_codec.join(parts, names)


def _readable(
    blocks: Sequence[Block], names: Collection[str], damaged: list[StepRange] | None
) -> Iterator[Columns]:
    for block in blocks:
        try:
            yield block_codec.decode(block.content, names)
        except block_codec.Damaged as error:
            damage.note(Damage(block.run_id, STEPS, block.first, block.last), error)
            if damaged is not None and (block.first, block.last) not in damaged:
                damaged.append((block.first, block.last))


def within(columns: Columns, span: StepRange) -> Columns:
    """Return the steps of a range."""
    steps = columns["step"]
    low, high = np.searchsorted(steps, span[0]), np.searchsorted(steps, span[1], side="right")
    if low == 0 and high == len(steps):
        return columns
    return block_codec.chosen(columns, slice(low, high))


def read_stored_buckets(
    connection: Connection,
    run_id: int,
    ranges: Sequence[BucketRange],
    series: tuple[Series, ...],
) -> dict[int, Summaries]:
    """Return the summaries of sealed blocks in ranges of buckets, by size."""
    by_size: dict[int, Summaries] = {}
    if ranges:
        given = {"run_id": run_id}
        for number, bounds in enumerate(ranges):
            named = zip(("size", "first", "last"), bounds, strict=True)
            given |= {f"{name}_{number}": value for name, value in named}
        rows = connection.execute(_buckets_query(len(ranges)), given).cursor.fetchall()
        for size in {size for size, _, _ in ranges}:
            mine = [row for row in rows if row[0] == size]
            start = np.array([bucket for _, bucket, _ in mine], np.int64) * size
            packed = [summary for *_, summary in mine]
            by_size[size] = in_order([unpack(start, packed, STEP_SERIES, size, series)])
    return by_size


@cache
def _buckets_query(ranges: int) -> TextClause:
    # Each part reads one range of the primary key, which a query with OR might not.
    of_range = (
        "SELECT size, bucket, summary FROM step_buckets WHERE run_id = :run_id"
        " AND size = :size_{0} AND bucket BETWEEN :first_{0} AND :last_{0}"
    )
    return text(" UNION ALL ".join(of_range.format(number) for number in range(ranges)))
