"""Summaries of ranges of steps: computation, merging and packing into bytes.

A summary depends only on the points below it, so it is bit-identical however these arrived.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.telemetry.flags import SKIPPED

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Series(NamedTuple):
    """A column of numbers."""

    name: str
    kind: str  # numpy type: the smallest that represents all values exactly
    mean: bool = False  # True: each summary also stores the mean


@dataclass(frozen=True)
class Points:
    """Raw points in order of step."""

    step: Ints
    elapsed_ms: Ints
    flags: Ints
    values: Floats  # shape (n, series)

    def __getitem__(self, which: Any) -> Self:
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Summaries:
    """Summaries in order of step.

    The first four fields have shape (n,), the others (n, series).
    low and high are the finite extremes (NaN if there is none), low_step the first step with low,
    high_step the last step with high. mean is the mean of the finite values.
    """

    start: Ints  # no step of the summary is earlier
    steps: Ints
    skips: Ints
    elapsed_ms: Ints  # of the last step
    low: Floats
    high: Floats
    mean: Floats
    low_step: Ints
    high_step: Ints
    nonfinite: Ints

    @classmethod
    def of(cls, points: Points) -> Self:
        """Convert each point to a summary."""
        finite = np.isfinite(points.values)
        values = np.where(finite, points.values, np.nan) + 0.0  # + 0.0 turns -0.0 into 0.0
        step = np.broadcast_to(points.step[:, None], values.shape)
        return cls(
            start=points.step,
            steps=np.ones_like(points.step),
            skips=points.flags & SKIPPED,
            elapsed_ms=points.elapsed_ms,
            low=values,
            high=values,
            mean=values,
            low_step=step,
            high_step=step,
            nonfinite=(~finite).astype(np.int64),
        )

    def __getitem__(self, which: Any) -> Self:
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.start)


Rows = TypeVar("Rows", Points, Summaries)


def in_order(parts: list[Rows]) -> Rows:
    """Concatenate points or summaries and sort them by step."""
    kind = type(parts[0])
    names = [field.name for field in fields(kind)]
    joined, *others = [part for part in parts if len(part)] or parts[:1]
    if others:
        some = (joined, *others)
        joined = kind(*(np.concatenate([getattr(part, name) for part in some]) for name in names))
    step = getattr(joined, names[0])
    return joined if (np.diff(step) > 0).all() else joined[np.argsort(step)]


def merge(parts: Summaries, size: int) -> Summaries:
    """Merge summaries in the same range of `size` steps; range edges are multiples of it."""
    if not len(parts):
        return parts
    bucket = parts.start // size
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    count = np.diff(first, append=len(bucket))
    start = bucket[first] * size
    low = np.fmin.reduceat(parts.low, first)
    high = np.fmax.reduceat(parts.high, first)
    has_low = parts.low == np.repeat(low, count, axis=0)
    has_high = parts.high == np.repeat(high, count, axis=0)
    never = np.iinfo(np.int64).max
    low_step = np.minimum.reduceat(np.where(has_low, parts.low_step, never), first)
    high_step = np.maximum.reduceat(np.where(has_high, parts.high_step, 0), first)
    finite_below = parts.steps[:, None] - parts.nonfinite
    finite = np.add.reduceat(finite_below, first)
    return Summaries(
        start=start,
        steps=np.add.reduceat(parts.steps, first),
        skips=np.add.reduceat(parts.skips, first),
        elapsed_ms=np.maximum.reduceat(parts.elapsed_ms, first),
        low=low,
        high=high,
        mean=_mean(parts.mean, finite_below, finite, first, low, high),
        low_step=np.where(finite > 0, low_step, start[:, None]),
        high_step=np.where(finite > 0, high_step, start[:, None]),
        nonfinite=np.add.reduceat(parts.nonfinite, first),
    )


def _mean(
    means: Floats, counts: Ints, merged: Ints, first: Ints, low: Floats, high: Floats
) -> Floats:
    """Return the means of merged ranges, also if the sum of values overflows.

    counts: finite values below each of `means`; merged: finite values in each range, which begins
    at the index in `first`.
    """
    is_known = counts > 0
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(np.where(is_known, means * counts, 0.0), first)
        mean = np.divide(total, merged, out=np.full_like(total, np.nan), where=merged > 0)
        overflowed = ~np.isfinite(total)
        if overflowed.any():
            lengths = np.diff(first, append=len(counts))
            shares = counts / np.maximum(np.repeat(merged, lengths, axis=0), 1)
            summed = np.add.reduceat(np.where(is_known, means * shares, 0.0), first)
            mean[overflowed] = np.clip(summed, low, high)[overflowed]
    return mean


def pack(summaries: Summaries, series: tuple[Series, ...], size: int) -> list[bytes]:
    """Pack summaries of `size` steps into bytes of the dtype from `layout`."""
    packed = np.zeros(len(summaries), layout(series, size))
    for name in ("steps", "skips", "elapsed_ms"):
        packed[name] = getattr(summaries, name)
    for index, (name, kind, mean) in enumerate(series):
        low, high = summaries.low[:, index], summaries.high[:, index]
        if kind.startswith("i"):  # integers have no NaN
            low, high = np.nan_to_num(low), np.nan_to_num(high)
        packed[f"{name}_min"], packed[f"{name}_max"] = low, high
        packed[f"{name}_min_at"] = summaries.low_step[:, index] - summaries.start
        packed[f"{name}_max_at"] = summaries.high_step[:, index] - summaries.start
        packed[f"{name}_nonfinite"] = summaries.nonfinite[:, index]
        if mean:
            packed[f"{name}_mean"] = summaries.mean[:, index]
    return packed.view(f"V{packed.itemsize}").tolist()


def unpack(
    start: Ints,
    packed: list[bytes],
    series: tuple[Series, ...],
    size: int,
    requested: tuple[Series, ...] | None = None,
) -> Summaries:
    """Unpack summaries from `pack`, all series or the given ones.

    A mean that is not stored is NaN. In old summaries without the last series, that series has no
    finite value.
    """
    joined, record = b"".join(packed), layout(series, size)
    if len(joined) < len(packed) * record.itemsize:
        joined = _with_last(packed, series, size)
    rows, series = np.frombuffer(joined, record), series if requested is None else requested

    def column(part: str) -> NDArray[Any]:
        return np.column_stack([rows[f"{name}_{part}"] for name, _, _ in series])

    mean = np.full((len(rows), len(series)), np.nan)
    for index, (name, _, has_mean) in enumerate(series):
        if has_mean:
            mean[:, index] = rows[f"{name}_mean"]
    low, high = column("min").astype(np.float64), column("max").astype(np.float64)
    nonfinite = column("nonfinite").astype(np.int64)
    never = nonfinite == rows["steps"][:, None]
    low[never] = high[never] = mean[never] = np.nan
    return Summaries(
        start=start,
        steps=rows["steps"].astype(np.int64),
        skips=rows["skips"].astype(np.int64),
        elapsed_ms=rows["elapsed_ms"].astype(np.int64),
        low=low,
        high=high,
        mean=mean,
        low_step=start[:, None] + column("min_at"),
        high_step=start[:, None] + column("max_at"),
        nonfinite=nonfinite,
    )


def _with_last(packed: list[bytes], series: tuple[Series, ...], size: int) -> bytes:
    """Join packed summaries, padding old ones that lack the last series."""
    record, before, name = layout(series, size), layout(series[:-1], size), series[-1].name
    rows = np.frombuffer(b"".join(row.ljust(record.itemsize, b"\0") for row in packed), record)
    rows = rows.copy()
    lacking = np.array([len(row) == before.itemsize for row in packed])
    rows[f"{name}_nonfinite"][lacking] = rows["steps"][lacking]
    return rows.tobytes()


@cache
def layout(series: tuple[Series, ...], size: int) -> np.dtype[np.void]:
    """Return the little-endian record dtype of a packed summary of `size` steps.

    min_at and max_at count steps from the bucket's start.
    """
    count = "<u1" if size < 2**8 else "<u2" if size < 2**16 else "<u4"
    record = [("steps", count), ("skips", count), ("elapsed_ms", "<i8")]
    for name, kind, mean in series:
        record += [(f"{name}_min", f"<{kind}"), (f"{name}_max", f"<{kind}")]
        record += [(f"{name}_{part}", count) for part in ("min_at", "max_at", "nonfinite")]
        if mean:
            record.append((f"{name}_mean", "<f8" if kind == "f8" else "<f4"))
    return np.dtype(record)
