"""Who trains a run of several devices, and what is kept for the first of them that waits.

What a reservation is, and why one is enough: decision 17.
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

from db.database import now
from db.queue.quotas import GIB, Usage
from db.queue.workers import TAKING
from db.tables import COMMAND, Run, RunNode, Status, Worker

#: What a run's configuration asks of each device.
MEMORY_GIB = func.coalesce(Run.config["training"]["device_memory_gib"].as_float(), 0.0)
#: So many of the first that want several devices are looked at.
LOOKED_AT = 100
#: Of a node: its devices are in use.
IN_USE = RunNode.ended_at.is_(None)
#: Of a run: it wants several devices at once.
SEVERAL = Run.nodes * Run.devices_per_node > 1


@dataclass(frozen=True)
class Offer:
    """What a worker can train, once all of its devices are free.

    torch: its version, which the nodes of a run have in common.
    """

    recipes: Collection[str]
    precisions: Collection[str]
    device_memory_bytes: float
    commands: bool
    torch: str | None
    devices: int

    def takes(self, run: Row[Any]) -> bool:
        """Tell whether a run can train here, as far as its kind goes."""
        if self.devices < run.devices_per_node:
            return False
        if run.source == COMMAND:
            return self.commands
        is_offered = run.recipe in self.recipes and run.precision in self.precisions
        return is_offered and run.memory_gib <= self.device_memory_bytes / GIB


class FreeNode(NamedTuple):
    """A worker that is up, and how many of its devices are free."""

    worker_id: int
    free: int


#: Those that are up, by what they offer: most of many offer the same.
Places: TypeAlias = Mapping[Offer, Sequence[FreeNode]]


@dataclass(frozen=True)
class Reservation:
    """What is kept for a run that waits: devices that come free on these workers.

    until: when it is thought to start, null if that is not known.
    """

    run: Row[Any]
    since: float
    until: float | None
    worker_ids: Sequence[int]

    @classmethod
    def of(cls, run: Row[Any]) -> "Reservation | None":
        """Return that of a queued run, if it has one."""
        return cls(run=run, **run.reservation) if run.reservation else None

    def lets_pass(self, run: Row[Any]) -> bool:
        """Tell whether a run that comes later has ended by then, as far as is known."""
        in_time = (self.until or 0.0) - run.moment
        return run.expected_seconds is not None and run.expected_seconds <= in_time

    def left_over(self, place: FreeNode) -> int:
        """Return how many free devices of a worker later runs may have."""
        kept = self.run.devices_per_node if place.worker_id in self.worker_ids else 0
        return max(place.free - kept, 0)


@dataclass(frozen=True)
class Plan:
    """What a claim is to go by: the first gang that fits, who else takes part, what is kept.

    first, news: the first run that waits, as it was seen, and what its row does not have yet.
    """

    gang: Row[Any] | None = None
    partners: tuple[int, ...] = ()
    kept: Reservation | None = None
    first: Row[Any] | None = None
    news: Mapping[str, Any] = field(default_factory=dict)


def _line(
    session: Session,
    waiting: tuple[ColumnElement[bool], ...],
    told: Mapping[str, Any],
    places: Places,
    usage: Usage,
) -> Sequence[Row[Any]]:
    """List the first runs that want several devices at once, and that these workers might train.

    However many there are for which there are no workers, they hide nobody.
    """
    up = {
        "line_places": sum(map(len, places.values())),
        "line_most_devices": max(each.devices for each in places),
        "line_offered": sorted({name for each in places for name in each.recipes}),
        "line_most_gib": max(each.device_memory_bytes for each in places) / GIB,
    }
    query = _line_query(waiting, usage.order)
    return session.connection().execute(query, {**told, **up}).all()


@lru_cache(16)
def _line_query(
    waiting: tuple[ColumnElement[bool], ...], order: tuple[ColumnElement[Any], ...]
) -> Select[Any]:
    query = _WANTED.where(
        *waiting,
        Run.nodes <= bindparam("line_places", type_=Integer),
        Run.devices_per_node <= bindparam("line_most_devices", type_=Integer),
        or_(Run.source == COMMAND, Run.recipe.in_(bindparam("line_offered", expanding=True))),
        bindparam("line_most_gib", type_=Float) >= MEMORY_GIB,
    )
    return query.order_by(*order).limit(LOOKED_AT)


_COLUMNS: tuple[ColumnElement[Any] | InstrumentedAttribute[Any], ...] = (
    *(Run.id, Run.source, Run.recipe, Run.precision, Run.nodes, Run.devices_per_node),
    *(Run.project, Run.priority, Run.position, Run.attempt),
    *(Run.expected_seconds, Run.first_since, Run.reservation),
    *(MEMORY_GIB.label("memory_gib"), now().label("moment")),
)
_WANTED = select(*_COLUMNS).where(SEVERAL)


def _places(session: Session, here: FreeNode, offer: Offer) -> Places:
    """Return the workers that are up, the one that asks as it says itself.

    Those for one run alone are for no other.
    """
    connection = session.connection()
    used: dict[int, int] = dict(connection.execute(_USED).all())
    places = {offer: [here]}
    # Who asks comes first; equal offers may have their names in another order.
    for is_asking, ids, *offered in connection.execute(_PLACES, {"place_asking": here.worker_id}):
        devices = offered[-1]
        if is_asking:
            mine = replace(offer, torch=offered[-2], devices=max(devices, offer.devices))
            places = {mine: [here]}
        else:
            its = [FreeNode(each, devices - used.get(each, 0)) for each in map(int, ids.split(","))]
            places.setdefault(_offer(*offered), []).extend(its)
    return places


@lru_cache
def _offer(recipes: str, precisions: str, *rest: Any) -> Offer:
    return Offer(frozenset(json.loads(recipes)), frozenset(json.loads(precisions)), *rest)


def _every_place() -> Select[Any]:
    is_asking = Worker.id == bindparam("place_asking", type_=Integer)
    offered = (
        *(cast(Worker.recipe_names, Text), cast(Worker.precisions, Text)),
        *(Worker.device_memory_bytes, Worker.offers_commands),
        Worker.versions["torch"].as_string().label("torch"),
        func.json_array_length(Worker.devices).label("devices"),
    )
    its_run = select(Worker.only_run_id).where(is_asking).scalar_subquery()
    is_alike = Worker.only_run_id.is_not_distinct_from(its_run)
    up = select(Worker.id, is_asking.label("is_asking"), *offered)
    up = up.where(Worker.placement.is_(None), or_(TAKING, is_asking), is_alike)
    worker_id, *kind = up.subquery().c
    ids = func.aggregate_strings(cast(worker_id, Text), ",")
    query = select(kind[0], ids, *kind[1:]).group_by(*kind)
    return query.order_by(kind[0].desc())


#: Not looked up by the statement of the workers, which costs the square of them.
_USED = (
    select(RunNode.worker_id, func.sum(func.json_array_length(RunNode.devices)))
    .where(IN_USE, RunNode.worker_id.is_not(None))
    .group_by(RunNode.worker_id)
)
_PLACES = _every_place()


def planned(
    session: Session,
    waiting: tuple[ColumnElement[bool], ...],
    told: Mapping[str, Any],
    here: FreeNode,
    offer: Offer,
    patience: float,
    usage: Usage,
) -> Plan:
    """Find the first gang that this worker can be part of, and what is kept for one before it.

    told: what the conditions of waiting are told.  offer: of the worker that asks.
    Nothing is written: see write_down.
    """
    places = _places(session, here, offer)
    line = _line(session, waiting, told, places, usage)
    teams: dict[tuple[Any, ...], list[list[FreeNode]]] = {}
    lacking: dict[tuple[Any, ...], bool] = {}
    tried: set[tuple[Any, ...]] = set()
    plan = Plan()
    for run in line:
        kind = (run.source, run.recipe, run.precision, run.memory_gib)
        shape = (*kind, run.nodes, run.devices_per_node)
        if shape not in teams:
            teams[shape] = _teams(run, places)
            # Without a team it waits for workers that there are not, and nothing is kept for it.
            lacking[shape] = bool(teams[shape]) and not any(_has_room(run, t) for t in teams[shape])
        passes = plan.kept is None or plan.kept.lets_pass(run)
        if run.nodes > 1 and (shape, passes) not in tried:
            tried.add((shape, passes))
            partners = _partners(run, teams[shape], here, None if passes else plan.kept)
            if partners is not None:
                return replace(plan, gang=run, partners=partners)
        if lacking[shape]:
            if plan.first is None:
                plan = _wait(session, run, teams[shape], patience)
            elif plan.kept is None and run.reservation:
                plan = replace(plan, kept=Reservation.of(run))
    return plan


def write_down(session: Session, plan: Plan) -> None:
    """Write what is new of the first that waits into its row, if that is as it was seen.

    Nobody waits for it: who holds it may want what this claim has.
    """
    first = plan.first
    if first is None or not plan.news:
        return
    since = first.reservation and first.reservation["since"]
    row = select(Run.id).where(
        *(Run.id == first.id, Run.status == Status.QUEUED, Run.attempt == first.attempt),
        Run.first_since.is_not_distinct_from(first.first_since),
        Run.reservation["since"].as_float().is_not_distinct_from(since),
    )
    row = row.with_for_update(skip_locked=True)
    session.connection().execute(
        update(Run).where(Run.id == row.scalar_subquery()).values(**plan.news)
    )


def _teams(run: Row[Any], places: Places) -> list[list[FreeNode]]:
    """Return the workers that could train a run together: of each version of torch, if enough."""
    teams: dict[str, list[FreeNode]] = {}
    for offer in places:
        if offer.takes(run):
            torch = (offer.torch or "") if run.nodes > 1 else ""
            teams.setdefault(torch, []).extend(places[offer])
    return [team for _torch, team in sorted(teams.items()) if len(team) >= run.nodes]


def _has_room(run: Row[Any], team: list[FreeNode]) -> bool:
    wanted = run.devices_per_node
    return len([free for _id, free in team if free >= wanted]) >= int(run.nodes)


def _partners(
    run: Row[Any], teams: list[list[FreeNode]], here: FreeNode, kept: Reservation | None
) -> tuple[int, ...] | None:
    """Return whom a worker would train a run with: those with the least room that do."""
    if here.free < run.devices_per_node:
        return None
    for team in teams:
        room = {each.worker_id: kept.left_over(each) if kept else each.free for each in team}
        roomy = [each for each, free in room.items() if free >= run.devices_per_node]
        if here.worker_id in roomy and len(roomy) >= run.nodes:
            roomy.remove(here.worker_id)
            return tuple(sorted(roomy, key=lambda each: (room[each], each))[: run.nodes - 1])
    return None


def _wait(session: Session, run: Row[Any], teams: list[list[FreeNode]], patience: float) -> Plan:
    """Let a run be the first that waits for several devices, and keep some in the end."""
    kept = Reservation.of(run)
    news: dict[str, Any] = {}
    if run.first_since is None:
        news["first_since"] = run.moment
    waited = run.moment - (run.first_since or run.moment)
    if waited >= patience and _is_due(kept, run, teams, patience):
        kept = _reserve(session, run, teams, kept)
        names = ("since", "until", "worker_ids")
        news["reservation"] = {name: getattr(kept, name) for name in names}
    return Plan(kept=kept, first=run, news=news)


def _is_due(
    kept: Reservation | None, run: Row[Any], teams: list[list[FreeNode]], patience: float
) -> bool:
    """Tell whether workers are to be chosen: the first, others for those gone, or still more.

    Where nobody knows when runs end, the chosen may have the longest ones: so, with each further
    patience, as many again are kept.
    """
    if kept is None:
        return True
    up = {each.worker_id for team in teams for each in team}
    if len(up.intersection(kept.worker_ids)) < run.nodes:
        return True
    rounds = len(kept.worker_ids) // run.nodes
    is_known = kept.until is not None and kept.until > run.moment
    is_everyone = len(kept.worker_ids) >= len(up)
    return not is_known and not is_everyone and run.moment - kept.since >= patience * rounds


def _reserve(
    session: Session, run: Row[Any], teams: list[list[FreeNode]], before: Reservation | None
) -> Reservation:
    """Choose the workers that are thought to have room soonest, beside those chosen before."""
    chosen_before = set(before.worker_ids) if before else set()
    team_ids = [{each.worker_id for each in team} for team in teams]
    ends = _ends(session, set().union(*team_ids), run.moment)
    found = []
    for team, ids in zip(teams, team_ids, strict=True):
        ready = {
            each.worker_id: _ready_at(run, each, ends.get(each.worker_id, [])) for each in team
        }
        free = {each.worker_id: min(each.free, run.devices_per_node) for each in team}
        still = sorted(chosen_before & ids)
        new = sorted(ids.difference(still), key=lambda each: (ready[each], -free[each], each))
        chosen = (
            [*still, *new[: run.nodes]] if len(still) >= run.nodes else [*still, *new][: run.nodes]
        )
        until = sorted(ready[each] for each in chosen)[run.nodes - 1]
        rank = (-len(still), until, -sum(free[each] for each in chosen))
        found.append((rank, chosen, until))
    _rank, chosen, until = min(found)
    return Reservation(
        run=run,
        since=before.since if before else run.moment,
        until=until if until < math.inf else None,
        worker_ids=chosen,
    )


def _ready_at(run: Row[Any], place: FreeNode, ends: list[tuple[float, int]]) -> float:
    """Return when a worker has room for a node, infinity if that is not known."""
    free, moment = place.free, run.moment
    for end, devices in sorted(ends):
        if free >= run.devices_per_node:
            break
        free, moment = free + devices, end
    return float(moment) if free >= run.devices_per_node else math.inf


def _ends(
    session: Session, worker_ids: Collection[int], moment: float
) -> dict[int, list[tuple[float, int]]]:
    """Return when the nodes on these workers are thought to end, and how many devices each has."""
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
    """Return when a run in training ends by its pace, else by what it was expected to take."""
    if run.steps_per_second and run.steps_total:
        return float(moment + max(run.steps_total - run.step, 0) / run.steps_per_second)
    end = (run.started_at or moment) + (run.expected_seconds or 0.0)
    return float(end) if run.expected_seconds and end > moment else math.inf
