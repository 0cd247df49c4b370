"""The latest point of each metric of a run, kept so that lists of runs need read no other."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.tables import LatestMetric, Metric

COLUMNS = ("run_id", "name", "step", "value")


class Point(NamedTuple):
    """value: None where it was not finite."""

    step: int
    value: float | None


def note(connection: Connection, points: Iterable[dict[str, Any]]) -> None:
    """Note points that were just recorded, of one run: of each metric the latest."""
    newest: dict[str, dict[str, Any]] = {}
    for point in points:
        known = newest.get(point["name"])
        if known is None or known["step"] <= point["step"]:
            newest[point["name"]] = {name: point[name] for name in COLUMNS}
    if not newest:
        return
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(LatestMetric)
    changed = {name: statement.excluded[name] for name in ("step", "value")}
    later = statement.excluded.step >= LatestMetric.step
    key = ("run_id", "name")
    statement = statement.on_conflict_do_update(index_elements=key, set_=changed, where=later)
    connection.execute(statement, list(newest.values()))


def points(
    session: Session,
    run_ids: Collection[int],
    names: Collection[str] | Select[Any] | None = None,
) -> dict[int, dict[str, Point]]:
    """Return by run and name the latest point of each metric that was told; of names, or all."""
    query = select(LatestMetric.run_id, LatestMetric.name, LatestMetric.step, LatestMetric.value)
    query = query.where(LatestMetric.run_id.in_(run_ids))
    if names is not None:
        query = query.where(LatestMetric.name.in_(names))
    found: dict[int, dict[str, Point]] = {run_id: {} for run_id in run_ids}
    for run_id, name, step, value in session.execute(query):
        found[run_id][name] = Point(step, value)
    return found


def take_back(connection: Connection, run_id: int, *, after: int) -> None:
    """Forget what lies beyond a step, where the points themselves are gone already."""
    beyond = (LatestMetric.run_id == run_id, LatestMetric.step > after)
    names = connection.execute(select(LatestMetric.name).where(*beyond)).scalars().all()
    connection.execute(delete(LatestMetric).where(*beyond))
    for name in names:
        points = select(*(getattr(Metric, column) for column in COLUMNS))
        points = points.where(Metric.run_id == run_id, Metric.name == name)
        latest = points.order_by(Metric.step.desc()).limit(1)
        connection.execute(insert(LatestMetric).from_select(COLUMNS, latest))
