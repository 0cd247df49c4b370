"""Pending reasons of queued runs, from one read of the queue."""

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import or_, select
from sqlalchemy.orm import Session, aliased

from db.access import permissions
from db.clock import now
from db.queue import workers
from db.queue.quotas import GIB, Usage
from db.runs import runs
from db.tables import ACTIVE, COMMAND, ENDED, WATCH, Placement, Run, RunNode, Status, Worker
from halfstep.number_formats import size as size_text

#: Built once: an alias copies all columns.
_EARLIER = aliased(Run)
#: Other runs that a reason names at most, and characters of the name of each.
MOST_NAMED, NAME_CHARACTERS = 3, 40
NEXT = "it is next: "  # begins the reason of the run that the queue starts next


class OtherRun(NamedTuple):
    """A run that another one waits for."""

    id: int
    name: str
    is_seen: bool  # visible to the session's user

    @property
    def label(self) -> str:
        """Id and shortened name, as used in a reason."""
        is_long = len(self.name) > NAME_CHARACTERS
        return f"{self.id} ({self.name[: NAME_CHARACTERS - 1] + '…' if is_long else self.name})"


class Named(NamedTuple):
    """A run that a reason names."""

    id: int
    label: str  # as in the text


class PendingReason(NamedTuple):
    """Reason why a queued run waits."""

    text: str
    named: tuple[Named, ...] = ()  # in the order of the text


@dataclass(frozen=True)
class Queue:
    """State of the queue and of its workers, read once for all runs on a page."""

    workers: list[Worker]  # those that are up
    places: dict[int, int]  # queue positions by run id, 0 is next
    first: list[OtherRun]  # the next visible runs
    awaited: dict[int, OtherRun]  # unended runs that others wait for
    training: Counter[int]  # runs in training by owner
    using: dict[int, list[OtherRun]]  # runs that use devices, by worker
    reserving: list[Any]  # queued runs with a reservation, next first
    placed: dict[int, str]  # state reported by the cluster, by run id
    usage: Usage
    seen: frozenset[str] | None  # projects of the visible runs; None: all

    @property
    def has_takers(self) -> bool:
        """Whether a worker is up and not drained."""
        return any(worker.drained_at is None for worker in self.workers)

    @classmethod
    def read(cls, session: Session) -> "Queue":
        """Read the queue in three queries; only runs visible to the session are named."""
        grants = permissions.limits(session)
        is_limited = grants is not None and grants.projects is not None
        seen = frozenset(grants.projects or ()) if grants and is_limited else None
        with permissions.lift_limit(session):  # others wait in the same queue
            return cls._read(session, seen)

    @classmethod
    def _read(cls, session: Session, seen: frozenset[str] | None) -> "Queue":
        def other(row_id: int, name: str, project: str) -> OtherRun:
            return OtherRun(row_id, name, seen is None or project in seen)

        usage = Usage.read(session, of_workers=True)
        unended = _list_unended(session)
        queued = usage.in_turn(row for row in unended if row.status == Status.QUEUED)
        shown = (row for row in queued if seen is None or row.project in seen)
        training = {row.id: row for row in unended if row.status != Status.QUEUED}
        using: dict[int, list[OtherRun]] = defaultdict(list)
        for row in unended:
            if row.worker_id is not None:
                using[row.worker_id].append(other(row.id, row.name, row.project))
        return cls(
            workers=workers.alive(session),
            places={row.id: position for position, row in enumerate(queued)},
            first=[other(row.id, row.name, row.project) for row in islice(shown, MOST_NAMED)],
            awaited={
                row.awaited: other(row.awaited, row.awaited_name, row.awaited_project)
                for row in queued
                if row.awaited is not None
            },
            training=Counter(row.owner_id for row in training.values()),
            using=using,
            placed={row.id: row.placed for row in queued if row.placed is not None},
            usage=usage,
            seen=seen,
            reserving=[row for row in queued if row.reservation and row.awaited is None],
        )

    @property
    def mark(self) -> str:
        """Checksum that changes when the workers or their free devices change."""
        free = [(worker.id, self.free(worker), worker.drained_at) for worker in self.workers]
        reserved = [(row.id, row.reservation) for row in self.reserving]
        limits = sorted(self.usage.limits.items())
        named = self.first, sorted(self.awaited.items()), sorted(self.using.items())
        return f"{crc32(repr((free, reserved, limits, named)).encode()) % 0xFFFF:x}"

    def free(self, worker: Worker) -> int:
        """Return the number of a worker's free devices."""
        return len(worker.devices) - self.usage.by_worker[worker.id]

    def find_reserved_run(self, runs_per_user: int, devices_per_user: int) -> Any:
        """Return the run that devices are reserved for, if any."""
        held = {
            owner
            for owner, count in self.training.items()
            if runs_per_user and count >= runs_per_user
        }
        free = (row for row in self.reserving if row.owner_id not in held)
        return next((row for row in free if not self.usage.obstacle(row, devices_per_user)), None)


def _list_unended(session: Session) -> Sequence[Any]:
    """List queued runs, next first, each with the run that it waits for.

    Also runs in training, one row per node with its worker.
    """
    columns = (
        *(Run.id, Run.name, Run.owner_id, Run.project, Run.status, Run.priority),
        *(Run.nodes, Run.devices_per_node, Run.reservation),
    )
    placed = Placement.reason.label("placed")
    awaited = (
        _EARLIER.id.label("awaited"),
        _EARLIER.name.label("awaited_name"),
        _EARLIER.project.label("awaited_project"),
    )
    query = select(*columns, *awaited, placed, RunNode.worker_id)
    query = query.where(Run.status.in_((Status.QUEUED, *ACTIVE)))
    query = query.where(or_(Run.source != WATCH, Run.status != Status.QUEUED))  # of an agent
    is_awaited = (_EARLIER.id == Run.after_id) & _EARLIER.status.not_in(ENDED)
    query = query.outerjoin(_EARLIER, is_awaited)
    is_next = (Placement.run_id == Run.id) & (Placement.attempt == Run.attempt + 1)
    query = query.outerjoin(Placement, is_next)
    is_training = Run.status.in_(ACTIVE) & RunNode.ended_at.is_(None)
    query = query.outerjoin(RunNode, (RunNode.run_id == Run.id) & is_training)
    in_order = (Run.priority.desc(), Run.position, Run.id, RunNode.node)
    return session.execute(query.order_by(*in_order)).all()


def reason(
    run: Run, queue: Queue, *, runs_per_user: int = 0, devices_per_user: int = 0
) -> PendingReason:
    """Return why a queued run waits; the hardest obstacle takes precedence."""
    result = _reason(run, queue, runs_per_user, devices_per_user)
    text, named = result if isinstance(result, PendingReason) else PendingReason(result)
    return PendingReason("; ".join(filter(None, (text, run.stop_reason))), named)


def _reason(
    run: Run, queue: Queue, runs_per_user: int, devices_per_user: int
) -> PendingReason | str:
    if run.source == WATCH:
        return "its agent is starting its script"
    if not queue.workers:
        return "no worker reports at the moment"
    able, obstacle = _able(run, queue.workers)
    if infeasible := obstacle or _lacking(run, able):  # as db.queue.feasibility in lists
        return f"{infeasible}: start one that can take it, or cancel the run"
    taking = [worker for worker in able if worker.drained_at is None]
    if not taking or _lacking(run, taking):
        drained = [worker.name for worker in able if worker.drained_at is not None]
        more = f" and {len(drained) - 3} more" if len(drained) > 3 else ""
        return f"it waits for workers that are drained: {', '.join(drained[:3])}{more}"
    able = taking
    if run.after_id in queue.awaited:
        return _of_one("it waits for the end of {}", queue.awaited[run.after_id])
    if runs_per_user and queue.training[run.owner_id] >= runs_per_user:
        return f"its owner has {runs_per_user} runs in training, the maximum"
    if limited := queue.usage.obstacle(run, devices_per_user):
        return limited
    ahead = queue.places.get(run.id, 0)
    if run.id in queue.placed:
        return queue.placed[run.id]
    reserved = queue.find_reserved_run(runs_per_user, devices_per_user)
    roomy = [worker for worker in able if queue.free(worker) >= run.devices_per_node]
    if reserved is not None and reserved.id == run.id:
        since = time.strftime("%H:%M UTC", time.gmtime(reserved.reservation["since"]))
        free = f"{len(roomy) or 'none'} {'is' if len(roomy) == 1 else 'are'} free"
        needed = f"{_describe_needed(run)}; {free}"
        return f"it needs {needed}: devices are reserved for it since {since}"
    if reserved is not None and roomy and queue.places[reserved.id] < ahead:
        reserved_ids = reserved.reservation["worker_ids"]
        others = [worker for worker in roomy if worker.id not in reserved_ids]
        if len(others) < run.nodes:
            is_seen = queue.seen is None or reserved.project in queue.seen
            other = OtherRun(reserved.id, reserved.name, is_seen)
            return _of_one(
                f"devices are reserved for {{}}, which needs {_describe_needed(reserved)}", other
            )
    if ahead:
        first = [other for other in queue.first if queue.places[other.id] < ahead]
        text = "1 run is ahead" if ahead == 1 else f"{ahead} runs are ahead"
        return _named(f"{text}:", first, ahead) if first else PendingReason(text)
    if any(worker.placement for worker in able):
        return f"{NEXT}the cluster is about to be asked for workers"
    if len(roomy) >= run.nodes:
        return f"{NEXT}a worker is about to take it"
    if run.nodes > 1:
        return f"{NEXT}it needs {_describe_needed(run)}, and {len(roomy) or 'none'} can be used"
    return _describe_used(queue, able)


def _describe_used(queue: Queue, able: list[Worker]) -> PendingReason:
    """Return a reason that lists the runs on these workers' devices."""
    devices = sum(len(worker.devices) for worker in able)
    used = devices - sum(max(queue.free(worker), 0) for worker in able)
    using = dict.fromkeys(other for worker in able for other in queue.using.get(worker.id, ()))
    if not using:
        return PendingReason(f"{NEXT}no device is free")
    if used == devices:
        text = "the only device is" if devices == 1 else f"all {devices} devices are"
    else:
        text = f"{used} of {devices} devices are"
    first = [other for other in using if other.is_seen][:MOST_NAMED]
    by = f"{NEXT}{text} used by {'run' if len(using) == 1 else 'runs'}"
    if not first:
        of = "of another project" if len(using) == 1 else "of other projects"
        return PendingReason(f"{by} {of}")
    return _named(by, first, len(using))


def _of_one(text: str, other: OtherRun) -> PendingReason:
    """Insert a run into a text, by name if it is visible."""
    if not other.is_seen:
        return PendingReason(text.format("a run of another project"))
    return PendingReason(text.format(f"run {other.label}"), (Named(other.id, other.label),))


def _named(text: str, first: list[OtherRun], count: int) -> PendingReason:
    """Append the first runs to a text, and the number of the others."""
    labels = [other.label for other in first]
    if count > len(labels):
        names = f"{', '.join(labels)} and {count - len(labels)} more"
    else:
        names = " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
    return PendingReason(f"{text} {names}", tuple(Named(other.id, other.label) for other in first))


def _lacking(run: Run, able: list[Worker]) -> str:
    """Return why the workers that are up could never train a run; empty if they could."""
    if any(worker.placement for worker in able):
        return ""  # the cluster reports its own capacity
    most = max(len(worker.devices) for worker in able)
    if most < run.devices_per_node:
        return f"it needs {run.devices_per_node} devices, and no worker has more than {most}"
    large = [worker for worker in able if len(worker.devices) >= run.devices_per_node]
    together = workers.most_together(large)
    if together < run.nodes:
        few = "1 worker" if together == 1 else f"{together} workers with the same version of torch"
        return f"it needs {_describe_needed(run)}, and only {few} can take part"
    return ""


def _describe_needed(run: Any) -> str:
    devices = "device" if run.devices_per_node == 1 else "devices"
    if run.nodes == 1:
        return f"{run.devices_per_node} {devices} of one worker"
    return f"{run.nodes} nodes of {run.devices_per_node} {devices} each"


def _able(run: Run, up: list[Worker]) -> tuple[list[Worker], str]:
    """Return the workers that support a run's recipe and precision, or why there are none."""
    able = [worker for worker in up if workers.takes(worker, run.source, run.recipe, run.precision)]
    if not able and run.source == COMMAND:
        return [], "no worker that is up offers commands (HALFSTEP_ALLOW_COMMANDS=yes)"
    if not able and any(workers.offers(worker, run.recipe) for worker in up):
        return [], f"no worker that is up has devices for {run.precision}"
    if not able:
        return [], f"no worker that is up offers the recipe {run.recipe}"
    if run.source != COMMAND and (memory_gib := _memory_gib(run)):
        largest_gib = max(workers.device_memory_bytes(worker.devices) for worker in able) / GIB
        if largest_gib < memory_gib:
            text = f"it needs devices of {size_text(memory_gib * GIB)}"
            return (
                [],
                f"{text}, and no worker that is up has more than {size_text(largest_gib * GIB)}",
            )
        able = [
            worker
            for worker in able
            if workers.device_memory_bytes(worker.devices) / GIB >= memory_gib
        ]
    return able, ""


def _memory_gib(run: Run) -> float:
    """Return the memory that a run requests per device; an earlier version allowed any number."""
    memory_gib = run.config["training"].get("device_memory_gib") or 0.0
    return float(memory_gib) if memory_gib <= sys.float_info.max else math.inf


def mark(reason: str, ahead: int) -> int:
    """Return a checksum that changes with the reason or the position."""
    return crc32(f"{ahead} {reason}".encode())


def live_marks(session: Session, run_ids: Collection[int], queue: Queue) -> dict[int, str]:
    """Return the `marks` of these runs, newest first."""
    columns = (Run.id, Run.status, Run.revision, Run.last_report_at, now().label("moment"))
    query = select(*columns).where(Run.id.in_(run_ids)).order_by(Run.id.desc())
    rows = session.execute(query).all()
    return marks(rows, queue, rows[0].moment if rows else 0.0)


def marks(rows: Iterable[Any], queue: Queue, moment: float) -> dict[int, str]:
    """Return a mark for each unended run, which changes when a list must show it differently."""
    workers_mark = queue.mark
    return {
        row.id: f"{row.revision}q{queue.places.get(row.id, '')}w{workers_mark}"
        if row.status == Status.QUEUED
        else f"{row.revision}{_silence(row, moment)}"
        for row in rows
        if row.status not in ENDED
    }


def _silence(row: object, moment: float) -> str:
    seconds = runs.silent_seconds(row, moment)
    return f"s{seconds}" if seconds else ""
