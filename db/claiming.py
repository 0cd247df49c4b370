"""A worker's claim of the next run: all of its nodes or none, the other workers' with its own.

Why it is one transaction, and in which order it locks: decision 17.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, false, func, or_, select, tuple_, update
from sqlalchemy.orm import Session, aliased

from db import notifications, quotas, runs
from db.database import now
from db.quotas import GIB, Usage
from db.reservations import IN_USE, MEMORY_GIB, Place, Reservation, planned
from db.tables import (
    ACTIVE,
    COMMAND,
    ENDED,
    RECIPE,
    Run,
    RunNode,
    Status,
    Worker,
)
from db.workers import TAKING

#: Made once: each alias makes all of its columns anew.
_EARLIER, _OTHER = aliased(Run), aliased(Run)


def claim(
    session: Session,
    worker_id: int,
    *,
    recipes: Collection[str],
    precisions: Collection[str],
    free_devices: Collection[int],
    lease_seconds: float,
    device_memory_bytes: float = 0.0,
    runs_per_user: int = 0,
    devices_per_user: int = 0,
    gang_patience: float = 300.0,
    commands: bool = False,
    only: int | None = None,
) -> Run | None:
    """Take the next queued run that fits, or None; of several nodes, the others' workers with it.

    Raising `attempt` shuts out every earlier attempt. Two claims never share a device: each locks
    the workers that it takes devices of, in the order of their ids, and looks at what is free then.
    free_devices: those that the worker knows nothing on.
    device_memory_bytes: what every device has.
    runs_per_user, devices_per_user: for one owner at once; 0 means any number.
    gang_patience: seconds after which devices are kept for the first that waits for several.
    commands: whether the worker takes them too.
    only: a run beside which none is looked at.
    """
    quotas.take_turns(session, per_user=bool(runs_per_user or devices_per_user))
    free = set(free_devices) - in_use(session, [worker_id])[worker_id]
    if not free:
        return None
    here = Place(
        worker_id=worker_id,
        recipes=recipes,
        precisions=precisions,
        device_memory_bytes=device_memory_bytes,
        commands=commands,
        torch=None,
        devices=len(free_devices),
        free=len(free),
    )
    usage = Usage.read(session)
    waiting = [Run.status == Status.QUEUED, *unheld(runs_per_user), ~_is_drained(worker_id)]
    waiting += usage.allows(devices_per_user)
    if only is not None:
        waiting.append(Run.id == only)
    plan = planned(session, waiting, here, gang_patience, usage)
    fits = _fits(here, plan.kept, usage)
    if plan.gang is None and session.scalar(select(Run.id).where(*waiting, fits).limit(1)) is None:
        return None  # as is usual, and nothing is locked or written for it
    worker_ids = (worker_id, *plan.partners)
    taken = _lock(session, worker_ids, free_devices)
    fits = _fits(replace(here, free=len(taken[worker_id])), plan.kept, usage)
    if plan.gang is not None and all(
        len(devices) >= plan.gang.devices_per_node for devices in taken.values()
    ):
        fits |= Run.id == plan.gang.id
    run = _take(session, worker_id, [*waiting, fits], usage)
    if run is None:
        return None
    session.add_all(
        RunNode(
            run_id=run.id,
            attempt=run.attempt,
            node=number,
            worker_id=each,
            devices=taken[each][: run.devices_per_node],
            step_before=run.step,
            lease_expires_at=now() + lease_seconds,
        )
        for number, each in enumerate(worker_ids[: run.nodes])
    )
    notifications.tell(session, *worker_ids[1 : run.nodes])
    by = "a worker" if run.nodes == 1 else f"{run.nodes} workers"
    runs.set_status(session, run, Status.STARTING, reason=f"claimed by {by}")
    return run


def _is_drained(worker_id: int) -> ColumnElement[bool]:
    """Say of a worker that it is to take nothing. Asked in the statement that takes a run too, once
    the worker is locked: whoever drains it either waits for that, or is seen by it.
    """
    return exists().where(Worker.id == worker_id, Worker.drained_at.is_not(None))


def in_use(session: Session, worker_ids: Collection[int]) -> dict[int, set[int]]:
    """Return which devices of each of these workers have a node that has not ended."""
    used: dict[int, set[int]] = {worker_id: set() for worker_id in worker_ids}
    nodes = select(RunNode.worker_id, RunNode.devices).where(RunNode.worker_id.in_(worker_ids))
    for worker_id, devices in session.execute(nodes.where(IN_USE)):
        used[worker_id or 0].update(devices)
    return used


def unheld(runs_per_user: int) -> list[ColumnElement[bool]]:
    """Say of a queued run that neither another's end nor its owner's limit is in its way."""
    conditions = [~exists().where(_EARLIER.id == Run.after_id, _EARLIER.status.not_in(ENDED))]
    if runs_per_user:
        active = select(func.count()).where(_OTHER.status.in_(ACTIVE))
        of_owner = active.where(_OTHER.owner_id == Run.owner_id).scalar_subquery()
        conditions.append(of_owner < runs_per_user)
    return conditions


def _lock(
    session: Session, worker_ids: Sequence[int], free_devices: Collection[int]
) -> dict[int, list[int]]:
    """Keep these workers to this claim; return the free devices of each that is up.

    free_devices: those that the first of them, which asks, knows nothing on.
    """
    mine = select(Worker.id).where(Worker.id.in_(worker_ids)).order_by(Worker.id)
    session.execute(mine.with_for_update(key_share=True))
    indexes: dict[int, set[int]] = {each: set() for each in worker_ids}
    if len(worker_ids) > 1:
        up = select(Worker.id, Worker.devices).where(Worker.id.in_(worker_ids), TAKING)
        for worker_id, devices in session.execute(up):
            indexes[worker_id] = {int(device["index"]) for device in devices}
    indexes[worker_ids[0]] = set(free_devices)
    used = in_use(session, worker_ids)
    return {each: sorted(indexes[each] - used[each]) for each in worker_ids}


def _fits(here: Place, kept: Reservation | None, usage: Usage) -> ColumnElement[bool]:
    """Say of a run of one node that this worker can train it now, and may."""
    fits = and_(
        Run.nodes == 1,
        Run.devices_per_node <= here.free,
        or_(
            and_(
                Run.source == RECIPE,
                Run.recipe.in_(here.recipes),
                Run.precision.in_(here.precisions),
            ),
            Run.source == COMMAND if here.commands else false(),
        ),
        here.device_memory_bytes / GIB >= MEMORY_GIB,
    )
    if kept is None or here.worker_id not in kept.worker_ids:
        return fits
    first = kept.run
    place: list[Any] = [Run.position, Run.id]
    its = [first.position, first.id]
    if usage.loads is not None:
        place, its = [usage.loads, *place], [usage.load(first.project), *its]
    may = [
        Run.priority > first.priority,
        and_(Run.priority == first.priority, tuple_(*place) <= tuple_(*its)),
        Run.devices_per_node <= kept.left_over(here),
    ]
    if kept.until is not None:
        may.append(Run.expected_seconds <= kept.until - first.moment)
    return fits & or_(*may)


def _take(
    session: Session, worker_id: int, conditions: Collection[ColumnElement[bool]], usage: Usage
) -> Run | None:
    """Raise the attempt of the first of these runs: one statement, the same on both databases.

    SKIP LOCKED lets claims pass each other by; SQLite has no such clause and needs none, since it
    has one writer.
    """
    first = select(Run.id).where(*conditions).order_by(*usage.order).limit(1)
    first = first.with_for_update(skip_locked=True, of=Run)
    taken: Run | None = session.scalar(
        update(Run)
        .where(Run.id == first.scalar_subquery())
        .values(attempt=Run.attempt + 1, worker_id=worker_id, error=None, resumed_step=None)
        .returning(Run)
    )
    return taken
