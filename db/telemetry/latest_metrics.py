"""The latest point of each metric of a run, so that lists read no other points."""

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Select, delete, func, insert, or_, select, text
from sqlalchemy.orm import Session

from db.tables import LatestMetric, Metric
from db.telemetry import bulk_writes
from db.telemetry.metric_points import MetricPoints
from db.telemetry.summaries import Ints

LARGEST = 1.7976931348623157e308  # finite number
COLUMNS = ("run_id", "name", "step", "value")

_OF_NAMES = "SELECT name, step FROM latest_metrics WHERE run_id = :run_id AND name"
#: The last steps of names, which are one parameter: a thousand would be parsed each time.
LAST_STEPS = {
    "sqlite": text(f"{_OF_NAMES} IN (SELECT value FROM json_each(:names))"),  # noqa: S608
    "postgresql": text(f"{_OF_NAMES} = ANY(CAST(:names AS text[]))"),
}


class Point(NamedTuple):
    """value: None where it was not finite."""

    step: int
    value: float | None


def note(connection: Connection, run_id: int, told: MetricPoints) -> None:
    """Note the last point of each metric, unless a later one is known."""
    columns: dict[str, bulk_writes.Column] = {
        "name": told.names,
        "step": told.points.step[told.last],
        "value": told.points.values[told.last, 0],
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
    """Return the last step of each name, or the default where it has no point yet."""
    kind = connection.dialect.name
    given = json.dumps(names) if kind == "sqlite" else names
    rows = connection.execute(LAST_STEPS[kind], {"run_id": run_id, "names": given})
    found: dict[str, int] = dict(rows.cursor.fetchall())
    return np.array([found.get(name, default) for name in names], np.int64)


class NamesPage(NamedTuple):
    """Names in order.  total: of all pages, every: of the run; next: None on the last page."""

    names: list[str]
    total: int
    every: int
    next: str | None


def page_of_names(
    session: Session,
    run_id: int,
    *,
    search: str = "",
    after: str = "",
    named: Collection[str] = (),
    limit: int,
) -> NamesPage:
    """Return a page of the names of a run's metrics.

    search: part of the names, in any case.  after: the last name of the page before.  named: names
    that are added to any page.
    """
    column = LatestMetric.name
    of_run = select(column).where(LatestMetric.run_id == run_id)
    every = session.scalar(select(func.count()).select_from(of_run.subquery())) or 0
    query = of_run
    if search:
        query = query.where(column.icontains(search, autoescape=True))
    total = session.scalar(select(func.count()).select_from(query.subquery())) if search else every
    if after:
        query = query.where(column > after)
    found = list(session.scalars(query.order_by(column).limit(limit + 1)))
    further = found[limit - 1] if len(found) > limit else None
    there = session.scalars(of_run.where(column.in_(named))) if named else ()
    return NamesPage(sorted({*found[:limit], *there}), total or 0, every, further)


def points(
    session: Session,
    run_ids: Collection[int],
    names: Collection[str] | Select[Any] | None = None,
) -> dict[int, dict[str, Point]]:
    """Return the latest points by run and name; of these names, or all."""
    query = select(LatestMetric.run_id, LatestMetric.name, LatestMetric.step, LatestMetric.value)
    query = query.where(LatestMetric.run_id.in_(run_ids))
    if names is not None:
        query = query.where(LatestMetric.name.in_(names))
    found: dict[int, dict[str, Point]] = {run_id: {} for run_id in run_ids}
    for run_id, name, step, value in session.execute(query):
        found[run_id][name] = Point(step, value)
    return found


def take_back(connection: Connection, run_id: int, *, after: int) -> None:
    """Reset the latest points after a step whose later points were deleted."""
    beyond = (LatestMetric.run_id == run_id, LatestMetric.step > after)
    names = connection.execute(select(LatestMetric.name).where(*beyond)).scalars().all()
    connection.execute(delete(LatestMetric).where(*beyond))
    for name in names:
        points = select(*(getattr(Metric, column) for column in COLUMNS))
        points = points.where(Metric.run_id == run_id, Metric.name == name)
        latest = points.order_by(Metric.step.desc()).limit(1)
        connection.execute(insert(LatestMetric).from_select(COLUMNS, latest))


def nonfinite(session: Session, run_id: int, *, most: int) -> list[tuple[str, int]]:
    """Return name and step of metrics whose latest value is not finite, in order of name."""
    value = LatestMetric.value
    is_nonfinite = or_(value.is_(None), func.abs(value) > LARGEST)
    query = select(LatestMetric.name, LatestMetric.step)
    query = query.where(LatestMetric.run_id == run_id, is_nonfinite)
    rows = session.execute(query.order_by(LatestMetric.name).limit(most))
    return [(name, step) for name, step in rows]
