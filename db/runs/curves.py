"""Single numbers of a curve: its area over a range of steps, and the time until a target."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Metric
from db.telemetry import frozen_steps, windows
from db.telemetry.windows import Line

LOSS = "loss"
#: Points of a curve that are read; of a longer one, its ends, and extremes and means of buckets.
POINTS = 1000


@dataclass(frozen=True)
class CurveRange:
    """Steps that several curves share, and the number of points of the shortest and the longest."""

    first: int
    last: int
    least_points: int
    most_points: int


@dataclass(frozen=True)
class Curve:
    """Values over steps: points, or means of buckets."""

    steps: list[int]
    values: list[float]
    is_finite: bool  # no value is NaN or infinite
    ends: tuple[int, int]

    @classmethod
    def of(cls, line: Line) -> "Curve | None":
        """Return the curve of a line; None if it has no finite value."""
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isinstance(y, float)]
        if not known:
            return None
        ends, is_finite = (known[0][0], known[-1][0]), not line.nonfinite.total
        if line.mean_x:
            return cls(line.mean_x, line.mean_y, is_finite, ends)
        return cls([x for x, _ in known], [y for _, y in known], is_finite, ends)

    def points_in(self, first: int, last: int) -> int:
        """Return how many points are in a range of steps."""
        return sum(first <= step <= last for step in self.steps)

    def mean(self, first: int, last: int) -> float:
        """Return the area by the trapezoidal rule over the range, divided by the range.

        At the ends of the range, values are interpolated. NaN if any value of the curve is not
        finite.
        """
        if not self.is_finite:
            return math.nan
        inside = [step for step in self.steps if first < step < last]
        steps = np.array([first, *inside, last], float)
        area = np.trapezoid(np.interp(steps, self.steps, self.values), steps)
        return float(area / (last - first))


def common_range(curves: Collection[Curve]) -> CurveRange | None:
    """Return the steps that all curves share; None if they are fewer than two."""
    first = max((curve.ends[0] for curve in curves), default=0)
    last = min((curve.ends[1] for curve in curves), default=0)
    if first >= last:
        return None
    points = [curve.points_in(first, last) for curve in curves]
    return CurveRange(first, last, min(points), max(points))


def read_curves(session: Session, run_ids: Collection[int], name: str) -> dict[int, Curve]:
    """Return the curves of a metric, or of the loss of each step; without runs that have none."""
    lines = _lines(session, run_ids, name)
    return {run_id: curve for run_id, line in lines.items() if (curve := Curve.of(line))}


def seconds_until(
    session: Session, run_ids: Collection[int], name: str, target: float, *, is_low: bool
) -> dict[int, float]:
    """Return the seconds from each run's start until a metric first reaches a target.

    Runs that never reach it are left out.
    """
    lines = _lines(session, run_ids, name)
    steps = {
        run_id: step
        for run_id, line in lines.items()
        if (step := _first_reached(session, run_id, name, line, target, is_low=is_low)) is not None
    }
    return {
        run_id: elapsed_ms / 1000
        for run_id, step in steps.items()
        if (elapsed_ms := _elapsed_ms(session, run_id, name, step)) is not None
    }


def _first_reached(
    session: Session, run_id: int, name: str, line: Line, target: float, *, is_low: bool
) -> int | None:
    """Return the first step at which a metric reaches a target.

    Of a curve in buckets, the first extreme that reaches it is in the first bucket with such a
    value. The steps from the bucket before it to there are read again, until none is left out.
    """
    first = None
    while True:
        reached = (
            index
            for index, value in enumerate(line.y)
            if isinstance(value, float) and (value <= target if is_low else value >= target)
        )
        if (index := next(reached, None)) is None:
            return None
        if not line.mean_x:
            return line.x[index]
        # A bucket has at most two extremes, so the second point before is not in it.
        first = line.x[index - 2] if index >= 2 else first
        line = _lines(session, [run_id], name, first, line.x[index])[run_id]


def _lines(
    session: Session,
    run_ids: Collection[int],
    name: str,
    first: int | None = None,
    last: int | None = None,
) -> dict[int, Line]:
    """Read a metric of runs, or the loss of each step if it is called loss and they have one."""
    lines = {}
    if name == LOSS:
        of_steps = windows.windows_of(
            session, run_ids, first=first, last=last, most=POINTS, names=[name]
        )
        series = {run_id: window.series[name] for run_id, window in of_steps.items()}
        lines = {run_id: line for run_id, line in series.items() if Curve.of(line)}
    others = [run_id for run_id in run_ids if run_id not in lines]
    metrics = windows.metrics_of_runs(
        session, others, first=first, last=last, most=POINTS, names=[name]
    )
    return lines | {run_id: found[name] for run_id, found in metrics.items() if name in found}


def _elapsed_ms(session: Session, run_id: int, name: str, step: int) -> int | None:
    """Return the time of a step of a curve, from the table of which `_lines` has it."""
    rows = frozen_steps.rows_at(session, run_id, [step]) if name == LOSS else []
    if rows and rows[0].loss is not None:
        return rows[0].elapsed_ms
    query = select(Metric.elapsed_ms).where(
        Metric.run_id == run_id, Metric.name == name, Metric.step == step
    )
    return session.scalar(query)
