"""Latest point of each metric of a run, stored so that run lists read no others."""

import json
import math
from bisect import bisect_right
from collections.abc import Collection
from functools import cache
from string import digits
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.orm import Session

from db.names import natural_key
from db.tables import LatestMetric
from db.telemetry import bulk_writes, metric_blocks
from db.telemetry.metric_points import MetricPoints
from db.telemetry.summaries import Ints

LARGEST = 1.7976931348623157e308  # largest finite float64
#: How names of evaluations begin, in lower case.
EVALUATIONS = ("val/", "val_", "val ", "valid", "eval", "test/", "test_", "test ")
KINDS_OF_EVALUATIONS = ("val", "valid", "validation", "eval", "test", "dev")
#: With names that end with "/loss" those that a chart draws with the loss, as in figure.js.
EVALUATED_LOSSES = tuple(f"{kind}_loss" for kind in KINDS_OF_EVALUATIONS)
#: Names of numbers that only count, in lower case.
COUNTERS = (
    *("epoch", "step", "iter", "iteration", "global_step", "_step"),
    *("train/epoch", "train/global_step", "trainer/global_step"),
)

_OF_NAMES = "SELECT name, step FROM latest_metrics WHERE run_id = :run_id AND name"
#: Queries of the last steps of metrics. The names are one parameter: a thousand would be parsed
#: each time.
LAST_STEPS = {
    "sqlite": text(f"{_OF_NAMES} IN (SELECT value FROM json_each(:names))"),  # noqa: S608
    "postgresql": text(f"{_OF_NAMES} = ANY(CAST(:names AS text[]))"),
}


class Point(NamedTuple):
    """One point of a metric."""

    step: int
    value: float  # the database has NaN as NULL


def note(connection: Connection, run_id: int, metrics: MetricPoints) -> None:
    """Store the last point of each metric unless a later one is stored."""
    columns: dict[str, bulk_writes.Column] = {
        "name": metrics.names,
        "step": metrics.points.step[metrics.last],
        "value": metrics.points.values[metrics.last, 0],
    }
    bulk_writes.upsert(
        connection,
        LatestMetric.__table__,
        {"run_id": run_id},
        columns,
        conflict=("run_id", "name"),
        where="excluded.step >= latest_metrics.step",
    )


def last_steps(connection: Connection, run_id: int, names: list[str], *, default: int) -> Ints:
    """Return the last step of each metric, or `default` for a metric without points."""
    kind = connection.dialect.name
    given = json.dumps(names) if kind == "sqlite" else names
    rows = connection.execute(LAST_STEPS[kind], {"run_id": run_id, "names": given})
    last: dict[str, int] = dict(rows.cursor.fetchall())
    return np.array([last.get(name, default) for name in names], np.int64)


class NamesPage(NamedTuple):
    """A page of metric names in natural order."""

    names: list[str]  # of the page, and the named ones
    page: list[str]
    total: int  # names on all pages
    every: int  # names of the run
    next: str | None  # None on the last page
    before: int  # names on earlier pages
    previous: str | None  # what the page before comes after; None on the first page


def page_of_names(
    session: Session,
    run_ids: Collection[int],
    *,
    search: str = "",
    after: str = "",
    named: Collection[str] = (),
    without: Collection[str] = (),
    limit: int,
) -> NamesPage:
    """Return a page of the names of the metrics of runs.

    search: words that a name contains, in any case.  after: the last name of the previous page.
    named: names that are added to every page.  without: names that are left out.
    """
    column = LatestMetric.name
    of_runs = select(column).where(LatestMetric.run_id.in_(run_ids), column.not_in(without))
    if len(run_ids) > 1:
        of_runs = of_runs.distinct()
    every = session.scalar(select(func.count()).select_from(of_runs.subquery())) or 0
    query = of_runs
    for word in search.split():
        query = query.where(column.icontains(word, autoescape=True))
    total = session.scalar(select(func.count()).select_from(query.subquery())) if search else every
    found = sorted(session.scalars(query), key=natural_key) if limit else []
    before = bisect_right(found, natural_key(after), key=natural_key) if after else 0
    matching = found[before:]
    previous = found[before - limit - 1] if before > limit else ""
    further = matching[limit - 1] if 0 < limit < len(matching) else None
    there = session.scalars(of_runs.where(column.in_(named))) if named else ()
    names = matching[:limit]
    shown = sorted({*names, *there}, key=natural_key)
    return NamesPage(shown, names, total or 0, every, further, before, previous if before else None)


def losses(session: Session, run_id: int, *, most: int) -> list[str]:
    """Return the first names of a run's metrics that are losses, as of evaluations."""
    name = LatestMetric.name
    is_loss = or_(name.endswith("/loss"), name.in_(EVALUATED_LOSSES))
    query = select(name).where(LatestMetric.run_id == run_id, is_loss)
    return sorted(session.scalars(query), key=natural_key)[:most]


def points(
    session: Session,
    run_ids: Collection[int],
    names: Collection[str] | Select[Any] | None = None,
) -> dict[int, dict[str, Point]]:
    """Return the latest point of each metric by run and name.

    names: only these metrics.
    """
    query = select(LatestMetric.run_id, LatestMetric.name, LatestMetric.step, LatestMetric.value)
    query = query.where(LatestMetric.run_id.in_(run_ids))
    if names is not None:
        query = query.where(LatestMetric.name.in_(names))
    points: dict[int, dict[str, Point]] = {run_id: {} for run_id in run_ids}
    for run_id, name, step, value in session.execute(query):
        points[run_id][name] = Point(step, math.nan if value is None else value)
    return points


def first_name(run_id: int | ColumnElement[int]) -> Select[str]:
    """Select the metric that stands for a run: of an evaluation if there is one, no counter.

    A numbered one, such as of one class of a hundred, only if it has no other.
    """
    name, lower = LatestMetric.name, func.lower(LatestMetric.name)
    is_numbered = func.substr(name, func.length(name)).in_(tuple(digits))
    query = select(name).where(LatestMetric.run_id == run_id, lower.not_in(COUNTERS))
    query = query.where(~name.startswith("run/"))
    order = case((is_evaluation(), 0), else_=1), case((is_numbered, 1), else_=0), name
    return query.order_by(*order).limit(1)


def is_numbered(name: str) -> bool:
    """Return whether a metric's name ends in a number, such as that of a class or a layer."""
    return name[-1:] in tuple(digits)


def siblings(session: Session, run_id: int, name: str) -> int:
    """Return how many metrics of a run differ from one by the number that their name ends in.

    This one is included; 0 if its name has no number.
    """
    if not is_numbered(name):
        return 0
    like = LatestMetric.name.startswith(name.rstrip(digits), autoescape=True)
    query = select(func.count()).where(LatestMetric.run_id == run_id, like)
    return session.scalar(query) or 0


def is_evaluation() -> ColumnElement[bool]:
    """Return the condition that a metric is of an evaluation, by its name."""
    lower = func.lower(LatestMetric.name)
    return or_(*(lower.startswith(prefix, autoescape=True) for prefix in EVALUATIONS))


def take_back(connection: Connection, run_id: int, *, after: int) -> None:
    """Revert the latest points to a step, after the later points have been deleted."""
    beyond = (LatestMetric.run_id == run_id, LatestMetric.step > after)
    names = connection.execute(select(LatestMetric.name).where(*beyond)).scalars().all()
    connection.execute(delete(LatestMetric).where(*beyond))
    left = metric_blocks.last_points(connection, run_id, names) if names else {}
    rows = [
        {"run_id": run_id, "name": name, "step": step, "value": None if value != value else value}
        for name, (step, value) in left.items()
    ]
    if rows:
        connection.execute(insert(LatestMetric), rows)


def nonfinite(session: Session, run_id: int, *, most: int) -> list[tuple[str, int]]:
    """Return name and step of metrics whose latest value is not finite, by name."""
    given = {"run_id": run_id, "most": most}
    rows = session.connection().execute(_nonfinite_query(), given)
    return [(name, step) for name, step in rows]


@cache
def _nonfinite_query() -> Select[str, int]:
    value = LatestMetric.value
    is_nonfinite = or_(value.is_(None), func.abs(value) > LARGEST)
    query = select(LatestMetric.name, LatestMetric.step)
    query = query.where(LatestMetric.run_id == bindparam("run_id"), is_nonfinite)
    return query.order_by(LatestMetric.name).limit(bindparam("most"))
