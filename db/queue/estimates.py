"""Cost estimates for a run before it starts, from similar finished runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from db.runs import runs
from db.tables import NOT_DELETED, CheckpointFile, LatestMetric, Run, Status

#: Latest runs that are searched, finished ones of them to compare sizes with, similar ones to use.
SEARCHED, COMPARED, SIMILAR = 2000, 50, 5
#: Metric that a training records at its end.
PEAK_MEMORY = "run/peak_memory_bytes"

#: Returns whether a run's recipe settings have the requested sizes.
SizesTest: TypeAlias = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Alike:
    """Finished runs that are similar to a requested one, with their speeds."""

    runs: list[int]  # ids
    slowest: float  # steps per second
    fastest: float  # steps per second
    same_batch_size: bool  # some have the requested batch size
    same_sizes: bool  # all have the requested sizes


def ahead(session: Session, priority: int) -> int:
    """Count the queued runs ahead of a run of this priority that is submitted now."""
    waiting = select(func.count()).where(Run.status == Status.QUEUED, Run.priority >= priority)
    return session.scalar(waiting) or 0


def alike(
    session: Session,
    *,
    recipes: Collection[str],
    precision: str,
    nodes: int,
    devices_per_node: int,
    batch_size: int | None,
    has_same_sizes: SizesTest,
) -> Alike:
    """Return finished runs of the same recipe, precision and number of devices.

    Those with the same sizes and batch size are preferred.  recipes: names of the recipe.
    has_same_sizes: compares a run's recipe settings.
    """
    batch = Run.config["training"]["batch_size"].as_float()
    query = (
        select(
            Run.id,
            Run.steps_per_second,
            batch.label("batch_size"),
            Run.config["recipe"].label("sizes"),
        )
        .where(
            *_of_finished_runs(session, recipes, nodes, devices_per_node),
            Run.precision == precision,
        )
        .order_by(Run.id.desc())
    )
    of_batch = session.execute(query.where(batch == batch_size).limit(COMPARED)).all()
    same = [row for row in of_batch if has_same_sizes(row.sizes or {})]
    others = [] if same else session.execute(query.limit(COMPARED)).all()
    same = same or [row for row in others if has_same_sizes(row.sizes or {})]
    similar = (same or of_batch or others)[:SIMILAR]
    speeds = [row.steps_per_second for row in similar] or [0.0]
    return Alike(
        [row.id for row in similar],
        min(speeds),
        max(speeds),
        same_batch_size=any(row.batch_size == batch_size for row in similar),
        same_sizes=bool(same),
    )


@dataclass(frozen=True)
class Measured:
    """Figures of finished runs of one precision: medians of the latest ones."""

    runs: int
    steps_per_second: float
    memory_bytes: float | None  # peak; None if none of them recorded it


def measure(
    session: Session,
    *,
    recipes: Collection[str],
    nodes: int,
    devices_per_node: int,
    batch_size: int | None,
    has_same_sizes: SizesTest,
) -> dict[str, Measured]:
    """Return by precision what runs of the same sizes and batch size have measured."""
    query = (
        select(Run.id, Run.precision, Run.steps_per_second, Run.config["recipe"].label("sizes"))
        .where(*_of_finished_runs(session, recipes, nodes, devices_per_node))
        .where(Run.config["training"]["batch_size"].as_float() == batch_size)
        .order_by(Run.id.desc())
        .limit(4 * COMPARED)
    )
    by_precision: dict[str, list[tuple[int, float]]] = {}
    for run_id, precision, speed, sizes in session.execute(query):
        similar = by_precision.setdefault(precision, [])
        if len(similar) < SIMILAR and has_same_sizes(sizes or {}):
            similar.append((run_id, speed))
    peaks = _peaks(session, [run_id for rows in by_precision.values() for run_id, _ in rows])
    return {
        precision: Measured(
            runs=len(rows),
            steps_per_second=median(speed for _, speed in rows),
            memory_bytes=_median([peaks[run_id] for run_id, _ in rows if run_id in peaks]),
        )
        for precision, rows in by_precision.items()
        if rows
    }


def _of_finished_runs(
    session: Session, recipes: Collection[str], nodes: int, devices_per_node: int
) -> tuple[ColumnElement[bool], ...]:
    """Return conditions of the latest finished runs of a recipe on so many devices."""
    return (
        *(Run.id > (runs.newest_id(session) or 0) - SEARCHED, NOT_DELETED),
        *(Run.status == Status.FINISHED, Run.steps_per_second > 0, Run.recipe.in_(recipes)),
        *(Run.nodes == nodes, Run.devices_per_node == devices_per_node),
    )


def _peaks(session: Session, run_ids: Collection[int]) -> dict[int, float]:
    query = select(LatestMetric.run_id, LatestMetric.value).where(
        LatestMetric.run_id.in_(run_ids), LatestMetric.name == PEAK_MEMORY
    )
    return {run_id: value for run_id, value in session.execute(query) if value is not None}


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def checkpoint_bytes(session: Session, run_ids: Collection[int]) -> int | None:
    """Return the median size of the runs' last checkpoints; None if they have none."""
    newest = (
        select(CheckpointFile.run_id, func.max(CheckpointFile.step).label("step"))
        .where(CheckpointFile.run_id.in_(run_ids), CheckpointFile.kind == "checkpoint")
        .group_by(CheckpointFile.run_id)
        .subquery()
    )
    at = (CheckpointFile.run_id == newest.c.run_id) & (CheckpointFile.step == newest.c.step)
    query = (
        select(func.sum(CheckpointFile.size_bytes)).join(newest, at).group_by(CheckpointFile.run_id)
    )
    sizes = [int(size) for size in session.scalars(query)]
    return int(median(sizes)) if sizes else None
