"""The pyramid: summaries of 64, 512, 4096, … steps, so charts of any length read few rows.

`db.telemetry.step_block_writer` stores those of steps; those of metrics are within their blocks.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    select,
    union_all,
)

from db.telemetry.summaries import Ints, Points, Series, Summaries, in_order, merge, pack, unpack

FANOUT = 8
SIZES = (64, 512, 4096, 32_768, 262_144)
#: More than any step.
END = 2**62

#: First and last step, both inclusive.
StepRange: TypeAlias = tuple[int, int]
#: Bucket size, first and last bucket, both inclusive.
BucketRange: TypeAlias = tuple[int, int, int]

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


def summed_up(
    points: Points,
    there: Mapping[int, Summaries],
    series: tuple[Series, ...],
    sizes: Sequence[int] = SIZES,
) -> tuple[Ints, Ints, list[bytes]]:
    """Return start, size and packed summary of each bucket of all sizes above points.

    there: by size, the stored buckets that may share a parent with these.  sizes: the first ones.
    """
    parts = Summaries.of(points)
    of_sizes: list[Ints] = []
    starts: list[Ints] = []
    packed: list[bytes] = []
    for size in sizes:
        buckets = merge(parts, size)
        starts.append(buckets.start)
        of_sizes.append(np.full_like(buckets.start, size))
        bucket_bytes = pack(buckets, series, size)
        packed += bucket_bytes
        others = there[size][~np.isin(there[size].start, buckets.start)]
        # Larger sizes are built from the stored, rounded summaries.
        parts = in_order([others, unpack(buckets.start, bucket_bytes, series, size)])
    return np.concatenate(starts), np.concatenate(of_sizes), packed


# Queries are cached and receive their values as parameters: SQLAlchemy takes longer to build one
# than the database to answer it.


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
