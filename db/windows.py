"""Any stretch of a run as few points: every extreme and every event, however long the run.

A short window is its raw steps. A longer one is read from the pyramid, its two edges from smaller
buckets and raw steps, so that nothing from outside leaks in. Drawn buckets are powers of two and
their edges multiples of them, so they never move while the run grows.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import Connection, case, func, select, text
from sqlalchemy.orm import Session

from db import latest_metrics
from db.pyramid import (
    METRIC_SERIES,
    SIZES,
    BucketRange,
    Source,
    StepRange,
    metric_of,
    metrics_of,
    read_buckets,
    read_points,
    steps_of,
)
from db.series import json_number
from db.summaries import Ints, Points, Series, Summaries, in_order, merge, unpack
from db.tables import FLAGGED, MetricBucket, ScalerEvent


@dataclass(frozen=True)
class Ticks:
    """Things that happened: each at its step, or several counted together in a bucket.

    total is their exact number, and the sum of counts.
    """

    steps: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    total: int = 0


@dataclass(frozen=True)
class Line:
    """What to draw of a series. NaN is None; infinities are "Infinity", "-Infinity".

    In a bucketed window every point is still a real step; those that are not finite are in
    nonfinite only. mean_x, mean_y: the mean of each bucket at its middle, where it is kept.
    """

    x: list[int]
    y: list[Any]
    nonfinite: Ticks
    mean_x: list[int] = field(default_factory=list)
    mean_y: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """The steps from first to last: `points` drawn, of the longest line, for `total` steps.

    bucket: how many steps share a minimum and a maximum; 1 means raw steps. elapsed_ms is sampled
    where bucketed. The scale is to be drawn as steps: each point holds until the next.
    """

    first: int
    last: int
    total: int
    points: int
    bucket: int
    series: dict[str, Line]
    elapsed_ms: Line
    skips: Ticks


def window(
    session: Session,
    run_id: int,
    *,
    first: int | None = None,
    last: int | None = None,
    most: int = 5000,
    names: Collection[str] | None = None,
) -> Window | None:
    """Return the steps of a run from first to last, `most` points a series at most, or None.

    names: only these series, and the loss. Raises ValueError if most is less than 32.
    """
    connection = session.connection()
    source = steps_of(run_id)
    span = _span(connection, source, first, last)
    if span is None:
        return None
    stretch = _Stretch.read(connection, source, span, most)
    lines = dict(stretch.lines(None if names is None else {"loss", *names}))
    skips, loss = stretch.ticks(stretch.parts.skips), lines["loss"]
    total = int(stretch.parts.steps.sum())
    waits = lines.get("data_us")
    if waits and waits.nonfinite.total == total:  # nobody knows what it waited for
        lines["data_us"] = Line([], [], Ticks())
    if stretch.bucket > 1:
        skips = _located(connection, run_id, span, "skipped", skips, most)
        nonfinite = _located(connection, run_id, span, "nonfinite", loss.nonfinite, most)
        lines["loss"] = replace(loss, nonfinite=nonfinite)
        if "scale" in lines:
            lines["scale"] = _scale(connection, run_id, stretch, lines["scale"], most)
    return Window(
        *span,
        total=total,
        points=max(len(line.x) for line in lines.values()),
        bucket=stretch.bucket,
        series=lines,
        elapsed_ms=stretch.elapsed_ms(),
        skips=skips,
    )


def metrics(
    session: Session,
    run_id: int,
    *,
    first: int | None = None,
    last: int | None = None,
    most: int = 5000,
    names: Collection[str] | None = None,
) -> dict[str, Line]:
    """Return every metric of a run by name, from first to last, as `window` returns a series.

    names: only these.
    """
    connection = session.connection()
    lines = {}
    sources = (
        metrics_of(session, run_id)
        if names is None
        else [metric_of(run_id, name) for name in sorted(set(names))]
    )
    for source in sources:
        if span := _span(connection, source, first, last):
            stretch = _Stretch.read(connection, source, span, most)
            lines[source.key["name"]] = dict(stretch.lines())["value"]
    return lines


def metric_names(session: Session, run_id: int) -> list[str]:
    """Return the names of a run's metrics, in order."""
    return [source.key["name"] for source in metrics_of(session, run_id)]


@dataclass(frozen=True)
class Measured:
    """One metric summed up: the latest value and its step, the finite extremes, its points."""

    name: str
    step: int
    value: float | None
    low: float | None
    high: float | None
    points: int


def measured(
    session: Session, run_id: int, *, names: Collection[str] | None = None
) -> list[Measured]:
    """Sum up each metric of a run by name, from its largest buckets, however many its points.

    names: only these.
    """
    return measured_of(session, [run_id], names=names)[run_id]


def measured_of(
    session: Session, run_ids: Collection[int], *, names: Collection[str] | None = None
) -> dict[int, list[Measured]]:
    """Sum up each metric of each run, in two queries for all of them."""
    connection, top = session.connection(), SIZES[-1]
    buckets = MetricBucket.__table__.c
    picked = [buckets.run_id.in_(run_ids), buckets.size == top]
    if names is not None:
        picked.append(buckets.name.in_(names))
    latest = latest_metrics.points(session, run_ids, names)
    stones = select(buckets.run_id, buckets.name, buckets.summary).where(*picked)
    whole = connection.execute(stones.order_by(buckets.run_id, buckets.name)).all()
    found: dict[int, list[Measured]] = {run_id: [] for run_id in run_ids}
    keys = [(run_id, name) for run_id, name, _summary in whole]
    packed = [summary for *_, summary in whole]
    for (run_id, name), low, high, count in extremes(keys, packed, METRIC_SERIES, "value"):
        step, value = latest[run_id][name]
        found[run_id].append(Measured(name, step, value, low, high, count))
    return found


def extremes(
    keys: list[Any], packed: list[bytes], series: tuple[Series, ...], name: str
) -> Iterator[tuple[Any, float | None, float | None, int]]:
    """Yield of each key the finite extremes of one series and its points, from largest buckets.

    keys: one a bucket, those that are equal in a row.
    """
    if not packed:
        return
    parts = unpack(np.zeros(len(packed), np.int64), packed, series, SIZES[-1])
    first = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    index = [each.name for each in series].index(name)
    low = np.fmin.reduceat(parts.low[:, index], first)
    high = np.fmax.reduceat(parts.high[:, index], first)
    count = np.add.reduceat(parts.steps, first)
    for at, *both, points in zip(first, low.tolist(), high.tolist(), count.tolist(), strict=True):
        lowest, highest = (value if np.isfinite(value) else None for value in both)
        yield keys[at], lowest, highest, points


def _span(
    connection: Connection, source: Source, first: int | None, last: int | None
) -> StepRange | None:
    """Return the first and the last step that there is from first to last."""
    step = source.points.c.step
    there = select(step).where(*source.of(source.points))
    if first is not None:
        there = there.where(step >= first)
    if last is not None:
        there = there.where(step <= last)
    ends = select(
        there.order_by(step).limit(1).scalar_subquery(),
        there.order_by(step.desc()).limit(1).scalar_subquery(),
    )
    lowest, highest = connection.execute(ends).one()
    return None if lowest is None else (lowest, highest)


@dataclass(frozen=True)
class _Stretch:
    """What was read of some steps, and the size of the buckets that it is to be drawn in."""

    source: Source
    span: StepRange
    edges: Points  # raw: all of them, or those at the two ends
    parts: Summaries
    bucket: int

    @classmethod
    def read(cls, connection: Connection, source: Source, span: StepRange, most: int) -> "_Stretch":
        if most < 32:
            raise ValueError(f"most is {most}; a window needs at least 32 points")
        first, last = span
        if last - first < 2 * most or _at_most(connection, source, span) <= 2 * most:
            points = read_points(connection, source, [span])
            parts = Summaries.of(points)
            bucket = 1 if len(points) <= most else 2
        else:
            bucket = next((size for size in SIZES if (last - first) // size <= 2 * most), SIZES[-1])
            ranges, stones = _decompose(first, last, bucket)
            points = read_points(connection, source, ranges)
            below = read_buckets(connection, source, stones)
            parts = in_order([Summaries.of(points), *below.values()])
        while bucket > 1 and 2 * (last // bucket - first // bucket + 1) + 2 > most:
            bucket *= 2
        return cls(source, span, points, merge(parts, bucket), bucket)

    def lines(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Line]]:
        """Yield each series as a line: raw, or the extremes of each bucket and the two ends."""
        parts, edges = self.parts, self.edges
        for index, series in enumerate(self.source.series):
            if names is not None and series.name not in names:
                continue
            nonfinite = self.ticks(parts.nonfinite[:, index])
            if self.bucket == 1:
                y = list(map(json_number, edges.values[:, index].tolist()))
                yield series.name, Line(edges.step.tolist(), y, nonfinite)
                continue
            x, where = np.unique(
                np.concatenate(
                    [parts.low_step[:, index], parts.high_step[:, index], edges.step[[0, -1]]]
                ),
                return_index=True,
            )
            values = np.concatenate(
                [parts.low[:, index], parts.high[:, index], edges.values[[0, -1], index]]
            )[where]
            drawn = np.isfinite(values)
            mean = parts.mean[:, index] if series.mean else np.array([])
            known = np.isfinite(mean)
            middle = np.clip(parts.start + self.bucket // 2, *self.span)
            yield (
                series.name,
                Line(
                    x[drawn].tolist(),
                    values[drawn].tolist(),
                    nonfinite,
                    middle[known].tolist() if series.mean else [],
                    mean[known].tolist(),
                ),
            )

    def ticks(self, counts: Ints) -> Ticks:
        """Return where something happened, as exactly as it was read."""
        happened = counts > 0
        steps = np.maximum(self.parts.start[happened], self.span[0])
        return Ticks(steps.tolist(), counts[happened].tolist(), int(counts.sum()))

    def elapsed_ms(self) -> Line:
        """Return the time at the first step and at the last of each bucket."""
        ends = np.minimum(self.parts.start + self.bucket - 1, self.span[1])
        x, where = np.unique(np.concatenate([self.edges.step[:1], ends]), return_index=True)
        y = np.concatenate([self.edges.elapsed_ms[:1], self.parts.elapsed_ms])[where]
        return Line(x.tolist(), y.tolist(), Ticks())


def _at_most(connection: Connection, source: Source, span: StepRange) -> int:
    """Return a number that the points of a span do not exceed."""
    top = SIZES[-1]
    stones = read_buckets(connection, source, [(top, span[0] // top, span[1] // top)])
    return int(stones[top].steps.sum())


def _decompose(first: int, last: int, largest: int) -> tuple[list[StepRange], list[BucketRange]]:
    """Cover the steps from first to last with few buckets, the rest at both ends with raw steps.

    The ends are never empty, so that the line begins and ends with real steps.
    """
    start, end = (first // SIZES[0] + 1) * SIZES[0], last // SIZES[0] * SIZES[0]
    raw = [(first, start - 1), (end, last)]
    stones: list[BucketRange] = []
    for size, above in pairwise(SIZES):
        if size == largest:
            break
        inner_start, inner_end = -(-start // above) * above, end // above * above
        stones.append((size, start // size, inner_start // size - 1))
        stones.append((size, inner_end // size, end // size - 1))
        start, end = inner_start, inner_end
    stones.append((largest, start // largest, end // largest - 1))
    return raw, stones


def _located(
    connection: Connection, run_id: int, span: StepRange, flag: str, counted: Ticks, most: int
) -> Ticks:
    """Return flagged steps one by one, if they are not too many."""
    if not 0 < counted.total <= most:
        return counted
    # Left alone, SQLite would read all steps rather than the index that holds just these.
    hint = f"INDEXED BY ix_steps_{flag}" if connection.dialect.name == "sqlite" else ""
    query = text(
        f"SELECT step FROM steps {hint} WHERE run_id = :run_id"  # noqa: S608 - our own names
        f" AND step BETWEEN :first AND :last AND {FLAGGED[flag]} ORDER BY step"
    ).bindparams(run_id=run_id, first=span[0], last=span[1])
    # Straight from the driver, as db.pyramid reads: there may be thousands.
    steps = [step for (step,) in connection.execute(query).cursor.fetchall()]
    return Ticks(steps, [1] * len(steps), len(steps))


def _scale(
    connection: Connection, run_id: int, stretch: _Stretch, sampled: Line, most: int
) -> Line:
    """Return the scale from its changes, exact at any length, unless these are too many."""
    first, last = stretch.span
    # What the scale is after a step is used for the next one; one set by hand, for its own step.
    used_from = case((ScalerEvent.kind == "set", ScalerEvent.step), else_=ScalerEvent.step + 1)
    changes = select(used_from, ScalerEvent.scale_after).where(
        ScalerEvent.run_id == run_id,
        ScalerEvent.step.between(first, last - 1),
        ScalerEvent.kind != "skip",
    )
    few = changes.with_only_columns(ScalerEvent.step).limit(most).subquery()
    if connection.execute(select(func.count()).select_from(few)).scalar_one() > most - 2:
        return sampled
    at = [series.name for series in stretch.source.series].index("scale")
    ends: list[float] = stretch.edges.values[[0, -1], at].tolist()
    # Of a back-off and a scale set at the same boundary, the latter holds: it is the later step's.
    changes = changes.order_by(used_from, ScalerEvent.step)
    points = {first: ends[0]}
    points.update((step, scale) for step, scale in connection.execute(changes))
    points[last] = ends[1]
    return replace(sampled, x=list(points), y=list(map(json_number, points.values())))
