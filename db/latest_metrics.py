"""The latest point of each metric of a run, kept so that lists of runs need read no other."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Select, delete, insert, select
from sqlalchemy.orm import Session

from db import bulk
from db.summaries import Points
from db.tables import LatestMetric, Metric

COLUMNS = ("run_id", "name", "step", "value")


class Point(NamedTuple):
    """value: None where it was not finite."""

    step: int
    value: float | None


def note(connection: Connection, run_id: int, points: Mapping[str, Points]) -> None:
    """Note the last point of each metric, unless a later one is known. points: by name."""
    key = {"run_id": run_id}
    columns: dict[str, bulk.Column] = {
        "name": list(points),
        "step": np.array([mine.step[-1] for mine in points.values()]),
        "value": np.array([mine.values[-1, 0] for mine in points.values()]),
    }
    bulk.upsert(
        connection,
        LatestMetric.__table__,
        key,
        columns,
        conflict=("run_id", "name"),
        where="excluded.step >= latest_metrics.step",
    )


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
