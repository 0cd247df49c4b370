"""Why queued runs wait: read once, told of as many of them as a page shows."""

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from db.access import permissions
from db.database import now
from db.queue import workers
from db.queue.quotas import GIB, Usage
from db.runs import runs
from db.tables import ACTIVE, COMMAND, ENDED, Placement, Run, RunNode, Status, Worker

#: Made once: each alias makes all of its columns anew.
_EARLIER = aliased(Run)
#: Other runs that a reason names at most, and characters of the name of each.
MOST_NAMED, NAME_CHARACTERS = 3, 40


class OtherRun(NamedTuple):
    """A run that another one waits for. is_seen: whether whoever is told may see it."""

    id: int
    name: str
    is_seen: bool

    @property
    def label(self) -> str:
        """What it is called in a reason."""
        is_long = len(self.name) > NAME_CHARACTERS
        return f"{self.id} ({self.name[: NAME_CHARACTERS - 1] + '…' if is_long else self.name})"


class Named(NamedTuple):
    """A run that a reason names, and what it calls it."""

    id: int
    label: str


class Reason(NamedTuple):
    """Why a queued run waits. named: the runs that it names, in their order."""

    text: str
    named: tuple[Named, ...] = ()


@dataclass(frozen=True)
class Queue:
    """What queued runs wait for, read once for all that are shown together.

    workers: those that are up.  places: of each queued run, 0 for the next.  first: the next of
    those that may be named.  awaited: runs that have not ended, and whose end others wait for.
    training: runs in training by owner.  using: those that have devices, by worker.  reserving:
    queued runs that devices may be kept for, next first.  placed: of runs that a cluster was asked
    for, what it says.  seen: the projects whose runs may be named; None: all.
    """

    workers: list[Worker]
    places: dict[int, int]
    first: list[OtherRun]
    awaited: dict[int, OtherRun]
    training: Counter[int]
    using: dict[int, list[OtherRun]]
    reserving: list[Any]
    placed: dict[int, str]
    usage: Usage
    seen: frozenset[str] | None

    @property
    def has_takers(self) -> bool:
        """Whether any worker that is up takes what is queued: one that is drained does not."""
        return any(worker.drained_at is None for worker in self.workers)

    @classmethod
    def read(cls, session: Session) -> "Queue":
        """Read it: three queries, however many runs and workers there are.

        Named are runs that whoever has the session may see.
        """
        grants = permissions.limits(session)
        is_limited = grants is not None and grants.projects is not None
        seen = frozenset(grants.projects or ()) if grants and is_limited else None
        with permissions.unlimited(session):  # others wait in the same queue
            return cls._read(session, seen)

    @classmethod
    def _read(cls, session: Session, seen: frozenset[str] | None) -> "Queue":
        def other(row_id: int, name: str, project: str) -> OtherRun:
            return OtherRun(row_id, name, seen is None or project in seen)

        usage = Usage.read(session, of_workers=True)
        unended = _queued(session, and_training=True)
        queued = usage.in_turn(row for row in unended if row.status == Status.QUEUED)
        shown = (row for row in queued if seen is None or row.project in seen)
        training = {row.id: row for row in unended if row.status != Status.QUEUED}
        using: dict[int, list[OtherRun]] = defaultdict(list)
        for row in unended:
            if row.worker_id is not None:
                using[row.worker_id].append(other(row.id, row.name, row.project))
        return cls(
            workers=workers.alive(session),
            places={row.id: place for place, row in enumerate(queued)},
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
        """Something that changes when the workers or their free devices do."""
        free = [(each.id, self.free(each), each.drained_at) for each in self.workers]
        kept = [(row.id, row.reservation) for row in self.reserving]
        limits = sorted(self.usage.limits.items())
        named = self.first, sorted(self.awaited.items()), sorted(self.using.items())
        return f"{crc32(repr((free, kept, limits, named)).encode()) % 0xFFFF:x}"

    def free(self, worker: Worker) -> int:
        """Return how many devices of a worker are in no use."""
        return len(worker.devices) - self.usage.by_worker[worker.id]

    def kept(self, runs_per_user: int, devices_per_user: int) -> Any:
        """Return the run that devices are kept for, if there is one."""
        held = {
            owner
            for owner, count in self.training.items()
            if runs_per_user and count >= runs_per_user
        }
        free = (row for row in self.reserving if row.owner_id not in held)
        return next((row for row in free if not self.usage.obstacle(row, devices_per_user)), None)


def places(session: Session) -> dict[int, int]:
    """Return how many runs are ahead of each queued one."""
    with permissions.unlimited(session):
        in_turn = Usage.read(session).in_turn(_queued(session))
        return {row.id: place for place, row in enumerate(in_turn)}


def _queued(session: Session, *, and_training: bool = False) -> Sequence[Any]:
    """List queued runs, next first, each with the run whose end it waits for; and those in training
    too, if asked for, once for each of their nodes, with its worker.
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
    query = query.where(Run.status.in_((Status.QUEUED, *(ACTIVE if and_training else ()))))
    is_awaited = (_EARLIER.id == Run.after_id) & _EARLIER.status.not_in(ENDED)
    query = query.outerjoin(_EARLIER, is_awaited)
    is_next = (Placement.run_id == Run.id) & (Placement.attempt == Run.attempt + 1)
    query = query.outerjoin(Placement, is_next)
    is_training = Run.status.in_(ACTIVE) & RunNode.ended_at.is_(None)
    query = query.outerjoin(RunNode, (RunNode.run_id == Run.id) & is_training)
    in_order = (Run.priority.desc(), Run.position, Run.id, RunNode.node)
    return session.execute(query.order_by(*in_order)).all()


def reason(run: Run, queue: Queue, *, runs_per_user: int = 0, devices_per_user: int = 0) -> Reason:
    """Say in words what a queued run waits for, the hardest obstacle first."""
    found = _reason(run, queue, runs_per_user, devices_per_user)
    return found if isinstance(found, Reason) else Reason(found)


def _reason(run: Run, queue: Queue, runs_per_user: int, devices_per_user: int) -> Reason | str:
    if not queue.workers:
        return "no worker reports at the moment"
    able, obstacle = _able(run, queue.workers)
    if obstacle:
        return obstacle
    if lacking := _lacking(run, able):
        return lacking
    taking = [worker for worker in able if worker.drained_at is None]
    if not taking or _lacking(run, taking):
        drained = [worker.name for worker in able if worker.drained_at is not None]
        more = f" and {len(drained) - 3} more" if len(drained) > 3 else ""
        return f"it waits for workers that are drained: {', '.join(drained[:3])}{more}"
    able = taking
    if run.after_id in queue.awaited:
        return _of_one("it waits for the end of {}", queue.awaited[run.after_id])
    if runs_per_user and queue.training[run.owner_id] >= runs_per_user:
        return f"its owner has {runs_per_user} runs in training, as many as are allowed"
    if limited := queue.usage.obstacle(run, devices_per_user):
        return limited
    ahead = queue.places.get(run.id, 0)
    if run.id in queue.placed:
        return queue.placed[run.id]
    kept = queue.kept(runs_per_user, devices_per_user)
    roomy = [worker for worker in able if queue.free(worker) >= run.devices_per_node]
    if kept is not None and kept.id == run.id:
        since = time.strftime("%H:%M UTC", time.gmtime(kept.reservation["since"]))
        needed = f"{_needed(run)}; {len(roomy) or 'none'} {'is' if len(roomy) == 1 else 'are'} free"
        return f"it needs {needed}: what comes free is kept for it since {since}"
    if kept is not None and roomy and queue.places[kept.id] < ahead:
        others = [each for each in roomy if each.id not in kept.reservation["worker_ids"]]
        if len(others) < run.nodes:
            is_seen = queue.seen is None or kept.project in queue.seen
            other = OtherRun(kept.id, kept.name, is_seen)
            return _of_one(f"devices are kept for {{}}, which needs {_needed(kept)}", other)
    if ahead:
        first = [each for each in queue.first if queue.places[each.id] < ahead]
        text = "1 run is ahead" if ahead == 1 else f"{ahead} runs are ahead"
        return _named(f"{text}:", first, ahead) if first else Reason(text)
    if any(worker.placement for worker in able):
        return "it is next: the cluster is about to be asked for workers"
    if len(roomy) >= run.nodes:
        return "it is next: a worker is about to take it"
    if run.nodes > 1:
        return f"it is next: it needs {_needed(run)}, and {len(roomy) or 'none'} can be had"
    return _used(queue, able)


def _used(queue: Queue, able: list[Worker]) -> Reason:
    """Say which runs have the devices of these workers."""
    devices = sum(len(worker.devices) for worker in able)
    used = devices - sum(max(queue.free(worker), 0) for worker in able)
    using = dict.fromkeys(each for worker in able for each in queue.using.get(worker.id, ()))
    if not using:
        return Reason("it is next: no device is free")
    if used == devices:
        text = "the only device is" if devices == 1 else f"all {devices} devices are"
    else:
        text = f"{used} of {devices} devices are"
    first = [each for each in using if each.is_seen][:MOST_NAMED]
    by = f"it is next: {text} used by {'run' if len(using) == 1 else 'runs'}"
    if not first:
        of = "of another project" if len(using) == 1 else "of other projects"
        return Reason(f"{by} {of}")
    return _named(by, first, len(using))


def _of_one(text: str, other: OtherRun) -> Reason:
    """Name a run in a text, if it may be seen."""
    if not other.is_seen:
        return Reason(text.format("a run of another project"))
    return Reason(text.format(f"run {other.label}"), (Named(other.id, other.label),))


def _named(text: str, first: list[OtherRun], count: int) -> Reason:
    """Name the first of so many runs behind a text, and count the others."""
    labels = [each.label for each in first]
    if count > len(labels):
        told = f"{', '.join(labels)} and {count - len(labels)} more"
    else:
        told = " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
    return Reason(f"{text} {told}", tuple(Named(each.id, each.label) for each in first))


def _lacking(run: Run, able: list[Worker]) -> str:
    """Say that the workers that are up could never train a run, if it is so."""
    if any(worker.placement for worker in able):
        return ""  # a cluster says itself what it has
    most = max(len(worker.devices) for worker in able)
    if most < run.devices_per_node:
        return f"it needs {run.devices_per_node} devices, and no worker has more than {most}"
    large = [worker for worker in able if len(worker.devices) >= run.devices_per_node]
    together = workers.most_together(large)
    if together < run.nodes:
        few = "only one worker that is up has" if together == 1 else f"only {together} workers have"
        return f"it needs {_needed(run)}, and {few} as many, of one version of torch"
    return ""


def _needed(run: Any) -> str:
    devices = "device" if run.devices_per_node == 1 else "devices"
    if run.nodes == 1:
        return f"{run.devices_per_node} {devices} of one worker"
    return f"{run.nodes} nodes of {run.devices_per_node} {devices} each"


def _able(run: Run, up: list[Worker]) -> tuple[list[Worker], str]:
    """Return the workers that can take a run as far as its kind goes, or why there are none."""
    able = [each for each in up if workers.takes(each, run.source, run.recipe, run.precision)]
    if not able and run.source == COMMAND:
        return [], "no worker that is up offers commands (HALFSTEP_ALLOW_COMMANDS=yes)"
    if not able and any(workers.offers(worker, run.recipe) for worker in up):
        return [], f"no worker that is up has devices for {run.precision}"
    if not able:
        return [], f"no worker that is up offers the recipe {run.recipe}"
    if run.source != COMMAND and (memory_gib := _memory_gib(run)):
        largest_gib = max(workers.device_memory_bytes(each.devices) for each in able) / GIB
        if largest_gib < memory_gib:
            text = f"it needs devices of {memory_gib:g} GiB"
            return [], f"{text}, and no worker that is up has more than {largest_gib:.1f} GiB"
        able = [
            each for each in able if workers.device_memory_bytes(each.devices) / GIB >= memory_gib
        ]
    return able, ""


def _memory_gib(run: Run) -> float:
    """Return what a run asks of each device; an earlier version let it ask for any number."""
    wanted = run.config["training"].get("device_memory_gib") or 0.0
    return float(wanted) if wanted <= sys.float_info.max else math.inf


def mark(reason: str, ahead: int) -> int:
    """Return a number that differs when what a run waits for does."""
    return crc32(f"{ahead} {reason}".encode())


def live_marks(session: Session, run_ids: Collection[int], queue: Queue) -> dict[int, str]:
    """Look up `marks` of these runs, newest first."""
    columns = (Run.id, Run.status, Run.revision, Run.last_report_at, now().label("moment"))
    query = select(*columns).where(Run.id.in_(run_ids)).order_by(Run.id.desc())
    rows = session.execute(query).all()
    return marks(rows, queue, rows[0].moment if rows else 0.0)


def marks(rows: Iterable[Any], queue: Queue, moment: float) -> dict[int, str]:
    """Return a mark for each of these runs that has not ended.

    When it differs, so does what a list shows.
    """
    workers_mark = queue.mark
    return {
        row.id: f"{row.revision}q{queue.places.get(row.id, '')}w{workers_mark}"
        if row.status == Status.QUEUED
        else f"{row.revision}{_silence(row, moment)}"
        for row in rows
        if row.status not in ENDED
    }


def _silence(row: Any, moment: float) -> str:
    seconds = runs.silent_seconds(row, moment)
    return f"s{seconds}" if seconds else ""
