"""Placements: requests to a cluster for workers of a run's next attempt, and their state."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from db.clock import now
from db.queue.claims import unheld
from db.queue.quotas import Usage
from db.tables import ACTIVE, COMMAND, NOT_DELETED, RECIPE, Placement, Run, RunNode, Status, Worker

#: Delay until the next try: n² times this after the n-th failure, at most MOST_TRIES² times.
RETRY_SECONDS = 10.0
MOST_TRIES = 8
REASON_CHARACTERS = 500
OPEN = Placement.ended_at.is_(None)


def list_unplaced(
    session: Session,
    recipes: Collection[str],
    *,
    runs_per_user: int,
    devices_per_user: int,
    limit: int,
) -> Sequence[Any]:
    """List queued runs without a placement, next first: id, attempt, nodes, devices.

    attempt: the next one. limit: open placements allowed at once, existing ones included.
    """
    before = aliased(Placement)
    is_placed = exists().where(before.run_id == Run.id, before.ended_at.is_(None))
    attempts = func.coalesce(before.attempts, 0)
    is_too_soon = exists().where(
        before.run_id == Run.id,
        before.attempt == Run.attempt + 1,
        before.ended_at + RETRY_SECONDS * attempts * attempts > now(),
    )
    usage = Usage.read(session)
    open_placements = session.scalar(select(func.count()).select_from(Placement).where(OPEN)) or 0
    query = select(Run.id, (Run.attempt + 1).label("attempt"), Run.nodes, Run.devices_per_node)
    query = query.where(
        Run.status == Status.QUEUED,
        NOT_DELETED,
        or_(and_(Run.source == RECIPE, Run.recipe.in_(recipes)), Run.source == COMMAND),
        *unheld(runs_per_user),
        *usage.allows(devices_per_user),
        ~is_placed,
        ~is_too_soon,
    )
    return session.execute(
        query.order_by(*usage.order).limit(max(limit - open_placements, 0))
    ).all()


def begin(session: Session, row: Any) -> bool:
    """Record that workers are about to be requested; False if another process just did."""
    key = (row.id, row.attempt)
    placement = session.get(Placement, key, with_for_update=True)
    if placement is None:
        placement = Placement(run_id=row.id, attempt=row.attempt, attempts=0)
        session.add(placement)
    elif placement.ended_at is None:
        return False
    placement.nodes, placement.devices = row.nodes, row.devices_per_node
    placement.attempts = min(placement.attempts + 1, MOST_TRIES)
    placement.state, placement.reason = "waiting", "workers are being requested from the cluster"
    placement.placed_at, placement.ended_at = now(), None
    return True


def list_open(session: Session) -> list[tuple[Placement, bool]]:
    """List open placements, each with whether it is still needed.

    A run needs its workers while it is queued, and while one of them trains it; another worker
    that was up anyway may have claimed it.
    """
    is_by_one = exists().where(
        RunNode.run_id == Run.id,
        RunNode.attempt == Run.attempt,
        Worker.id == RunNode.worker_id,
        Worker.only_run_id == Run.id,
    )
    is_needed = Run.deleted_at.is_(None) & or_(
        Run.status == Status.QUEUED, and_(Run.status.in_(ACTIVE), is_by_one)
    )
    query = select(Placement, is_needed).join(Run, Run.id == Placement.run_id).where(OPEN)
    return [(placement, bool(needed)) for placement, needed in session.execute(query).all()]


def note(session: Session, run_id: int, attempt: int, state: str, reason: str) -> None:
    """Record the state that the cluster reports; pages that show the run are updated."""
    placement = session.get_one(Placement, (run_id, attempt), with_for_update=True)
    reason = reason[:REASON_CHARACTERS]
    if (placement.state, placement.reason) == (state, reason):
        return
    placement.state, placement.reason = state, reason
    if state == "gone":
        placement.ended_at = now()
    session.get_one(Run, run_id, with_for_update=True).revision += 1
