"""Single numbers of a curve: its area over a range of steps, and the time until a target."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from db.runs import comparisons
from db.telemetry import metric_blocks, step_rows, windows
from db.telemetry.windows import Line, Ticks

LOSS = "loss"
#: Points of a curve that are read for its area; of a longer one, means of buckets of steps.
MOST_POINTS = 5_000
#: Points that are read at once in the search for a target.
POINTS = 1000
#: Steps that curves must have in common, so that their areas can be compared.
LEAST_IN_COMMON = 3

NO_LINE = Line([], [], Ticks())


class NotComparable(ValueError):
    """Curves that are not recorded at the same steps."""


@dataclass(frozen=True)
class CurveRange:
    """Steps over which several curves are compared."""

    first: int
    last: int
    points: int  # steps of which each curve has a value
    buckets: int | None  # of these steps, if means of buckets are used


@dataclass(frozen=True)
class Curve:
    """Values over steps: points, or means of buckets."""

    steps: list[int]
    values: list[float]
    is_finite: bool  # no value is NaN or infinite
    recorded: list[int]  # all steps, or middles of buckets
    ends: tuple[int, int]  # first and last of all steps
    is_bucketed: bool
    has_every_step: bool = False  # has a point at each step between its ends; of buckets only

    @classmethod
    def of(cls, line: Line) -> "Curve | None":
        """Return the curve of a line; None if it has no finite value."""
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isinstance(y, float)]
        if not known:
            return None
        nonfinite = line.nonfinite.steps
        is_finite = not nonfinite and not line.unknown
        if line.mean_x:
            ends = min([known[0][0], *nonfinite[:1]]), max([known[-1][0], *nonfinite[-1:]])
            return cls(line.mean_x, line.mean_y, is_finite, line.mean_x, ends, is_bucketed=True)
        steps, values = [x for x, _ in known], [y for _, y in known]
        return cls(steps, values, is_finite, line.x, (line.x[0], line.x[-1]), is_bucketed=False)

    def steps_until(self, last: int) -> Sequence[int]:
        """Return the steps that have a point; the middles of buckets where these are not known."""
        if self.has_every_step:
            return range(self.ends[0], last + 1)
        return [step for step in self.recorded if step <= last]


def have_same_steps(one: Curve, other: Curve) -> bool:
    """Return whether two curves have points at the same steps until the shorter one ends."""
    last = min(one.ends[1], other.ends[1])
    steps, others = one.steps_until(last), other.steps_until(last)
    return len(steps) == len(others) and (steps == others or list(steps) == list(others))


def areas(
    session: Session, name: str, curves: Mapping[int, Curve]
) -> tuple[CurveRange, dict[int, float]]:
    """Return the mean of each finite curve by the trapezoidal rule, over their common steps.

    Steps that only some of the curves have are left out: a coarse curve that falls has a larger
    area than the same one at more steps. Raises NotComparable.
    """
    first = max(curve.ends[0] for curve in curves.values())
    last = min(curve.ends[1] for curve in curves.values())
    within = dict(curves)
    is_part = any(curve.ends != (first, last) for curve in curves.values())
    if first < last and is_part and any(curve.is_bucketed for curve in curves.values()):
        # Curves of one range have the same buckets, and a long curve may have few points in it.
        lines = _lines(session, curves, name, first, last, most=MOST_POINTS)
        read = {run_id: Curve.of(line) for run_id, line in lines.items()}
        within = {run_id: curve for run_id, curve in read.items() if curve}
    steps = [curve.steps for curve in within.values()]
    bucketed = [run_id for run_id, curve in within.items() if curve.is_bucketed]
    if bucketed and not (
        len(bucketed) == len(curves)
        and all(curve.has_every_step for curve in curves.values())
        and all(step == steps[0] for step in steps)
    ):
        raise NotComparable(
            f"a curve of {name} has more than {MOST_POINTS:,} points, and not all have each step"
        )
    is_complete = len(within) == len(curves)
    common = reduce(np.intersect1d, map(np.array, steps if is_complete else [[]]))
    if len(common) < LEAST_IN_COMMON:
        raise NotComparable(
            f"the curves of {name} have {len(common)} steps in common; at least {LEAST_IN_COMMON} "
            "are needed"
        )
    shared = CurveRange(int(common[0]), int(common[-1]), len(common), None)
    if bucketed:
        shared = CurveRange(first, last, last - first + 1, len(common))
    return shared, {run_id: _mean(curve, common, shared) for run_id, curve in within.items()}


def _mean(curve: Curve, common: NDArray[np.generic], shared: CurveRange) -> float:
    """Return the area over the common steps, divided by their range; buckets reach to its ends."""
    steps = np.unique([shared.first, *common, shared.last]).astype(float)
    area = np.trapezoid(np.interp(steps, curve.steps, curve.values), steps)
    return float(area / (shared.last - shared.first))


def read_curves(session: Session, run_ids: Collection[int], name: str) -> dict[int, Curve]:
    """Return the curves of a metric, or of the loss of each step; without runs that have none."""
    lines = _lines(session, run_ids, name, most=MOST_POINTS)
    curves = {run_id: curve for run_id, line in lines.items() if (curve := Curve.of(line))}
    long = [run_id for run_id, curve in curves.items() if curve.is_bucketed]
    for run_id, (points, last) in _points(session, long, name).items():
        first = curves[run_id].ends[0]
        is_whole = points == last - first + 1
        curves[run_id] = replace(curves[run_id], ends=(first, last), has_every_step=is_whole)
    return curves


def _points(session: Session, run_ids: Collection[int], name: str) -> dict[int, tuple[int, int]]:
    """Return the number of points and the last step of long curves, from large buckets."""
    if not run_ids:
        return {}
    with_losses = _with_losses(session, run_ids, name)
    steps = windows.windows_of(session, with_losses, most=32, names=[name])
    points = {run_id: (window.total, window.last) for run_id, window in steps.items()}
    others = [run_id for run_id in run_ids if run_id not in points]
    measured = windows.measure_by_run(session, others, names=[name]) if others else {}
    return points | {
        run_id: (of.points, of.step) for run_id, some in measured.items() for of in some
    }


def seconds_until(
    session: Session, run_ids: Collection[int], name: str, target: float, *, is_low: bool
) -> dict[int, float]:
    """Return the seconds from each run's start until a metric first reaches a target.

    Runs that never reach it are left out.
    """
    lines = _lines(session, run_ids, name, most=POINTS)
    steps = {
        run_id: step
        for run_id, line in lines.items()
        if (step := _first_reached(session, run_id, name, line, target, is_low=is_low)) is not None
    }
    return {
        run_id: elapsed_ms / 1000
        for run_id, step in steps.items()
        if (elapsed_ms := _find_elapsed_ms(session, run_id, name, step)) is not None
    }


def _first_reached(
    session: Session, run_id: int, name: str, line: Line, target: float, *, is_low: bool
) -> int | None:
    """Return the first step at which a metric reaches a target.

    Of a curve in buckets, the first extreme that reaches it is in the first bucket with such a
    value. The steps from the bucket before it to there are halved and read again, until none is
    left out.
    """

    def find_reached(line: Line) -> int | None:
        """Return the index of the first point that reaches the target."""
        points = (
            index
            for index, value in enumerate(line.y)
            if isinstance(value, float) and (value <= target if is_low else value >= target)
        )
        return next(points, None)

    start = min([0, *line.x[:1]])
    while (index := find_reached(line)) is not None and line.mean_x:
        # A bucket has at most two extremes, so the second point before is not in it.
        start, last = line.x[index - 2] if index >= 2 else start, line.x[index]
        middle = (start + last) // 2
        for half in ((start, middle), (middle + 1, last)):
            line = _lines(session, [run_id], name, *half, most=POINTS).get(run_id, NO_LINE)
            if find_reached(line) is not None:
                break
            start = middle + 1
    return None if index is None else line.x[index]


def _lines(
    session: Session,
    run_ids: Collection[int],
    name: str,
    first: int | None = None,
    last: int | None = None,
    *,
    most: int,
) -> dict[int, Line]:
    """Read a metric of runs, or the loss of each step if it is called loss and they have one."""
    with_losses = _with_losses(session, run_ids, name)
    limits: dict[str, Any] = {"first": first, "last": last, "most": most}
    of_steps = windows.windows_of(session, with_losses, names=[name], **limits)
    others = [run_id for run_id in run_ids if run_id not in with_losses]
    metrics = windows.metrics_of_runs(session, others, names=[name], **limits)
    lines = {run_id: window.series[name] for run_id, window in of_steps.items()}
    return lines | {run_id: found[name] for run_id, found in metrics.items() if name in found}


def _with_losses(session: Session, run_ids: Collection[int], name: str) -> Collection[int]:
    """Return the runs whose steps have a loss, if it is what the name means."""
    return comparisons.lowest_losses(session, run_ids) if name == LOSS else ()


def _find_elapsed_ms(session: Session, run_id: int, name: str, step: int) -> int | None:
    """Return the time of a step of a curve, from the table of which `_lines` has it."""
    rows = step_rows.rows_at(session, run_id, [step]) if name == LOSS else []
    if rows and rows[0].loss is not None:
        return rows[0].elapsed_ms
    points = metric_blocks.points_at(session.connection(), run_id, name, [step])
    return int(points.elapsed_ms[0]) if len(points) else None
