"""Facts in the header of the list of runs: counts that are filters, and devices in use."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from db.queue.pending_reasons import Queue
from db.runs import runs
from db.runs.run_filters import Created, InStatus, NeedsAttention, Term
from db.tables import Status

#: Older failures no longer need attention.
ATTENTION_DAYS = 7


@dataclass(frozen=True)
class ListFacts:
    """Counts of runs by state and of the devices of workers that are up."""

    running: int
    queued: int
    attention: int
    used: int
    devices: int
    has_takers: bool

    @property
    def mark(self) -> str:
        """The facts in the cursor of a live list."""
        return "_".join(str(int(fact)) for fact in astuple(self))


def numbers() -> list[ColumnElement[int | None]]:
    """Return the SQL expressions of the counts."""
    since = Created(is_before=False, seconds_ago=ATTENTION_DAYS * 86400.0)
    running, queued = ([Term(InStatus((status,)))] for status in (Status.RUNNING, Status.QUEUED))
    unwell = [Term(NeedsAttention()), Term(since)]
    return [runs.count_matching(terms) for terms in (running, queued, unwell)]


def read(session: Session, queue: Queue) -> ListFacts:
    """Read the facts. queue: its current state."""
    return from_counts(list(session.execute(select(*numbers())).one()), queue)


def from_counts(counts: Sequence[Any], queue: Queue) -> ListFacts:
    """Return the facts. counts: values of the expressions of `numbers`."""
    running, queued, attention = counts
    devices = sum(len(worker.devices) for worker in queue.workers)
    return ListFacts(
        running=running,
        queued=queued,
        attention=attention,
        used=devices - sum(max(queue.free(worker), 0) for worker in queue.workers),
        devices=devices,
        has_takers=queue.has_takers,
    )
