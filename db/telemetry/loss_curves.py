"""Small curves of losses for lists of runs, which read no blocks of steps.

A curve has the first recorded step in each range of `stride` steps. The stride doubles when there
are too many, so the same steps give the same curve, however they came.
"""

from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, delete, select

from db.tables import LossCurve
from db.telemetry import bulk_writes
from db.telemetry.block_codec import Records

MOST_POINTS = 256
POINT = np.dtype([("step", "<i8"), ("loss", "<f8")])
Points = NDArray[np.void]


def add(connection: Connection, run_id: int, steps: Records) -> None:
    """Add steps, given in order, to the curve of a run."""
    points = np.zeros(len(steps), POINT)
    points["step"], points["loss"] = steps["step"], steps["loss"]
    add_points(connection, run_id, points)


def add_points(connection: Connection, run_id: int, points: Points) -> None:
    """Add points, given in order, to the curve of a run."""
    stride, before = _read(connection, run_id)
    points = _first_in_ranges(points, stride)
    if len(before) and len(points) and points["step"][0] <= before["step"][-1]:
        others = before[~np.isin(before["step"], points["step"])]
        joined = np.concatenate([others, points])
        joined = joined[np.argsort(joined["step"], kind="stable")]
    else:
        joined = np.concatenate([before, points])
    joined = _first_in_ranges(joined, stride)
    while len(joined) > MOST_POINTS:
        stride *= 2
        joined = _first_in_ranges(joined, stride)
    if joined.tobytes() != before.tobytes():
        _write(connection, run_id, stride, joined)


def truncate(connection: Connection, run_id: int, *, after: int) -> None:
    """Delete the points after a step."""
    stride, points = _read(connection, run_id)
    left = points[points["step"] <= after]
    if not len(left):
        connection.execute(delete(LossCurve).where(LossCurve.run_id == run_id))
    elif len(left) < len(points):
        _write(connection, run_id, stride, left)


def read(connection: Connection, run_ids: Collection[int]) -> dict[int, Points]:
    """Return the curve of each run that has one."""
    query = select(LossCurve.run_id, LossCurve.points).where(LossCurve.run_id.in_(run_ids))
    return {run_id: np.frombuffer(points, POINT) for run_id, points in connection.execute(query)}


def _read(connection: Connection, run_id: int) -> tuple[int, Points]:
    row = connection.execute(_query(), {"run_id": run_id}).cursor.fetchone()
    return (1, np.zeros(0, POINT)) if row is None else (row[0], np.frombuffer(row[1], POINT))


@cache
def _query() -> Any:
    table = LossCurve.__table__.c
    return select(table.stride, table.points).where(table.run_id == bindparam("run_id"))


def _write(connection: Connection, run_id: int, stride: int, points: Points) -> None:
    columns: dict[str, bulk_writes.Column] = {
        "stride": np.array([stride]),
        "points": [points.tobytes()],
    }
    bulk_writes.replace(connection, LossCurve.__table__, {"run_id": run_id}, columns)


def _first_in_ranges(points: Points, stride: int) -> Points:
    ranges = points["step"] // stride
    return points[np.flatnonzero(np.diff(ranges, prepend=ranges[:1] - 1))]
