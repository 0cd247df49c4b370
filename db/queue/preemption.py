"""Preemption: waiting runs take the devices of running ones of lower priority that allow it.

A preempted run saves a checkpoint and is queued again. docs/how-to/operations.md has the rules.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session, aliased

from db.database import Database
from db.queue.claims import unheld
from db.queue.quotas import Usage
from db.queue.reservations import (
    IN_USE,
    FreeNode,
    Offer,
    QueuedRun,
    find_candidates,
    find_offers,
    find_teams,
)
from db.queue.run_control import CONTROLLABLE
from db.queue.workers import TAKING
from db.runs import runs
from db.tables import ACTIVE, WATCH, Run, RunNode, Status, Worker

logger = logging.getLogger(__name__)

PREEMPT = "preempt"  # desired state
_RUNNING = aliased(Run)
_IS_PREEMPTIBLE = and_(
    _RUNNING.preemptible, _RUNNING.status.in_(CONTROLLABLE), _RUNNING.desired_state == "run"
)
_WAITS = (
    Run.status == Status.QUEUED,
    Run.source != WATCH,
    Run.priority > select(func.min(_RUNNING.priority)).where(_IS_PREEMPTIBLE).scalar_subquery(),
    *unheld(0),
)
_ACTIVE = (
    select(
        *(_RUNNING.id, _RUNNING.owner_id, _RUNNING.project, _RUNNING.priority),
        _IS_PREEMPTIBLE.label("is_preemptible"),
        (_RUNNING.desired_state != "run").label("stops"),
        *(RunNode.worker_id, func.json_array_length(RunNode.devices).label("devices")),
    )
    .outerjoin(RunNode, (RunNode.run_id == _RUNNING.id) & IN_USE)
    .where(_RUNNING.status.in_(ACTIVE))
)
_LOCKED = select(Worker.id).where(TAKING).order_by(Worker.id).with_for_update(key_share=True)
_NO_OFFER = Offer((), (), 0.0, commands=False, torch=None, devices=0)  # of no worker

#: Devices by worker.
Devices = Counter[int]


class Preemptible(NamedTuple):
    """A running run that may be preempted."""

    priority: int
    id: int
    project: str
    devices: Devices


def preempt_due(database: Database, *, runs_per_user: int, devices_per_user: int) -> None:
    """Preempt runs if one of a higher priority waits."""
    with database.reading() as session:
        if not session.scalar(select(exists().where(*_WAITS))):
            return
    with database.writing() as session:
        preempt(session, runs_per_user=runs_per_user, devices_per_user=devices_per_user)


def preempt(session: Session, *, runs_per_user: int = 0, devices_per_user: int = 0) -> None:
    """Preempt the runs without which waiting ones of higher priority can start.

    Devices of runs that stop anyway count as free, and limits as in claims.
    """
    session.execute(_LOCKED)  # claims wait meanwhile
    active = session.execute(_ACTIVE).all()
    usage = Usage.read(session)
    offers = find_offers(session, FreeNode(0, 0), _NO_OFFER)
    free: Devices = Counter({each.worker_id: each.free for up in offers.values() for each in up})
    running = Counter(owner for _id, owner in {(row.id, row.owner_id) for row in active})
    candidates: dict[int, Preemptible] = {}
    for row in active:
        if row.stops:
            free[row.worker_id] += row.devices or 0
        elif row.is_preemptible:
            new = Preemptible(row.priority, row.id, row.project, Counter())
            candidates.setdefault(row.id, new).devices[row.worker_id] += row.devices or 0
    in_order = sorted(candidates.values(), key=lambda each: (each.priority, -each.id))
    is_reserved = False  # for a run ahead
    for run in find_candidates(session, _WAITS, {}, offers, usage):
        if usage.obstacle(run, devices_per_user) or 0 < runs_per_user <= running[run.owner_id]:
            continue
        teams = find_teams(run, offers)
        worker_ids = _place(run, teams, free)
        if worker_ids is None and not (is_reserved and _is_large(run)):
            lower = [each for each in in_order if each.priority < run.priority]
            if chosen := _choose(run, teams, free, lower):
                worker_ids = _place(run, teams, _free_after(free, chosen)) or []
                if not _request(session, run, chosen, worker_ids):
                    continue
                free = _free_after(free, chosen)
                in_order = [each for each in in_order if each not in chosen]
        if worker_ids:
            free.subtract(dict.fromkeys(worker_ids, run.devices_per_node))
            usage.by_project[run.project] += run.nodes * run.devices_per_node
            usage.by_owner[run.owner_id] += run.nodes * run.devices_per_node
            running[run.owner_id] += 1
        elif run.reservation:
            is_reserved = True
            reserved = run.reservation["worker_ids"]
            free.subtract(dict.fromkeys(reserved, run.devices_per_node))


def _is_large(run: QueuedRun) -> bool:
    return bool(run.nodes * run.devices_per_node > 1)


def _free_after(free: Devices, ended: Sequence[Preemptible]) -> Devices:
    """Return the free devices once these runs have ended too."""
    result = Counter(free)
    for each in ended:
        result.update(each.devices)
    return result


def _place(run: QueuedRun, teams: list[list[FreeNode]], free: Devices) -> list[int] | None:
    """Return workers on which a run can start: those with the fewest devices that are enough."""
    for team in teams:
        room = sorted((free[each.worker_id], each.worker_id) for each in team)
        roomy = [worker_id for devices, worker_id in room if devices >= run.devices_per_node]
        if len(roomy) >= run.nodes:
            return roomy[: run.nodes]
    return None


def _choose(
    run: QueuedRun, teams: list[list[FreeNode]], free: Devices, lower: list[Preemptible]
) -> list[Preemptible]:
    """Return the runs to preempt for a run, or none if all of them are not enough.

    lower: by priority, youngest first. The first one that is enough; if it takes several, none of
    which the rest would be enough without.
    """

    def is_enough(chosen: list[Preemptible]) -> bool:
        return _place(run, teams, _free_after(free, chosen)) is not None

    if not is_enough(lower):
        return []
    if first := next((each for each in lower if is_enough([each])), None):
        return [first]
    chosen = lower
    for each in reversed(lower):
        rest = [other for other in chosen if other is not each]
        chosen = rest if is_enough(rest) else chosen
    return chosen


def _request(
    session: Session, run: QueuedRun, chosen: list[Preemptible], worker_ids: list[int]
) -> bool:
    """Request that these runs be queued again; False if one of the rows is locked by another.

    Several devices become free one by one: they are reserved.
    """
    waiting = select(Run).where(Run.id == run.id, Run.status == Status.QUEUED)
    row = session.scalar(waiting.with_for_update(skip_locked=True))
    ids = [each.id for each in chosen]
    found = select(_RUNNING).where(_RUNNING.id.in_(ids), _IS_PREEMPTIBLE).order_by(_RUNNING.id)
    locked = session.scalars(found.with_for_update(skip_locked=True)).all()
    if row is None or len(locked) < len(ids):
        return False
    if _is_large(run):
        row.reservation = {"since": run.moment, "until": None, "worker_ids": worker_ids}
    for victim in locked:
        is_visible = victim.project == run.project  # to all who view the preempted run
        by = f"run {run.id}" if is_visible else "a run of another project"
        victim.desired_state, victim.stop_reason = PREEMPT, f"preempted by {by}"
        runs.set_status(session, victim, Status.PAUSING, reason=victim.stop_reason)
        logger.info("preempted by run %d", run.id, extra={"run": victim.id})
    return True
