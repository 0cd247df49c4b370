"""What a run is likely to cost before it starts, by the latest finished ones that are like it."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db import runs
from db.tables import Checkpoint, Run, Status

#: So many of the latest runs are looked through, so many of those that are alike are judged by.
LOOKED_THROUGH, LIKE = 2000, 5


@dataclass(frozen=True)
class Estimate:
    """ahead: queued runs that start sooner.  runs: like ones that finished, by their ids.

    steps_per_second: the least and the most of them, None without any. same_batch_size: whether
    theirs is the one that was asked for.  checkpoint_bytes: of one, in the middle of those runs.
    """

    ahead: int
    runs: list[int]
    steps_per_second: tuple[float, float] | None
    same_batch_size: bool
    checkpoint_bytes: int | None


def estimate(
    session: Session,
    *,
    recipes: Collection[str],
    precision: str,
    devices_per_node: int,
    batch_size: int | None,
    priority: int,
) -> Estimate:
    """Judge by runs of the same recipe, precision and number of devices; of that batch size if any.

    recipes: the names that the recipe goes by.
    """
    waiting = select(func.count()).where(Run.status == Status.QUEUED, Run.priority >= priority)
    batch = Run.config["training"]["batch_size"].as_float()
    alike = (
        select(Run.id, Run.steps_per_second, batch.label("batch_size"))
        .where(Run.id > (runs.newest_id(session) or 0) - LOOKED_THROUGH, runs.KEPT)
        .where(Run.status == Status.FINISHED, Run.steps_per_second > 0)
        .where(Run.recipe.in_(recipes), Run.precision == precision)
        .where(Run.devices_per_node == devices_per_node)
        .order_by(Run.id.desc())
    )
    same = session.execute(alike.where(batch == batch_size).limit(LIKE)).all()
    found = same or session.execute(alike.limit(LIKE)).all()
    ids, speeds = [row.id for row in found], [row.steps_per_second for row in found]
    return Estimate(
        ahead=session.scalar(waiting) or 0,
        runs=ids,
        steps_per_second=(min(speeds), max(speeds)) if speeds else None,
        same_batch_size=bool(same),
        checkpoint_bytes=_checkpoint_bytes(session, ids),
    )


def _checkpoint_bytes(session: Session, run_ids: Collection[int]) -> int | None:
    """Return what the files of the last checkpoint take, of the run in the middle."""
    newest = (
        select(Checkpoint.run_id, func.max(Checkpoint.step).label("step"))
        .where(Checkpoint.run_id.in_(run_ids), Checkpoint.kind == "checkpoint")
        .group_by(Checkpoint.run_id)
        .subquery()
    )
    at = (Checkpoint.run_id == newest.c.run_id) & (Checkpoint.step == newest.c.step)
    sizes = select(func.sum(Checkpoint.size_bytes)).join(newest, at).group_by(Checkpoint.run_id)
    found = [int(size) for size in session.scalars(sizes)]
    return int(median(found)) if found else None
