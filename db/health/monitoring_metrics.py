"""Metrics of the service for monitoring: nine queries, independent of the number of steps."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, func, select, text
from sqlalchemy.orm import Session, aliased

from db.clock import now
from db.queue import workers
from db.queue.quotas import Usage
from db.tables import ACTIVE, ENDED, NOT_DELETED, Backup, Run, RunNode, RunStatus, Status, Worker

#: Reasons why queued runs wait, the hardest obstacle first. not_offered: no worker that is up has
#: the recipe, the precision or enough devices, or none takes commands.  quota: device limit of its
#: project or its owner.
REASONS = (NO_WORKER, NOT_OFFERED, AFTER, LIMIT, QUOTA, DEVICE) = (
    "no_worker",
    "not_offered",
    "after_another",
    "owners_limit",
    "quota",
    "device",
)


#: A worker that is silent for longer is one whose machine is gone for good: it no longer alerts.
LONGEST_SILENCE_SECONDS = 7 * 86400.0
#: Workers of operators that have not been stopped, and when each has reported.
LASTING_WORKERS = select(Worker.name, Worker.seen_at).where(
    Worker.stopped_at.is_(None),
    Worker.only_run_id.is_(None),
    Worker.seen_at > now() - LONGEST_SILENCE_SECONDS,
)
LAST_BACKUP = select(func.max(Backup.ended_at)).where(Backup.error == "")
LAST_ERROR = (
    select(Backup.error)
    .where(Backup.ended_at.is_not(None))
    .order_by(Backup.ended_at.desc())
    .limit(1)
)


@dataclass(frozen=True)
class Readings:
    """Values of the monitoring metrics."""

    runs: Counter[Status]  # by status, without those in the trash
    queued: Counter[str]  # by reason
    workers: int  # that are up
    devices: Counter[str]  # of these workers, by kind
    busy: Counter[str]  # devices in use, by kind
    damaged: int  # runs, without those in the trash
    steps: int  # recorded since the beginning, including erased runs
    skips: int  # likewise
    waiting: dict[str, tuple[int, float]]  # by project: queued runs, longest wait in seconds
    silent: dict[str, float]  # by worker that has not stopped: seconds since its last report
    outdated: int  # workers that are up and of another version
    database_bytes: int
    backup_at: float | None  # end of the last backup that was complete
    has_backup_failed: bool  # the last one that ended


def read(session: Session, *, runs_per_user: int = 0, devices_per_user: int = 0) -> Readings:
    """Read the current values."""
    up = workers.alive(session)
    listed = func.sum(case((NOT_DELETED, 1), else_=0))
    damaged = func.sum(case((NOT_DELETED & (Run.damage != ""), 1), else_=0))
    sums = (damaged, func.sum(Run.recorded_steps), func.sum(Run.recorded_skips))
    counts = select(Run.status, Run.owner_id, listed, *sums).group_by(Run.status, Run.owner_id)
    runs: Counter[Status] = Counter()
    training: Counter[int] = Counter()
    totals = [0, 0, 0]
    for status, owner_id, count, *some in session.execute(counts):
        runs[status] += int(count)
        training[owner_id] += int(count) if status in ACTIVE else 0
        totals = [total + int(each) for total, each in zip(totals, some, strict=True)]
    full = {owner for owner, count in training.items() if runs_per_user and count >= runs_per_user}
    nodes = select(RunNode.worker_id, RunNode.devices).where(RunNode.ended_at.is_(None))
    once = select(now(), LAST_BACKUP.scalar_subquery(), LAST_ERROR.scalar_subquery())
    moment, backup_at, backup_error = session.execute(once).one()
    kinds = {worker.id: [device["kind"] for device in worker.devices] for worker in up}
    return Readings(
        runs=runs,
        queued=_count_queued(session, up, full, devices_per_user),
        workers=len(up),
        devices=Counter(kind for some in kinds.values() for kind in some),
        busy=_busy(session.execute(nodes), kinds),
        damaged=totals[0],
        steps=totals[1],
        skips=totals[2],
        waiting=waiting(session, moment),
        silent={name: max(moment - seen, 0.0) for name, seen in session.execute(LASTING_WORKERS)},
        outdated=sum(workers.is_outdated(worker) for worker in up),
        database_bytes=database_bytes(session),
        backup_at=backup_at,
        has_backup_failed=bool(backup_error),
    )


def database_bytes(session: Session) -> int:
    """Return the size of the database."""
    if session.get_bind().dialect.name == "postgresql":
        return int(session.scalar(text("SELECT pg_database_size(current_database())")) or 0)
    pages = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    return int(session.scalar(text(pages)) or 0)


def waiting(session: Session, moment: float) -> dict[str, tuple[int, float]]:
    """Return by project how many runs are queued, and the longest wait in seconds."""
    since = func.max(RunStatus.time).label("since")
    queued = select(Run.id, Run.project, since).join(RunStatus, RunStatus.run_id == Run.id)
    queued = queued.where(Run.status == Status.QUEUED, RunStatus.status == Status.QUEUED)
    per_run = queued.group_by(Run.id, Run.project).subquery()
    query = select(per_run.c.project, func.count(), func.min(per_run.c.since)).group_by(
        per_run.c.project
    )
    found = session.execute(query)
    return {project: (count, max(moment - first, 0.0)) for project, count, first in found}


def _busy(nodes: Iterable[Any], kinds: dict[int, list[str]]) -> Counter[str]:
    busy: Counter[str] = Counter()
    for worker_id, devices in nodes:
        known = kinds.get(worker_id, [])
        busy.update(known[index] for index in devices if index < len(known))
    return busy


def _count_queued(
    session: Session, up: list[Worker], full: set[int], devices_per_user: int
) -> Counter[str]:
    """Count queued runs by reason; the query groups similar runs."""
    earlier = aliased(Run)
    alike = (
        *(Run.source, Run.recipe, Run.precision, Run.nodes, Run.devices_per_node),
        *(Run.owner_id, Run.project),
    )
    usage = Usage.read(session)
    awaits = case((earlier.id.is_not(None), 1), else_=0)
    query = select(*alike, awaits, func.count()).where(Run.status == Status.QUEUED)
    query = query.outerjoin(earlier, (earlier.id == Run.after_id) & earlier.status.not_in(ENDED))
    queued: Counter[str] = Counter()
    for row in session.execute(query.group_by(*alike, awaits)):
        source, recipe, precision, nodes, devices, owner_id, _project, waits, count = row
        able = [
            worker
            for worker in up
            if len(worker.devices) >= devices and workers.takes(worker, source, recipe, precision)
        ]
        obstacles = {
            NO_WORKER: not up,
            NOT_OFFERED: workers.most_together(able) < nodes,
            AFTER: bool(waits),
            LIMIT: owner_id in full,
            QUOTA: bool(usage.obstacle(row, devices_per_user)),
            DEVICE: True,
        }
        queued[next(reason for reason in REASONS if obstacles[reason])] += count
    return queued
