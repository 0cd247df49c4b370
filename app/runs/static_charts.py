"""First charts of a run's page as SVG, shown until the scripts have drawn theirs.

They have the margins, ranges and labels of `app/static/charts/figure.js`, so that nothing moves
when they are replaced. Horizontally everything is in shares of the plot: the server does not know
its width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from markupsafe import Markup
from sqlalchemy.orm import Session

from app.html import nonfinite_marks
from app.html.formats import power_of_two
from app.html.formats import scale as scale_text
from app.html.nonfinite_marks import Mark
from db.tables import Run
from db.telemetry import latest_metrics, windows
from halfstep.number_formats import count, number
from halfstep.telemetry.plain_json import json_safe

#: Points that are read of a line. Of those in a column the extremes are drawn.
MOST_POINTS = 1000
#: Units of a column: two pixels of a wide screen.
COLUMN = 2
#: Units of the drawing area; it is stretched to the plot.
WIDTH, HEIGHT = 1000, 1000
#: Pixels of a plot between the margins, for which labels are chosen: at 1440 and at 390 px.
PIXELS, NARROW_PIXELS, LABEL_PIXELS = 920, 300, 90
LOG_LABELS = 5  # of a logarithmic axis
#: Share of the axis that Plotly leaves free beyond the outermost values.
FREE = 0.05
#: Metrics drawn with the loss, and the share by which a copy of it differs, as in
#: `app/static/charts/figure.js`.
MOST_LOSSES, SAME = 8, 1e-5


@dataclass(frozen=True)
class StaticLine:
    """A line, drawn; value: its last one, formatted."""

    name: str
    color: str
    path: str
    value: Markup


@dataclass(frozen=True)
class Label:
    """A label of an axis, at a share of it; is_fine: only on wide screens."""

    at: float
    text: Markup
    is_fine: bool = False


@dataclass(frozen=True)
class StaticChart:
    """A panel: its lines, labels, the steps that were skipped, and values that are not finite."""

    lines: Sequence[StaticLine]
    x_labels: Sequence[Label]
    y_labels: Sequence[Label]
    skips: str  # path of the ticks
    marks: Sequence[Mark]

    @property
    def signs(self) -> list[tuple[str, str]]:
        """Sign and name of each kind of mark."""
        return nonfinite_marks.signs(self.marks)


@dataclass(frozen=True)
class _Axis:
    """The values from low to high, their logarithms if is_log."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value stands, 0 at the lower end."""
        at = math.log10(value) if self.is_log else value
        return (at - self.low) / ((self.high - self.low) or 1)


def static_charts(session: Session, run: Run, *, is_scaled: bool) -> dict[str, StaticChart]:
    """Return the two first charts of a run by row: its loss, and its scale or gradient norm.

    Raises StepsNotConverted.
    """
    second = "scale" if is_scaled else "grad_norm"
    by_run = windows.windows_of(session, [run.id], most=MOST_POINTS, names={second})
    if not by_run:
        return {}
    window = by_run[run.id]
    names = latest_metrics.losses(session, run.id, most=MOST_LOSSES)
    measured = windows.metrics_of_runs(session, [run.id], most=MOST_POINTS, names=names)[run.id]
    others = {name: _Curve.of(measured[name]) for name in names if name in measured}
    colors = {name: f"--run-{i}" if i else "--chart-val" for i, name in enumerate(names)}
    own = {name: _Curve.of(line) for name, line in window.series.items()}
    for name, value in (("loss", run.known_loss), ("scale", run.scale)):
        if name in own and window.bucket > 1:  # a bucket has its extremes, not its last step
            own[name] = own[name].until(window.last, json_safe(value))
    first = min([window.first, *(curve.x[0] for curve in others.values() if curve.x)])
    x_axis = _Axis(first, window.last)
    others = {name: curve for name, curve in others.items() if not _is_copy(curve, own["loss"])}
    charts = {"loss": _loss_chart(own["loss"], others, colors, x_axis)}
    curves = {"loss": [own["loss"], *others.values()]}
    if is_scaled:
        charts["scale"], curves["scale"] = _scale_chart(own["scale"], x_axis), [own["scale"]]
    else:
        charts["norm"], curves["norm"] = _norm_chart(own["grad_norm"], x_axis), [own["grad_norm"]]
    labels, skips = _x_labels(x_axis), _skips(window.skips.steps, x_axis)
    return {
        row: StaticChart(lines, labels, y_labels, skips, _marks(curves[row], x_axis))
        for row, (lines, y_labels) in charts.items()
    }


@dataclass(frozen=True)
class _Curve:
    """Points of a line, with None where nothing is drawn."""

    x: Sequence[int]
    y: Sequence[float | None]
    last: float | str | None  # as JSON has it; None: unknown
    nonfinite: Sequence[tuple[int, str | None]]

    @classmethod
    def of(cls, line: windows.Line) -> Self:
        buckets = line.nonfinite.steps if line.is_bucketed else ()
        nonfinite = nonfinite_marks.values_of(line.x, line.y, buckets)
        return cls(line.x, list(map(_finite, line.y)), line.y[-1] if line.y else None, nonfinite)

    def until(self, step: int, value: float | str | None) -> "_Curve":
        """Return the curve with the value of a last step."""
        return _Curve([*self.x, step], [*self.y, _finite(value)], value, self.nonfinite)


def _is_copy(metric: _Curve, loss: _Curve) -> bool:
    """Return whether a script has logged the steps' losses again, with steps from 1 or from 0."""
    own = dict(zip(loss.x, loss.y, strict=True))

    def is_same(step: int, value: float | None) -> bool:
        known = own.get(step)
        if value is None or known is None:
            return False
        return math.isclose(value, known, rel_tol=SAME)

    points = list(zip(metric.x, metric.y, strict=True))
    return bool(points) and any(
        all(is_same(step + shift, value) for step, value in points) for shift in (0, 1)
    )


_Drawn = tuple[list[StaticLine], list[Label]]


def _marks(curves: Sequence[_Curve], axis: _Axis) -> list[Mark]:
    return nonfinite_marks.marks(
        (step for curve in curves for step in curve.nonfinite), lambda step: axis.share(step)
    )


def _loss_chart(
    loss: _Curve, others: Mapping[str, _Curve], colors: Mapping[str, str], x_axis: _Axis
) -> _Drawn:
    values = [y for curve in (loss, *others.values()) for y in curve.y if y is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    is_from_zero = low >= 0 and low <= high / 2
    free = (high - low) * FREE / (1 - 2 * FREE)
    axis = _Axis(0, high / (1 - FREE)) if is_from_zero else _Axis(low - free, high + free)
    lines = [_line("loss", "--chart-loss", loss, x_axis, axis)]
    lines += [_line(name, colors[name], curve, x_axis, axis) for name, curve in others.items()]
    return lines, _y_labels(axis, 6)


def _scale_chart(scale: _Curve, x_axis: _Axis) -> _Drawn:
    exponents = [math.log2(y) for y in scale.y if y is not None and y > 0]
    if not exponents:
        return [], []
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
    every = next((step for step in (1, 2, 4, 8, 10, 20) if (high - low) / step <= 8), 40)
    axis = _Axis(math.log10(2.0**low), math.log10(2.0**high), is_log=True)
    first = math.ceil(low / every) * every
    labels = [Label(axis.share(2.0**e), power_of_two(e)) for e in range(first, high + 1, every)]
    line = _line("scale", "--chart-scale", scale, x_axis, axis, is_stepped=True)
    return [line], labels


def _norm_chart(norm: _Curve, x_axis: _Axis) -> _Drawn:
    logs = [math.log10(y) for y in norm.y if y is not None and y > 0]
    if not logs:
        return [], []
    free = (max(logs) - min(logs)) * FREE / (1 - 2 * FREE)
    axis = _Axis(min(logs) - free, max(logs) + free, is_log=True)
    low, high = 10 ** min(logs), 10 ** max(logs)
    ticks = _log_ticks(low, high) if low < high else _log_ticks(low / 10, high * 10)
    labels = [Label(share, _text(tick)) for tick in ticks if 0 <= (share := axis.share(tick)) <= 1]
    return [_line("norm", "--chart-norm", norm, x_axis, axis)], labels


def _log_ticks(low: float, high: float) -> list[float]:
    """Return at least three labels of a logarithmic axis, as logTicks of axis.js does.

    low, high: the least and the largest value.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / LOG_LABELS))
    powers = range(first, last + 1)
    for ticks in (
        [10.0**power for power in powers if power % every == 0],
        [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)],
    ):
        if len(inside := [tick for tick in ticks if low <= tick <= high]) >= 3:
            return inside
    step = _step((high - low) / LOG_LABELS, (1, 2, 5, 10))
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _finite(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _line(
    name: str, color: str, curve: _Curve, x_axis: _Axis, axis: _Axis, *, is_stepped: bool = False
) -> StaticLine:
    path, is_down = [], False
    for x, y in _fold(curve, x_axis):
        if y is None or (axis.is_log and y <= 0):
            is_down = False
            continue
        height = round(HEIGHT * (1 - axis.share(y)))
        if not is_down:
            path.append(f"M{x} {height}")
        elif is_stepped:
            path.append(f"H{x}V{height}")
        else:
            path.append(f"L{x} {height}")
        is_down = True
    last = curve.last
    if isinstance(last, str):
        text = Markup.escape(number(last))
    else:
        text = scale_text(last) if is_stepped else _text(last, digits=5)
    return StaticLine(name, color, "".join(path), text)


def _fold(curve: _Curve, axis: _Axis) -> Iterator[tuple[int, float | None]]:
    """Yield each column with its first, lowest, highest and last value, in their order."""
    columns = groupby(
        zip(curve.x, curve.y, strict=True),
        lambda point: COLUMN * round(WIDTH / COLUMN * axis.share(point[0])),
    )
    for x, column in columns:
        values = [y for _, y in column]
        finite = [i for i, y in enumerate(values) if y is not None]
        if not finite:
            yield x, None
            continue
        extremes = (
            min(finite, key=lambda i: values[i] or 0.0),
            max(finite, key=lambda i: values[i] or 0.0),
        )
        for i in sorted({finite[0], *extremes, finite[-1]}):
            yield x, values[i]


def _text(value: float | None, digits: int = 12) -> Markup:
    return Markup.escape("–" if value is None else f"{value:.{digits}g}")


def _y_labels(axis: _Axis, most: int) -> list[Label]:
    """Label multiples of 2, 5 or 10 times a power of ten, as Plotly does."""
    every = _step((axis.high - axis.low) / most, (2, 5, 10))
    first, last = math.ceil(axis.low / every), math.floor(axis.high / every)
    return [Label(axis.share(n * every), _text(n * every)) for n in range(first, last + 1)]


def _x_labels(axis: _Axis) -> list[Label]:
    """Label steps as axis.js does; a narrow screen shows some of the labels."""
    every = _step((axis.high - axis.low) / (PIXELS / LABEL_PIXELS), (1, 2, 5, 10), is_whole=True)
    wide = _step((axis.high - axis.low) / (NARROW_PIXELS / LABEL_PIXELS), (1, 2, 5, 10))
    first, last = math.ceil(axis.low / every), math.floor(axis.high / every)
    if axis.high <= axis.low:
        return []
    return [
        Label(axis.share(step), Markup.escape(count(step)), is_fine=step % max(round(wide), 1) != 0)
        for step in (round(n * every) for n in range(first, last + 1))
    ]


def _step(least: float, multiples: Sequence[int], *, is_whole: bool = False) -> float:
    """Return the least multiple of a power of ten that is not below `least`."""
    if not 0 < least < math.inf:
        return 1
    power = 10.0 ** math.floor(math.log10(least))
    step = next(n * power for n in multiples if n * power >= least * 0.999)
    return max(1, round(step)) if is_whole else step


def _skips(steps: Sequence[int], axis: _Axis) -> str:
    """Return ticks of skipped steps, those at the same unit as one."""
    places = sorted({round(WIDTH * axis.share(step)) for step in steps if step >= axis.low})
    return "".join(f"M{x} 0V9" for x in places)
