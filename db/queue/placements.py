"""What a cluster is asked for, run by run: workers for its next attempt, and how they fare."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from db.database import now
from db.queue.claims import unheld
from db.queue.quotas import Usage
from db.tables import ACTIVE, COMMAND, KEPT, RECIPE, Placement, Run, RunNode, Status, Worker

#: After the n-th try in vain n² times as long, at most MOST_TRIES² times, until the next.
RETRY_SECONDS = 10.0
MOST_TRIES = 8
REASON_CHARACTERS = 500
OPEN = Placement.ended_at.is_(None)


def wanted(
    session: Session,
    recipes: Collection[str],
    *,
    runs_per_user: int,
    devices_per_user: int,
    limit: int,
) -> Sequence[Any]:
    """List queued runs that nothing has been asked for, next first: id, attempt, nodes, devices.

    attempt: the one that is to be. limit: how many may be asked for at once, those before included.
    """
    before = aliased(Placement)
    is_asked = exists().where(before.run_id == Run.id, before.ended_at.is_(None))
    attempts = func.coalesce(before.attempts, 0)
    is_too_soon = exists().where(
        before.run_id == Run.id,
        before.attempt == Run.attempt + 1,
        before.ended_at + RETRY_SECONDS * attempts * attempts > now(),
    )
    usage = Usage.read(session)
    asked = session.scalar(select(func.count()).select_from(Placement).where(OPEN)) or 0
    query = select(Run.id, (Run.attempt + 1).label("attempt"), Run.nodes, Run.devices_per_node)
    query = query.where(
        Run.status == Status.QUEUED,
        KEPT,
        or_(and_(Run.source == RECIPE, Run.recipe.in_(recipes)), Run.source == COMMAND),
        *unheld(runs_per_user),
        *usage.allows(devices_per_user),
        ~is_asked,
        ~is_too_soon,
    )
    return session.execute(query.order_by(*usage.order).limit(max(limit - asked, 0))).all()


def begin(session: Session, row: Any) -> bool:
    """Write down that the cluster is about to be asked; False: somebody else did just now."""
    key = (row.id, row.attempt)
    placement = session.get(Placement, key, with_for_update=True)
    if placement is None:
        placement = Placement(run_id=row.id, attempt=row.attempt, attempts=0)
        session.add(placement)
    elif placement.ended_at is None:
        return False
    placement.nodes, placement.devices = row.nodes, row.devices_per_node
    placement.attempts = min(placement.attempts + 1, MOST_TRIES)
    placement.state, placement.reason = "waiting", "the cluster is asked for workers"
    placement.placed_at, placement.ended_at = now(), None
    return True


def unended(session: Session) -> list[tuple[Placement, bool]]:
    """List what has been asked for and is not gone, each with whether it is still wanted.

    A run needs its workers while it waits for them, and while one of them trains it: it may have
    been taken by others that were up anyway.
    """
    is_by_one = exists().where(
        RunNode.run_id == Run.id,
        RunNode.attempt == Run.attempt,
        Worker.id == RunNode.worker_id,
        Worker.only_run_id == Run.id,
    )
    is_wanted = Run.deleted_at.is_(None) & or_(
        Run.status == Status.QUEUED, and_(Run.status.in_(ACTIVE), is_by_one)
    )
    query = select(Placement, is_wanted).join(Run, Run.id == Placement.run_id).where(OPEN)
    return [(placement, bool(wanted)) for placement, wanted in session.execute(query).all()]


def note(session: Session, run_id: int, attempt: int, state: str, reason: str) -> None:
    """Write down how the workers fare, as the cluster says; pages that show the run are told."""
    placement = session.get_one(Placement, (run_id, attempt), with_for_update=True)
    reason = reason[:REASON_CHARACTERS]
    if (placement.state, placement.reason) == (state, reason):
        return
    placement.state, placement.reason = state, reason
    if state == "gone":
        placement.ended_at = now()
    session.get_one(Run, run_id, with_for_update=True).revision += 1
