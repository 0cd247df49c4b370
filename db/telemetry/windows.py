"""Downsampled windows of a run that keep every extreme and event at any length.

A short window has raw steps. A longer one is read from the pyramid, its two edges from smaller
buckets and raw steps, so that it includes no steps outside the window. Sizes of drawn buckets are
powers of two and their edges multiples of the size, so they never move while the run grows.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, case, func, select, text
from sqlalchemy.orm import Session

from db.names import natural_key
from db.tables import FLAGGED, ScalerEvent
from db.telemetry import latest_metrics, metric_blocks, step_blocks
from db.telemetry.metric_blocks import MetricSource
from db.telemetry.pyramid import END, SIZES, BucketRange, StepRange
from db.telemetry.step_blocks import StepSource
from db.telemetry.summaries import Ints, Points, Summaries, in_order, merge
from halfstep.telemetry.flags import SKIPPED, UNKNOWN_LOSS, UNKNOWN_NORM
from halfstep.telemetry.plain_json import json_safe

AnySource: TypeAlias = MetricSource | StepSource
#: Rows read by one query: more or longer runs are read a few at a time.
ROWS = 40_000
NORMS = frozenset({"grad_norm", "grad_norm_clipped"})
#: Series whose NaN is a value; in others, and where a flag says so, it is an unknown number.
MEASURED = NORMS | {"loss", "value"}


@dataclass(frozen=True)
class Ticks:
    """Events: each at its step, or counted per bucket.

    total is their exact number and the sum of counts.
    """

    steps: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    total: int = 0


@dataclass(frozen=True)
class Line:
    """Drawn points of a series, with None where the number is unknown.

    Non-finite values are "NaN", "Infinity" or "-Infinity". In a bucketed window every point is
    still a real step, and non-finite values are in `nonfinite` only.
    """

    x: list[int]
    y: list[Any]
    nonfinite: Ticks
    # Middle and mean of each bucket, if the series stores means.
    mean_x: list[int] = field(default_factory=list)
    mean_y: list[Any] = field(default_factory=list)
    is_bucketed: bool = False
    unknown: int = 0  # number of unknown values, which `nonfinite` does not count


@dataclass(frozen=True)
class Window:
    """The steps from first to last as drawn lines.

    elapsed_ms is sampled if bucketed. The scale is a step function: each point holds until the
    next.
    """

    first: int
    last: int
    total: int  # number of steps
    points: int  # number of points of the longest line
    bucket: int  # number of steps that share a minimum and a maximum; 1 means raw steps
    series: dict[str, Line]
    elapsed_ms: Line
    skips: Ticks
    # Steps in blocks that are damaged, as first and last step.
    damaged: list[StepRange] = field(default_factory=list)


def windows_of(
    session: Session,
    run_ids: Collection[int],
    *,
    first: int | None = None,
    last: int | None = None,
    most: int = 5000,
    names: Collection[str] | None = None,
) -> dict[int, Window]:
    """Return the steps of each run that has some from first to last; short runs take two queries.

    most: the most points per series.  names: only these series and the loss. Raises ValueError if
    most is less than 32.
    """
    connection, limits = session.connection(), _limits(first, last)
    series_names = None if names is None else {"loss", *names}
    if series_names and series_names & NORMS:
        series_names.add("lr")  # without one, a norm is unknown, see `_is_unknown`
    spans = step_blocks.spans(connection, run_ids, limits)
    there = [(StepSource.of(run_id, series_names), span) for run_id, span in spans.items()]
    return {
        stretch.source.key["run_id"]: _window(connection, stretch, most)
        for stretch in _read(connection, there, limits, most)
    }


def _window(connection: Connection, stretch: "_Raw | _Stretch", most: int) -> Window:
    lines, skips, total = dict(stretch.lines()), stretch.skips(), stretch.total
    span, loss, run_id = stretch.span, lines["loss"], stretch.source.key["run_id"]
    waits = lines.get("data_us")
    if waits and all(value is None for value in waits.y):  # unknown at every step
        lines["data_us"] = Line([], [], Ticks())
    if isinstance(stretch, _Stretch):
        skips = _locate(connection, run_id, span, "skipped", skips, most)
        nonfinite = _locate(connection, run_id, span, "nonfinite", loss.nonfinite, most)
        unknown = loss.nonfinite.total - nonfinite.total
        lines["loss"] = replace(loss, nonfinite=nonfinite, unknown=unknown)
        norms = stretch.nonfinite_norms(has_losses=nonfinite.total > 0)
        lines |= {name: replace(lines[name], nonfinite=ticks) for name, ticks in norms.items()}
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
        damaged=sorted(stretch.source.damaged) if isinstance(stretch.source, StepSource) else [],
    )


def metrics_of_runs(
    session: Session,
    run_ids: Collection[int],
    *,
    first: int | None = None,
    last: int | None = None,
    most: int = 5000,
    names: Collection[str] | None = None,
) -> dict[int, dict[str, Line]]:
    """Return every metric of runs by name, from first to last, as lines like those of a `Window`.

    names: only these metrics.  Metrics with few points take one query together.
    """
    connection, limits = session.connection(), _limits(first, last)
    by_run: dict[int, dict[str, Line]] = {run_id: {} for run_id in run_ids}
    drawn = metric_blocks.DRAWN
    sources = metric_blocks.sources(connection, run_ids, names, limits, columns=drawn)
    for stretch in _read_metrics(connection, sources, most):
        key = stretch.source.key
        by_run[key["run_id"]][key["name"]] = dict(stretch.lines())["value"]
    return {
        run_id: {name: lines[name] for name in sorted(lines, key=natural_key)}
        for run_id, lines in by_run.items()
    }


def _read_metrics(
    connection: Connection, sources: Sequence[MetricSource], most: int
) -> Iterator["_Raw | _Stretch"]:
    """Yield the data to draw for each metric with points, reading those with few ones together."""
    _check_most(most)
    few, points = list[MetricSource](), 0
    for index, source in enumerate(sources):
        is_short = source.most_points <= 2 * most
        if is_short:
            few.append(source)
            points += source.most_points
        elif (span := source.span(connection)) is not None:
            yield _long(connection, source, span, most)
        if few and (points >= ROWS or index == len(sources) - 1):
            for each, part in metric_blocks.read_points(connection, few):
                if len(part):
                    span = (int(part.step[0]), int(part.step[-1]))
                    yield _drawn(each, span, part, most)
            few, points = [], 0


@dataclass(frozen=True)
class Measured:
    """Summary of one metric: latest value and its step, finite extremes, point count."""

    name: str
    step: int
    value: float
    low: float | None
    high: float | None
    points: int


def measure(
    session: Session, run_id: int, *, names: Collection[str] | None = None
) -> list[Measured]:
    """Summarize each metric of a run by name, from its buckets instead of all points.

    names: only these metrics.
    """
    return measure_by_run(session, [run_id], names=names)[run_id]


def measure_by_run(
    session: Session, run_ids: Collection[int], *, names: Collection[str] | None = None
) -> dict[int, list[Measured]]:
    """Summarize each metric of each run by name, in as many queries as for one run."""
    latest = latest_metrics.points(session, run_ids, names)
    ends = metric_blocks.extremes(session.connection(), run_ids, names)
    return {
        run_id: [
            Measured(name, step, value, end.low, end.high, end.points)
            for name in sorted(latest[run_id], key=natural_key)
            for step, value in [latest[run_id][name]]
            if (end := ends.get((run_id, name))) is not None  # else its blocks are damaged
        ]
        for run_id in run_ids
    }


def _limits(first: int | None, last: int | None) -> StepRange:
    return (-END if first is None else first, END if last is None else last)


def _read(
    connection: Connection,
    there: Sequence[tuple[StepSource, StepRange]],
    limits: StepRange,
    most: int,
) -> Iterator["_Raw | _Stretch"]:
    """Yield the data to draw for each run, reading several short ones in one query.

    there: the steps of each run with the first and the last one.
    """
    _check_most(most)
    spans = {source.key["run_id"]: (source, span) for source, span in there}
    short = [run_id for run_id, (_, (low, high)) in spans.items() if high - low < 2 * most]
    size = max(1, ROWS // (2 * most))
    for at in range(0, len(short), size):
        sources = [spans[run_id][0] for run_id in short[at : at + size]]
        for source, points in StepSource.read_points_of_runs(connection, sources, limits):
            _, span = spans.pop(source.key["run_id"])
            yield _drawn(source, span, points, most)
    for source, span in spans.values():
        yield _long(connection, source, span, most, is_whole=limits == _limits(None, None))


def _check_most(most: int) -> None:
    if most < 32:
        raise ValueError(f"most is {most}; a window needs at least 32 points")


def _long(
    connection: Connection, source: AnySource, span: StepRange, most: int, *, is_whole: bool = False
) -> "_Raw | _Stretch":
    """Read a long span from the pyramid, or all of its steps if only few exist.

    is_whole: the run has no steps outside of it.
    """
    first, last = span
    bucket = next((size for size in SIZES if (last - first) // size <= 2 * most), SIZES[-1])
    if is_whole:  # no bucket has steps outside of it
        ranges, stones = [(first, first), (last, last)], [(bucket, first // bucket, last // bucket)]
    else:
        ranges, stones = _decompose(first, last, bucket)
    points = source.read_points(connection, ranges)
    below = source.read_buckets(connection, stones)
    parts = in_order([Summaries.of(points), *below.values()]) if not is_whole else below[bucket]
    if bucket == SIZES[0] and 2 * len(below.get(bucket, ())) < (last - first) // bucket:
        bucket, parts = _without_lost_steps(connection, source, span, parts)
    if parts.steps.sum() <= 2 * most:
        return _drawn(source, span, source.read_points(connection, [span]), most)
    return _Stretch.of(source, span, points, parts, bucket, most)


def _without_lost_steps(
    connection: Connection, source: AnySource, span: StepRange, parts: Summaries
) -> tuple[int, Summaries]:
    """Return size and summaries of larger buckets if these count steps that are lost."""
    first, last = span
    size, larger = SIZES[:2]
    if not isinstance(source, StepSource):
        return size, parts
    wider = source.read_buckets(connection, [(larger, first // larger, last // larger)])[larger]
    is_lost = wider.steps.sum() > parts.steps.sum() + 2 * larger  # beyond both ends of the span
    return (larger, wider) if is_lost else (size, parts)


def _drawn(source: AnySource, span: StepRange, points: Points, most: int) -> "_Raw | _Stretch":
    if len(points) <= most:
        return _Raw(source, span, points)
    return _Stretch.of(source, span, points, Summaries.of(points), 2, most)


@dataclass(frozen=True)
class _Raw:
    """Raw steps, all of them drawn."""

    source: AnySource
    span: StepRange
    points: Points
    bucket = 1

    @property
    def total(self) -> int:
        return len(self.points)

    @cached_property
    def x(self) -> list[int]:
        steps: list[int] = self.points.step.tolist()
        return steps

    def lines(self) -> Iterator[tuple[str, Line]]:
        """Yield each series as a line."""
        for series, values in zip(self.source.series, self.points.values.T, strict=True):
            y, is_finite = values.tolist(), np.isfinite(values)
            if is_finite.all():
                yield series.name, Line(self.x, y, Ticks())
                continue
            is_unknown = np.isnan(values) & self._has_unknown(series.name)
            y = [
                None if unknown else json_safe(value)
                for value, unknown in zip(y, is_unknown.tolist(), strict=True)
            ]
            nonfinite = self._ticks(~is_finite & ~is_unknown)
            yield series.name, Line(self.x, y, nonfinite, unknown=int(is_unknown.sum()))

    def _has_unknown(self, name: str) -> NDArray[np.bool_]:
        """Return for each step whether a NaN of a series is unknown, as StepRow.with_nan does."""
        if name not in MEASURED:
            return np.ones(len(self.points), bool)
        if name not in NORMS:
            return (self.points.flags & UNKNOWN_LOSS) > 0
        lr = [series.name for series in self.source.series].index("lr")
        return ((self.points.flags & UNKNOWN_NORM) > 0) | np.isnan(self.points.values[:, lr])

    def skips(self) -> Ticks:
        return self._ticks((self.points.flags & SKIPPED) > 0)

    def _ticks(self, happened: NDArray[np.bool_]) -> Ticks:
        steps = self.points.step[happened].tolist()
        return Ticks(steps, [1] * len(steps), len(steps))

    def elapsed_ms(self) -> Line:
        return Line(self.x, self.points.elapsed_ms.astype(float).tolist(), Ticks())


@dataclass(frozen=True)
class _Stretch:
    """Summaries of a span of steps and the bucket size to draw them in."""

    source: AnySource
    span: StepRange
    edges: Points  # all points, or those at the two ends
    parts: Summaries
    bucket: int

    @classmethod
    def of(
        cls,
        source: AnySource,
        span: StepRange,
        edges: Points,
        parts: Summaries,
        bucket: int,
        most: int,
    ) -> Self:
        """Merge summaries into buckets so that no line has more than `most` points."""
        first, last = span
        while 2 * (last // bucket - first // bucket + 1) + 2 > most:
            bucket *= 2
        return cls(source, span, edges, merge(parts, bucket), bucket)

    @property
    def total(self) -> int:
        return int(self.parts.steps.sum())

    def lines(self) -> Iterator[tuple[str, Line]]:
        """Yield each series as a line of the extremes of each bucket and the two ends."""
        parts, edges = self.parts, self.edges
        ends = [0, -1] if len(edges) else []  # none if both are in damaged blocks
        for index, series in enumerate(self.source.series):
            is_measured = series.name in MEASURED
            nonfinite = self.ticks(parts.nonfinite[:, index]) if is_measured else Ticks()
            x, where = np.unique(
                np.concatenate(
                    [parts.low_step[:, index], parts.high_step[:, index], edges.step[ends]]
                ),
                return_index=True,
            )
            values = np.concatenate(
                [parts.low[:, index], parts.high[:, index], edges.values[ends, index]]
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
                    is_bucketed=True,
                ),
            )

    def skips(self) -> Ticks:
        return self.ticks(self.parts.skips)

    def nonfinite_norms(self, *, has_losses: bool) -> dict[str, Ticks]:
        """Return the non-finite gradient norms by series.

        Buckets count unknown norms too. A norm that is not finite is one of a step that was
        skipped or that has a non-finite loss.  has_losses: whether there are any.
        """
        at = {series.name: index for index, series in enumerate(self.source.series)}
        counts = self.parts.nonfinite
        happened = self.parts.skips + (counts[:, at["loss"]] if has_losses else 0)
        norms = [name for name in at if name in NORMS]
        return {name: self.ticks(np.minimum(counts[:, at[name]], happened)) for name in norms}

    def ticks(self, counts: Ints) -> Ticks:
        """Return the start steps and counts of the buckets with counted events."""
        happened = counts > 0
        steps = np.maximum(self.parts.start[happened], self.span[0])
        return Ticks(steps.tolist(), counts[happened].tolist(), int(counts.sum()))

    def elapsed_ms(self) -> Line:
        """Return the time at the first step and at the last step of each bucket."""
        ends = np.minimum(self.parts.start + self.bucket - 1, self.span[1])
        x, where = np.unique(np.concatenate([self.edges.step[:1], ends]), return_index=True)
        y = np.concatenate([self.edges.elapsed_ms[:1], self.parts.elapsed_ms])[where]
        return Line(x.tolist(), y.astype(float).tolist(), Ticks())


def _decompose(first: int, last: int, largest: int) -> tuple[list[StepRange], list[BucketRange]]:
    """Cover the steps from first to last with few buckets, and both ends with raw steps.

    The raw ends are never empty, so a line begins and ends with real steps.
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


def _locate(
    connection: Connection, run_id: int, span: StepRange, flag: str, counted: Ticks, most: int
) -> Ticks:
    """Return each flagged step if there are at most `most`, else the counts per bucket.

    Buckets count unknown losses as well.
    """
    if not counted.total:
        return counted
    # Without the hint, SQLite would read all steps instead of the index of flagged steps.
    hint = f"INDEXED BY ix_steps_{flag}" if connection.dialect.name == "sqlite" else ""
    query = text(
        f"SELECT step FROM steps {hint} WHERE run_id = :run_id"  # noqa: S608 - our own names
        f" AND step BETWEEN :first AND :last AND {FLAGGED[flag]} ORDER BY step LIMIT :most"
    ).bindparams(run_id=run_id, first=span[0], last=span[1], most=most + 1)
    # Directly from the driver, as in db.telemetry.pyramid: there may be thousands of rows.
    steps = [step for (step,) in connection.execute(query).cursor.fetchall()]
    return counted if len(steps) > most else Ticks(steps, [1] * len(steps), len(steps))


def _scale(
    connection: Connection, run_id: int, stretch: _Stretch, sampled: Line, most: int
) -> Line:
    """Return the exact scale from its changes, or `sampled` if there are too many."""
    first, last = stretch.span
    # The scale after a step is used for the next step; a manually set one for its own step.
    used_from = case((ScalerEvent.kind == "set", ScalerEvent.step), else_=ScalerEvent.step + 1)
    changes = select(used_from, ScalerEvent.scale_after).where(
        ScalerEvent.run_id == run_id,
        ScalerEvent.step.between(first, last - 1),
        ScalerEvent.kind != "skip",
    )
    few = changes.with_only_columns(ScalerEvent.step).limit(most).subquery()
    number = connection.execute(select(func.count()).select_from(few)).scalar_one()
    if number > most - 2 or not len(stretch.edges):
        return sampled
    at = [series.name for series in stretch.source.series].index("scale")
    ends: list[float] = stretch.edges.values[[0, -1], at].tolist()
    # A scale set at the boundary of a back-off wins: it belongs to the later step.
    changes = changes.order_by(used_from, ScalerEvent.step)
    points = {first: ends[0]}
    points.update(connection.execute(changes).cursor.fetchall())  # see `_locate`
    points[last] = ends[1]
    scales = [None if math.isnan(scale) else json_safe(scale) for scale in points.values()]
    return replace(sampled, x=list(points), y=scales)
