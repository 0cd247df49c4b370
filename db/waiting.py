"""Why queued runs wait: read once, told of as many of them as a page shows."""

import math
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db import runs, workers
from db.queue import GIB
from db.tables import ACTIVE, ENDED, Run, Status, Worker


@dataclass(frozen=True)
class Queue:
    """The workers that are up, each queued run's place (0: next), runs in training by owner."""

    workers: list[Worker]
    places: dict[int, int]
    training: Counter[int]

    @classmethod
    def read(cls, session: Session) -> "Queue":
        """Read it once for all runs that are shown together."""
        alive = [worker for worker, is_alive in workers.everyone(session) if is_alive]
        own = select(Run.owner_id, func.count()).where(Run.status.in_(ACTIVE))
        training = {row[0]: row[1] for row in session.execute(own.group_by(Run.owner_id))}
        return cls(alive, places(session), Counter(training))


def places(session: Session) -> dict[int, int]:
    """Return how many runs are ahead of each queued one."""
    query = select(Run.id).where(Run.status == Status.QUEUED)
    ordered = session.scalars(query.order_by(Run.priority.desc(), Run.position))
    return {run_id: place for place, run_id in enumerate(ordered)}


def reason(session: Session, run: Run, queue: Queue, *, runs_per_user: int = 0) -> str:
    """Say in words what a queued run waits for, the hardest obstacle first."""
    if not queue.workers:
        return "no worker is up"
    able = [worker for worker in queue.workers if workers.offers(worker, run.recipe)]
    if not able:
        return f"no worker that is up offers the recipe {run.recipe}"
    able = [worker for worker in able if run.precision in workers.precisions(worker.devices)]
    if not able:
        return f"no worker that is up has devices for {run.precision}"
    if memory_gib := _memory_gib(run):
        largest_gib = max(workers.device_memory_bytes(each.devices) for each in able) / GIB
        if largest_gib < memory_gib:
            text = f"it needs devices of {memory_gib:g} GiB"
            return f"{text}, and no worker that is up has more than {largest_gib:.1f} GiB"
        able = [
            each for each in able if workers.device_memory_bytes(each.devices) / GIB >= memory_gib
        ]
    most = max(len(worker.devices) for worker in able)
    if most < run.devices_per_node:
        return f"it needs {run.devices_per_node} devices, and no worker has more than {most}"
    if run.after_id is not None and runs.get(session, run.after_id).status not in ENDED:
        return f"it waits for the end of run {run.after_id}"
    if runs_per_user and queue.training[run.owner_id] >= runs_per_user:
        return f"its owner has {runs_per_user} runs in training, as many as are allowed"
    ahead = queue.places.get(run.id, 0)
    return f"{ahead} ahead of it" if ahead else "it is next: no device is free"


def _memory_gib(run: Run) -> float:
    """Return what a run asks of each device; an earlier version let it ask for any number."""
    wanted = run.config["training"].get("device_memory_gib") or 0.0
    return float(wanted) if wanted <= sys.float_info.max else math.inf


def live_marks(
    session: Session, run_ids: Collection[int], places: dict[int, int]
) -> dict[int, str]:
    """Return a mark for each of these runs that has not ended, newest first.

    When it differs, so does what a list shows.
    """
    query = select(Run.id, Run.status, Run.revision).order_by(Run.id.desc())
    query = query.where(Run.id.in_(run_ids), Run.status.not_in(ENDED))
    return {
        run_id: f"{revision}q{places.get(run_id, '')}" if status == Status.QUEUED else str(revision)
        for run_id, status, revision in session.execute(query)
    }
