"""Fewer points for a screen: evenly many steps a bucket, of which both extremes are kept."""

from collections.abc import Sequence
from typing import Any

MOST_POINTS = 5000


def thin(x: Sequence[int], y: Sequence[Any], most: int) -> tuple[list[int], list[Any]]:
    """Return at most about `most` points, in order: of each bucket the lowest and the highest.

    What is not finite is left out where there are too many points: those are sent whole elsewhere.
    """
    if len(x) <= most:
        return list(x), list(y)
    size = -(-2 * len(x) // most)
    kept: list[int] = []
    for start in range(0, len(x), size):
        bucket = [
            i for i in range(start, min(start + size, len(x))) if isinstance(y[i], int | float)
        ]
        if bucket:
            extremes = {min(bucket, key=y.__getitem__), max(bucket, key=y.__getitem__)}
            kept += sorted(extremes)
    return [x[i] for i in kept], [y[i] for i in kept]
