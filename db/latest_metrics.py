"""The latest point of each metric of a run, kept so that lists of runs need read no other."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from db.tables import LatestMetric, Metric

COLUMNS = ("run_id", "name", "step", "value")


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
