"""Plot of confidence intervals, one row per group, with the margin as a band.

Horizontally everything is in per cent of the width, which the server does not know.
"""

from dataclasses import dataclass

from app.compare.parity import Parity
from halfstep.number_formats import number

#: Share of the width on each side of zero that the longest interval takes.
USED = 0.9


@dataclass(frozen=True)
class IntervalRow:
    """A group: its mean difference, and the ends of its intervals."""

    name: str
    at: float
    interval: tuple[float, float]  # 95 %
    equivalence_interval: tuple[float, float]  # 90 %


@dataclass(frozen=True)
class IntervalPlot:
    """Rows, and the labels of the axis with their positions."""

    rows: list[IntervalRow]
    labels: list[tuple[float, str]]
    band: tuple[float, float] | None  # the margin
    sides: tuple[str, str]  # what a difference to the left and to the right is


def interval_plot(parity: Parity) -> IntervalPlot | None:
    """Return the plot of the groups with intervals, if there are any."""
    results = [(group.label, group.result) for group in parity.groups]
    known = [
        (name, result.difference or 0.0, result.interval, result.equivalence_interval)
        for name, result in results
        if result.interval and result.equivalence_interval
    ]
    if not known:
        return None
    margin = parity.margin or 0.0
    ends = [abs(end) for _, _, wide, _ in known for end in (wide.low, wide.high)]
    limit = max(margin, *ends) / USED

    def place(value: float) -> float:
        return 50 + 50 * value / limit

    rows = [
        IntervalRow(
            name,
            place(difference),
            (place(wide.low), place(wide.high)),
            (place(narrow.low), place(narrow.high)),
        )
        for name, difference, wide, narrow in known
    ]
    # The ends of the axis have labels where the margin's would not be next to them or to zero's.
    outer = limit * USED
    values = {0.0, -outer, outer} if margin < outer / 2 else {0.0, -margin, margin}
    sides = ("lower", "higher")
    if parity.is_low is not None:
        sides = ("better", "worse") if parity.is_low else ("worse", "better")
    return IntervalPlot(
        rows,
        [(place(value), number(value)) for value in sorted(values)],
        (place(-margin), place(margin)) if margin else None,
        sides,
    )
