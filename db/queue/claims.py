"""A worker's claim of the next run, with all of its nodes, some on other workers, or none.

docs/decisions/0007-nodes-and-leases.md explains the single transaction and its lock order.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Float,
    Integer,
    Select,
    Update,
    and_,
    bindparam,
    exists,
    func,
    insert,
    null,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.orm import Session, aliased

from db.alerts import notifications
from db.clock import now
from db.queue import quotas
from db.queue.quotas import GIB, Usage
from db.queue.reservations import (
    IN_USE,
    MEMORY_GIB,
    SEVERAL,
    FreeNode,
    Offer,
    Plan,
    Reservation,
    make_plan,
    save_changes,
)
from db.queue.workers import TAKING
from db.tables import (
    ACTIVE,
    COMMAND,
    ENDED,
    RECIPE,
    Run,
    RunNode,
    RunStatus,
    Status,
    Worker,
)

#: Conditions and parameters of a claim's statements. No parameter has the name of a column: an
#: UPDATE would set that column. Building a statement costs as much as executing it, so the parts
#: that all claims share are built once.
Conditions: TypeAlias = tuple[ColumnElement[bool], ...]
Parameters: TypeAlias = dict[str, Any]
CACHED_STATEMENTS = 16  # statements

_EARLIER, _OTHER = aliased(Run), aliased(Run)
_IS_UNHELD = ~exists().where(_EARLIER.id == Run.after_id, _EARLIER.status.not_in(ENDED))
#: Also part of the statement that takes a run, once the worker is locked: a concurrent drain either
#: waits for the claim, or is visible to it.
_IS_DRAINED = exists().where(
    Worker.id == bindparam("claim_asking", type_=Integer), Worker.drained_at.is_not(None)
)
_WAITS: Conditions = (Run.status == Status.QUEUED, ~_IS_DRAINED)
_IS_THAT_ONE = Run.id == bindparam("claim_only", type_=Integer)
#: True if a single-node run fits on the requesting worker.
_FITS = and_(
    Run.nodes == 1,
    Run.devices_per_node <= bindparam("claim_free", type_=Integer),
    or_(
        and_(
            Run.source == RECIPE,
            Run.recipe.in_(bindparam("claim_recipes", expanding=True)),
            Run.precision.in_(bindparam("claim_precisions", expanding=True)),
        ),
        and_(Run.source == COMMAND, bindparam("claim_takes_commands", type_=Boolean)),
    ),
    bindparam("claim_memory_gib", type_=Float) >= MEMORY_GIB,
)


def _passes(*before: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a reservation on the worker does not block a single-node run."""
    return or_(
        Run.priority > bindparam("reserved_priority", type_=Integer),
        and_(Run.priority == bindparam("reserved_priority", type_=Integer), *before),
        Run.devices_per_node <= bindparam("reserved_left_over", type_=Integer),
        Run.expected_seconds <= bindparam("reserved_seconds", type_=Float),  # null: unknown
    )


_RESERVED_POSITION = (
    bindparam("reserved_position", type_=Float),
    bindparam("reserved_id", type_=Integer),
)
_FITS_AFTER_RESERVED = _FITS & _passes(tuple_(Run.position, Run.id) <= tuple_(*_RESERVED_POSITION))
_NODES = select(RunNode.worker_id, RunNode.devices).where(
    RunNode.worker_id.in_(bindparam("worker_ids", expanding=True)), IN_USE
)
_LOCKED = (
    select(Worker.id, Worker.devices, TAKING)
    .where(Worker.id.in_(bindparam("worker_ids", expanding=True)))
    .order_by(Worker.id)
    .with_for_update(key_share=True)
)
#: Columns of a run that are about earlier attempts.
_CLEARED = ("error", "failure_kind", "first_since", "resumed_step", "stop_reason")
_TAKE_PART, _NOTE = insert(RunNode), insert(RunStatus).inline()


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
    reserve_after_seconds: float = 300.0,
    commands: bool = False,
    only: int | None = None,
) -> Run | None:
    """Claim the next queued run that fits, or None; for several nodes, other workers' devices too.

    Raising `attempt` makes every earlier attempt stale. Two claims never share a device: a claim
    locks the workers of its devices, in the order of their ids, and then reads the free devices.
    free_devices: devices that the worker reports as free.  device_memory_bytes: per device.
    runs_per_user, devices_per_user: limits per owner; 0 means none.  reserve_after_seconds: waiting
    time after which devices are reserved for the first run of several devices.  commands: whether
    the worker runs commands.  only: the only run to consider.
    """
    session.flush()  # the statements below run on the connection, which does not flush
    free = len(set(free_devices) - in_use(session, [worker_id])[worker_id])
    if not free:
        return None
    here = FreeNode(worker_id, free)
    offer = Offer(
        recipes=frozenset(recipes),
        precisions=frozenset(precisions),
        device_memory_bytes=device_memory_bytes,
        commands=commands,
        torch=None,
        devices=len(free_devices),
    )
    parameters = _parameters(here, offer) | {"claim_only": only}
    waits = (*_WAITS, *unheld(runs_per_user), *([] if only is None else [_IS_THAT_ONE]))
    usage = Usage.read(session, in_any_case=devices_per_user > 0)
    waiting = (*waits, *usage.allows(devices_per_user))
    is_one, are_several = _are_there(session, parameters, waiting, _FITS, SEVERAL)
    plan = Plan()
    if are_several:
        plan = make_plan(session, waiting, parameters, here, offer, reserve_after_seconds, usage)
    parameters |= _parameters(here, offer, plan.reservation)
    fits = _fits(here, plan.reservation, usage)
    if is_one and fits is not _FITS:
        [is_one] = _are_there(session, parameters, waiting, fits)
    if not is_one and plan.group_run is None:
        save_changes(session, plan)
        return None  # the usual case: nothing is locked for it
    per_user = bool(runs_per_user or devices_per_user)
    if per_user or usage.limits:
        quotas.take_turns(session, per_user=per_user)
        usage = Usage.read(session, in_any_case=devices_per_user > 0)
        waiting = (*waits, *usage.allows(devices_per_user))
    worker_ids = (worker_id, *plan.partners)
    taken = _lock(session, worker_ids, free_devices)
    save_changes(session, plan)
    parameters |= _parameters(FreeNode(worker_id, len(taken[worker_id])), offer, plan.reservation)
    fits = _fits(here, plan.reservation, usage)
    if plan.group_run is not None and all(
        len(devices) >= plan.group_run.devices_per_node for devices in taken.values()
    ):
        parameters["claim_group_run"] = plan.group_run.id
        fits = _or_group_run(fits)
    row = session.execute(_taking_query((*waiting, fits), usage.order), parameters).one_or_none()
    if row is None:
        return None
    run: Run = row[0]
    moment: float = row[1]
    its = {"run_id": run.id, "attempt": run.attempt}
    nodes = [
        {
            **its,
            "node": number,
            "worker_id": node_worker_id,
            "devices": taken[node_worker_id][: run.devices_per_node],
            "step_before": run.step,
            "lease_expires_at": moment + lease_seconds,
        }
        for number, node_worker_id in enumerate(worker_ids[: run.nodes])
    ]
    connection = session.connection()
    connection.execute(_TAKE_PART, nodes)
    by = "a worker" if run.nodes == 1 else f"{run.nodes} workers"
    connection.execute(_NOTE, {**its, "status": run.status, "reason": f"claimed by {by}"})
    notifications.notify(session, *worker_ids[1 : run.nodes])
    return run


def _are_there(
    session: Session, parameters: Parameters, waiting: Conditions, *kinds: ColumnElement[bool]
) -> Sequence[bool]:
    """Return for each kind whether a run of it is queued, in one statement."""
    return session.connection().execute(_are_there_query(waiting, kinds), parameters).one()


@lru_cache(CACHED_STATEMENTS)
def _are_there_query(waiting: Conditions, kinds: Conditions) -> Select[*tuple[bool, ...]]:
    return select(*(exists().where(*waiting, kind) for kind in kinds))


def in_use(session: Session, worker_ids: Collection[int]) -> dict[int, set[int]]:
    """Return the devices in use of each worker: those of active nodes."""
    used: dict[int, set[int]] = {worker_id: set() for worker_id in worker_ids}
    nodes = session.connection().execute(_NODES, {"worker_ids": list(worker_ids)})
    for worker_id, devices in nodes.all():
        used[worker_id or 0].update(devices)
    return used


@lru_cache(CACHED_STATEMENTS)  # of a setting
def unheld(runs_per_user: int) -> Conditions:
    """Return the condition that a queued run waits for no other run and no limit of its owner."""
    conditions: list[ColumnElement[bool]] = [_IS_UNHELD]
    if runs_per_user:
        active = select(func.count()).where(_OTHER.status.in_(ACTIVE))
        of_owner = active.where(_OTHER.owner_id == Run.owner_id).scalar_subquery()
        conditions.append(of_owner < runs_per_user)
    return tuple(conditions)


def _lock(
    session: Session, worker_ids: Sequence[int], free_devices: Collection[int]
) -> dict[int, list[int]]:
    """Lock these workers; return the free devices of each that is alive.

    free_devices: free devices of the first worker, by its own report.
    """
    indexes: dict[int, set[int]] = {worker_id: set() for worker_id in worker_ids}
    rows = session.connection().execute(_LOCKED, {"worker_ids": list(worker_ids)})
    for worker_id, devices, is_taking in rows.all():
        if is_taking:
            indexes[worker_id] = {int(device["index"]) for device in devices}
    indexes[worker_ids[0]] = set(free_devices)
    used = in_use(session, worker_ids)
    return {worker_id: sorted(indexes[worker_id] - used[worker_id]) for worker_id in worker_ids}


def _parameters(here: FreeNode, offer: Offer, reservation: Reservation | None = None) -> Parameters:
    """Return the parameters of the claim's statements: the worker and its reservation."""
    parameters = {
        "claim_asking": here.worker_id,
        "claim_free": here.free,
        "claim_recipes": list(offer.recipes),
        "claim_precisions": list(offer.precisions),
        "claim_takes_commands": offer.commands,
        "claim_memory_gib": offer.device_memory_bytes / GIB,
    }
    if reservation is not None:
        first = reservation.run
        parameters |= {
            "reserved_priority": first.priority,
            "reserved_position": first.position,
            "reserved_id": first.id,
            "reserved_left_over": reservation.left_over(here),
            "reserved_seconds": None
            if reservation.until is None
            else reservation.until - first.moment,
        }
    return parameters


def _fits(here: FreeNode, reservation: Reservation | None, usage: Usage) -> ColumnElement[bool]:
    """Return the condition that this worker can and may train a single-node run now."""
    if reservation is None or here.worker_id not in reservation.worker_ids:
        return _FITS
    if usage.loads is None:
        return _FITS_AFTER_RESERVED
    position = tuple_(usage.loads, Run.position, Run.id)
    return _FITS & _passes(
        position <= tuple_(usage.load(reservation.run.project), *_RESERVED_POSITION)
    )


@lru_cache(CACHED_STATEMENTS)
def _or_group_run(fits: ColumnElement[bool]) -> ColumnElement[bool]:
    return fits | (Run.id == bindparam("claim_group_run", type_=Integer))


@lru_cache(CACHED_STATEMENTS)
def _taking_query(conditions: Conditions, order: Conditions) -> Update:
    """Return the UPDATE that starts an attempt of the first of these runs, for both databases.

    SKIP LOCKED lets claims pass each other; SQLite needs no such clause: it has one writer.
    """
    first = select(Run.id).where(*conditions).order_by(*order).limit(1)
    first = first.with_for_update(skip_locked=True, of=Run)
    taken = update(Run).where(Run.id == first.scalar_subquery())
    taken = taken.values(
        attempt=Run.attempt + 1,
        status=Status.STARTING,
        revision=Run.revision + 1,
        worker_id=bindparam("claim_asking", type_=Integer),
        **dict.fromkeys(_CLEARED, None),
        reservation=null(),
    )
    # populate_existing: replace what the session has read of the run before.
    taken = taken.execution_options(synchronize_session=False, populate_existing=True)
    return taken.returning(Run, now())
