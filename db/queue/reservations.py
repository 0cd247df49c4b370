"""Placement of runs of several devices, and the reservation for the first one that waits.

docs/decisions/0007-nodes-and-leases.md has the reasons for a single reservation.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Float,
    Integer,
    Row,
    Select,
    Text,
    bindparam,
    cast,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from db.clock import now
from db.queue.quotas import GIB, Usage
from db.queue.workers import TAKING
from db.tables import COMMAND, Run, RunNode, Status, Worker

#: Memory that a run's configuration requires per device.
MEMORY_GIB = func.coalesce(Run.config["training"]["device_memory_gib"].as_float(), 0.0)
#: Waiting runs that are considered, next first.
MOST_CANDIDATES = 100
#: Condition of a node: its devices are in use.
IN_USE = RunNode.ended_at.is_(None)
#: Condition of a run: it needs several devices at once.
SEVERAL = Run.nodes * Run.devices_per_node > 1


@dataclass(frozen=True)
class Offer:
    """Capabilities of a worker with all of its devices free."""

    recipes: Collection[str]
    precisions: Collection[str]
    device_memory_bytes: float
    commands: bool
    torch: str | None  # version, the same on all nodes of a run
    devices: int

    def takes(self, run: Row[Any]) -> bool:
        """Return whether the worker supports a run, regardless of free devices."""
        if self.devices < run.devices_per_node:
            return False
        if run.source == COMMAND:
            return self.commands
        is_offered = run.recipe in self.recipes and run.precision in self.precisions
        return is_offered and run.memory_gib <= self.device_memory_bytes / GIB


#: A queued run, as read.
QueuedRun: TypeAlias = Row[Any]


class FreeNode(NamedTuple):
    """A worker that is up, with the number of its free devices."""

    worker_id: int
    free: int


#: Workers that are up, by capabilities: usually most are equal.
Offers: TypeAlias = Mapping[Offer, Sequence[FreeNode]]


@dataclass(frozen=True)
class Reservation:
    """Devices of these workers reserved for a waiting run as they become free."""

    run: Row[Any]
    since: float
    until: float | None  # expected start of the run, None if unknown
    worker_ids: Sequence[int]

    @classmethod
    def of(cls, run: Row[Any]) -> "Reservation | None":
        """Return the reservation of a queued run, if any."""
        return cls(run=run, **run.reservation) if run.reservation else None

    def lets_pass(self, run: Row[Any]) -> bool:
        """Return whether a later run is expected to end before the reserved start."""
        in_time = (self.until or 0.0) - run.moment
        return run.expected_seconds is not None and run.expected_seconds <= in_time

    def left_over(self, worker: FreeNode) -> int:
        """Return how many free devices of a worker later runs may use."""
        reserved = self.run.devices_per_node if worker.worker_id in self.worker_ids else 0
        return max(worker.free - reserved, 0)


@dataclass(frozen=True)
class Plan:
    """Plan of a claim: a multi-node run that fits, and the reservation to respect."""

    group_run: Row[Any] | None = None  # the first multi-node run that fits
    partners: tuple[int, ...] = ()  # ids of the other workers for it
    reservation: Reservation | None = None
    first: Row[Any] | None = None  # the first run that waits for devices, as read
    changes: Mapping[str, Any] = field(default_factory=dict)  # of its row, not stored yet


def find_candidates(
    session: Session,
    waiting: tuple[ColumnElement[bool], ...],
    parameters: Mapping[str, object],
    offers: Offers,
    usage: Usage,
) -> Sequence[Row[Any]]:
    """List the first of these waiting runs that the workers might train.

    Runs that no worker could train are left out, so that they do not fill the limit.
    """
    up = {
        "line_workers": sum(map(len, offers.values())),
        "line_most_devices": max(offer.devices for offer in offers),
        "line_offered": sorted({name for offer in offers for name in offer.recipes}),
        "line_most_gib": max(offer.device_memory_bytes for offer in offers) / GIB,
    }
    query = _candidates_query(waiting, usage.order)
    return session.connection().execute(query, {**parameters, **up}).all()


@lru_cache(16)
def _candidates_query(
    waiting: tuple[ColumnElement[bool], ...], order: tuple[ColumnElement[Any], ...]
) -> Select[Any]:
    query = _CANDIDATES.where(
        *waiting,
        Run.nodes <= bindparam("line_workers", type_=Integer),
        Run.devices_per_node <= bindparam("line_most_devices", type_=Integer),
        or_(Run.source == COMMAND, Run.recipe.in_(bindparam("line_offered", expanding=True))),
        bindparam("line_most_gib", type_=Float) >= MEMORY_GIB,
    )
    return query.order_by(*order).limit(MOST_CANDIDATES)


_COLUMNS: tuple[ColumnElement[Any] | InstrumentedAttribute[Any], ...] = (
    *(Run.id, Run.source, Run.recipe, Run.precision, Run.nodes, Run.devices_per_node),
    *(Run.project, Run.owner_id, Run.priority, Run.position, Run.attempt),
    *(Run.expected_seconds, Run.first_since, Run.reservation),
    *(MEMORY_GIB.label("memory_gib"), now().label("moment")),
)
_CANDIDATES = select(*_COLUMNS)


def find_offers(session: Session, here: FreeNode, offer: Offer) -> Offers:
    """Return the workers that are up; the requesting one with the capabilities that it reports.

    A worker that a cluster started for one run is not used for another.
    """
    connection = session.connection()
    used: dict[int, int] = dict(connection.execute(_USED).all())
    offers = {offer: [here]}
    # The requesting worker comes first; equal offers may list their names in another order.
    for is_requesting, ids, *offered in connection.execute(
        _OFFERS, {"requesting_worker": here.worker_id}
    ):
        devices = offered[-1]
        if is_requesting:
            mine = replace(offer, torch=offered[-2], devices=max(devices, offer.devices))
            offers = {mine: [here]}
        else:
            workers = [
                FreeNode(worker_id, devices - used.get(worker_id, 0))
                for worker_id in map(int, ids.split(","))
            ]
            offers.setdefault(_offer(*offered), []).extend(workers)
    return offers


@lru_cache
def _offer(recipes: str, precisions: str, *others: Any) -> Offer:
    return Offer(frozenset(json.loads(recipes)), frozenset(json.loads(precisions)), *others)


def _offers_query() -> Select[Any]:
    is_requesting = Worker.id == bindparam("requesting_worker", type_=Integer)
    offered = (
        *(cast(Worker.recipe_names, Text), cast(Worker.precisions, Text)),
        *(Worker.device_memory_bytes, Worker.offers_commands),
        Worker.versions["torch"].as_string().label("torch"),
        func.json_array_length(Worker.devices).label("devices"),
    )
    its_run = select(Worker.only_run_id).where(is_requesting).scalar_subquery()
    is_alike = Worker.only_run_id.is_not_distinct_from(its_run)
    up = select(Worker.id, is_requesting.label("is_requesting"), *offered)
    up = up.where(Worker.placement.is_(None), or_(TAKING, is_requesting), is_alike)
    worker_id, *kind = up.subquery().c
    ids = func.aggregate_strings(cast(worker_id, Text), ",")
    query = select(kind[0], ids, *kind[1:]).group_by(*kind)
    return query.order_by(kind[0].desc())


#: A query of its own: in the query of the workers its cost is quadratic in their number.
_USED = (
    select(RunNode.worker_id, func.sum(func.json_array_length(RunNode.devices)))
    .where(IN_USE, RunNode.worker_id.is_not(None))
    .group_by(RunNode.worker_id)
)
_OFFERS = _offers_query()


def make_plan(
    session: Session,
    waiting: tuple[ColumnElement[bool], ...],
    parameters: Mapping[str, object],
    here: FreeNode,
    offer: Offer,
    reserve_after: float,
    usage: Usage,
) -> Plan:
    """Return the first multi-node run that this worker can join, and a reservation ahead of it.

    parameters: of the conditions in `waiting`.  offer: of the requesting worker.
    Nothing is written: see save_changes.
    """
    offers = find_offers(session, here, offer)
    line = find_candidates(session, (*waiting, SEVERAL), parameters, offers, usage)
    teams: dict[tuple[object, ...], list[list[FreeNode]]] = {}
    lacking: dict[tuple[object, ...], bool] = {}
    tried: set[tuple[object, ...]] = set()
    plan = Plan()
    for run in line:
        kind = (run.source, run.recipe, run.precision, run.memory_gib)
        shape = (*kind, run.nodes, run.devices_per_node)
        if shape not in teams:
            teams[shape] = find_teams(run, offers)
            # Without a team the workers for it do not exist, and nothing is reserved.
            lacking[shape] = bool(teams[shape]) and not any(_has_room(run, t) for t in teams[shape])
        passes = plan.reservation is None or plan.reservation.lets_pass(run)
        if run.nodes > 1 and (shape, passes) not in tried:
            tried.add((shape, passes))
            partners = _partners(run, teams[shape], here, None if passes else plan.reservation)
            if partners is not None:
                return replace(plan, group_run=run, partners=partners)
        if lacking[shape]:
            if plan.first is None:
                plan = _plan_wait(session, run, teams[shape], reserve_after)
            elif plan.reservation is None and run.reservation:
                plan = replace(plan, reservation=Reservation.of(run))
    return plan


def save_changes(session: Session, plan: Plan) -> None:
    """Store the plan's changes of the first waiting run, unless its row has changed since.

    Skips a locked row, to avoid a deadlock with a transaction that waits for this claim's locks.
    """
    first = plan.first
    if first is None or not plan.changes:
        return
    since = first.reservation and first.reservation["since"]
    row = select(Run.id).where(
        *(Run.id == first.id, Run.status == Status.QUEUED, Run.attempt == first.attempt),
        Run.first_since.is_not_distinct_from(first.first_since),
        Run.reservation["since"].as_float().is_not_distinct_from(since),
    )
    row = row.with_for_update(skip_locked=True)
    session.connection().execute(
        update(Run).where(Run.id == row.scalar_subquery()).values(**plan.changes)
    )


def find_teams(run: QueuedRun, offers: Offers) -> list[list[FreeNode]]:
    """Return the groups of workers, by torch version, that are large enough to train a run."""
    teams: dict[str, list[FreeNode]] = {}
    for offer in offers:
        if offer.takes(run):
            torch = (offer.torch or "") if run.nodes > 1 else ""
            teams.setdefault(torch, []).extend(offers[offer])
    return [team for _torch, team in sorted(teams.items()) if len(team) >= run.nodes]


def _has_room(run: QueuedRun, team: list[FreeNode]) -> bool:
    needed = run.devices_per_node
    return len([free for _id, free in team if free >= needed]) >= int(run.nodes)


def _partners(
    run: QueuedRun, teams: list[list[FreeNode]], here: FreeNode, reservation: Reservation | None
) -> tuple[int, ...] | None:
    """Return the other workers for a run: those with the fewest free devices that are enough."""
    if here.free < run.devices_per_node:
        return None
    for team in teams:
        room = {
            worker.worker_id: reservation.left_over(worker) if reservation else worker.free
            for worker in team
        }
        roomy = [worker_id for worker_id, free in room.items() if free >= run.devices_per_node]
        if here.worker_id in roomy and len(roomy) >= run.nodes:
            roomy.remove(here.worker_id)
            by_room = sorted(roomy, key=lambda worker_id: (room[worker_id], worker_id))
            return tuple(by_room[: run.nodes - 1])
    return None


def _plan_wait(
    session: Session, run: QueuedRun, teams: list[list[FreeNode]], reserve_after: float
) -> Plan:
    """Return a plan in which a run waits for devices, with a reservation after some time."""
    reservation = Reservation.of(run)
    changes: dict[str, Any] = {}
    if run.first_since is None:
        changes["first_since"] = run.moment
    waited = run.moment - (run.first_since or run.moment)
    if waited >= reserve_after and _is_due(reservation, run, teams, reserve_after):
        reservation = _reserve(session, run, teams, reservation)
        names = ("since", "until", "worker_ids")
        changes["reservation"] = {name: getattr(reservation, name) for name in names}
    return Plan(reservation=reservation, first=run, changes=changes)


def _is_due(
    reservation: Reservation | None,
    run: Row[Any],
    teams: list[list[FreeNode]],
    reserve_after: float,
) -> bool:
    """Return whether to reserve: for the first time, to replace lost workers, or to add some.

    If the end of the running runs is unknown, the reserved workers may have the longest ones: as
    many again are reserved after each further `reserve_after` seconds.
    """
    if reservation is None:
        return True
    up = {worker.worker_id for team in teams for worker in team}
    if len(up.intersection(reservation.worker_ids)) < run.nodes:
        return True
    rounds = len(reservation.worker_ids) // run.nodes
    is_known = reservation.until is not None and reservation.until > run.moment
    is_everyone = len(reservation.worker_ids) >= len(up)
    return (
        not is_known
        and not is_everyone
        and run.moment - reservation.since >= reserve_after * rounds
    )


def _reserve(
    session: Session, run: QueuedRun, teams: list[list[FreeNode]], before: Reservation | None
) -> Reservation:
    """Reserve the workers that are expected to have room first, and keep those reserved before."""
    chosen_before = set(before.worker_ids) if before else set()
    team_ids = [{worker.worker_id for worker in team} for team in teams]
    ends = _ends(session, set().union(*team_ids), run.moment)
    candidates = []
    for team, ids in zip(teams, team_ids, strict=True):
        ready = {
            worker.worker_id: _ready_at(run, worker, ends.get(worker.worker_id, []))
            for worker in team
        }
        free = {worker.worker_id: min(worker.free, run.devices_per_node) for worker in team}
        still = sorted(chosen_before & ids)
        new = sorted(
            ids.difference(still),
            key=lambda worker_id: (ready[worker_id], -free[worker_id], worker_id),
        )
        chosen = (
            [*still, *new[: run.nodes]] if len(still) >= run.nodes else [*still, *new][: run.nodes]
        )
        until = sorted(ready[worker_id] for worker_id in chosen)[run.nodes - 1]
        rank = (-len(still), until, -sum(free[worker_id] for worker_id in chosen))
        candidates.append((rank, chosen, until))
    _rank, chosen, until = min(candidates)
    return Reservation(
        run=run,
        since=before.since if before else run.moment,
        until=until if until < math.inf else None,
        worker_ids=chosen,
    )


def _ready_at(run: Row[Any], worker: FreeNode, ends: list[tuple[float, int]]) -> float:
    """Return when a worker is expected to have room for a node; infinity if unknown."""
    free, moment = worker.free, run.moment
    for end, devices in sorted(ends):
        if free >= run.devices_per_node:
            break
        free, moment = free + devices, end
    return float(moment) if free >= run.devices_per_node else math.inf


def _ends(
    session: Session, worker_ids: Collection[int], moment: float
) -> dict[int, list[tuple[float, int]]]:
    """Return the expected end and the devices of each node on these workers."""
    columns = (
        *(RunNode.worker_id, func.json_array_length(RunNode.devices).label("devices")),
        *(Run.step, Run.steps_total, Run.steps_per_second, Run.started_at, Run.expected_seconds),
    )
    query = select(*columns).join(Run, Run.id == RunNode.run_id).where(IN_USE)
    ends: dict[int, list[tuple[float, int]]] = {}
    for row in session.execute(query.where(RunNode.worker_id.in_(worker_ids))):
        ends.setdefault(row.worker_id, []).append((_end(row, moment), row.devices))
    return ends


def _end(run: Row[Any], moment: float) -> float:
    """Return the expected end of a run, by its speed or else by its estimated duration."""
    if run.steps_per_second and run.steps_total:
        return float(moment + max(run.steps_total - run.step, 0) / run.steps_per_second)
    end = (run.started_at or moment) + (run.expected_seconds or 0.0)
    return float(end) if run.expected_seconds and end > moment else math.inf
