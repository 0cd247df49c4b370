"""What a run is likely to cost before it starts, by the latest finished ones that are like it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.runs import runs
from db.tables import KEPT, CheckpointFile, Run, Status

#: So many of the latest runs are looked through, of so many of those that finished the sizes are
#: compared, and so many of those that are alike are judged by.
LOOKED_THROUGH, COMPARED, LIKE = 2000, 50, 5

#: Tells by a run's settings of its recipe whether its sizes are those that are asked about.
SizesTest: TypeAlias = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Alike:
    """Finished runs that are like one: their ids, the least and most steps a second of theirs.

    same_batch_size, same_sizes: whether theirs are those that were asked for.
    """

    runs: list[int]
    slowest: float
    fastest: float
    same_batch_size: bool
    same_sizes: bool


def ahead(session: Session, priority: int) -> int:
    """Count the queued runs that start sooner than one of a priority that is submitted now."""
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
    """Find runs of the same recipe, precision and number of devices; of those sizes if any, and of
    that batch size.

    recipes: the names that the recipe goes by.  has_same_sizes: tells it by a run's settings.
    """
    batch = Run.config["training"]["batch_size"].as_float()
    query = (
        select(
            Run.id,
            Run.steps_per_second,
            batch.label("batch_size"),
            Run.config["recipe"].label("sizes"),
        )
        .where(Run.id > (runs.newest_id(session) or 0) - LOOKED_THROUGH, KEPT)
        .where(Run.status == Status.FINISHED, Run.steps_per_second > 0)
        .where(Run.recipe.in_(recipes), Run.precision == precision)
        .where(Run.nodes == nodes, Run.devices_per_node == devices_per_node)
        .order_by(Run.id.desc())
    )
    of_batch = session.execute(query.where(batch == batch_size).limit(COMPARED)).all()
    same = [row for row in of_batch if has_same_sizes(row.sizes or {})]
    others = [] if same else session.execute(query.limit(COMPARED)).all()
    same = same or [row for row in others if has_same_sizes(row.sizes or {})]
    found = (same or of_batch or others)[:LIKE]
    speeds = [row.steps_per_second for row in found] or [0.0]
    return Alike(
        [row.id for row in found],
        min(speeds),
        max(speeds),
        same_batch_size=any(row.batch_size == batch_size for row in found),
        same_sizes=bool(same),
    )


def checkpoint_bytes(session: Session, run_ids: Collection[int]) -> int | None:
    """Return what the files of the last checkpoint take, of the run in the middle; None of none."""
    newest = (
        select(CheckpointFile.run_id, func.max(CheckpointFile.step).label("step"))
        .where(CheckpointFile.run_id.in_(run_ids), CheckpointFile.kind == "checkpoint")
        .group_by(CheckpointFile.run_id)
        .subquery()
    )
    at = (CheckpointFile.run_id == newest.c.run_id) & (CheckpointFile.step == newest.c.step)
    sizes = (
        select(func.sum(CheckpointFile.size_bytes)).join(newest, at).group_by(CheckpointFile.run_id)
    )
    found = [int(size) for size in session.scalars(sizes)]
    return int(median(found)) if found else None
