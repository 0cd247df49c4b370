"""The pyramid: summaries of 64, 512, 4096, … steps, so charts of any length read few rows.

`db.telemetry.step_block_writer` stores those of steps; those of metrics are within their blocks.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

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


def sum_up(
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


def siblings(first: int, last: int, size: int) -> BucketRange:
    """Return the buckets of one size that share a parent with these steps."""
    parent = size * FANOUT
    return size, first // parent * FANOUT, last // parent * FANOUT + FANOUT - 1
