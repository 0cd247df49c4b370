"""A run in one glance, the same for pages, API and live streams."""

import time
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainSerializer
from sqlalchemy.orm import Session

from db import runs, waiting
from db import verdict as verdicts
from db.series import plain
from db.settings import Settings
from db.tables import ACTIVE, ENDED, Run, Status
from db.waiting import Queue

#: A number whose NaN is null and whose infinities are "Infinity" and "-Infinity".
Number = Annotated[float | None, PlainSerializer(plain, return_type=float | str | None)]


class RunVerdict(BaseModel):
    """Whether the loss scaling is well: calibrating, healthy, oscillating, collapsing or dead."""

    word: str
    reason: str
    figures: Annotated[dict[str, Any], Field(description="What led to it; see db/verdict.py")]


class RunSummary(BaseModel):
    """Where a run is."""

    id: int
    name: str
    recipe: str
    precision: str
    status: Status
    attempt: int
    owner: str
    tags: list[str]
    priority: int
    devices_per_node: int
    after_id: Annotated[int | None, Field(description="Run whose end this one waits for")]
    parent_id: Annotated[int | None, Field(description="Run from whose checkpoint it started")]
    parent_step: int | None
    group_id: Annotated[int | None, Field(description="Comparison that it belongs to")]
    step: Annotated[int, Field(description="Attempted steps")]
    own_steps: Annotated[int, Field(description="Those after its parent's checkpoint")]
    steps_total: int
    applied: Annotated[int, Field(description="Own steps not skipped, or retried in fp32")]
    skipped: int
    loss: Number
    scale: Number
    verdict: Annotated[RunVerdict | None, Field(description="Null where nothing is scaled")]
    steps_per_second: Number
    seconds: Annotated[float | None, Field(description="Since the first start, until the end")]
    seconds_left: Annotated[float | None, Field(description="Estimate, at the present speed")]
    waiting: Annotated[str | None, Field(description="What a queued run waits for")]
    ahead: Annotated[int | None, Field(description="Queued runs that start before this one")]
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    revision: int

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in ENDED

    @property
    def trains(self) -> bool:
        """Whether an attempt exists."""
        return self.status in ACTIVE

    @property
    def progress(self) -> float:
        """Per cent."""
        return 100 * min(self.step / self.steps_total, 1.0)


def summarise(
    session: Session, run: Run, owner: str, settings: Settings, queue: Queue | None = None
) -> RunSummary:
    """Sum up a run. queue: as read once for all runs that are shown together."""
    reason = ahead = None
    if run.status == Status.QUEUED:
        queue = queue or Queue.read(session)
        reason = waiting.reason(session, run, queue, runs_per_user=settings.runs_per_user)
        ahead = queue.places.get(run.id, 0)
    row: dict[str, Any] = {name: getattr(run, name) for name in _COLUMNS}
    return RunSummary(
        **row,
        owner=owner,
        tags=[tag.strip() for tag in run.tags.split(",") if tag.strip()],
        own_steps=run.own_steps,
        applied=runs.applied(session, run),
        verdict=_verdict(session, run),
        seconds=_seconds(run),
        seconds_left=_seconds_left(run),
        waiting=reason,
        ahead=ahead,
    )


_COLUMNS = RunSummary.model_fields.keys() & (set(Run.__table__.columns.keys()) - {"tags"})


def _verdict(session: Session, run: Run) -> RunVerdict | None:
    found = verdicts.verdict(session, run)
    if found is None:
        return None
    figures = {name: plain(value) for name, value in asdict(found.figures).items()}
    return RunVerdict(word=found.word, reason=found.reason, figures=figures)


def _seconds(run: Run) -> float | None:
    return None if run.started_at is None else (run.ended_at or time.time()) - run.started_at


def _seconds_left(run: Run) -> float | None:
    if run.status != Status.RUNNING or not run.steps_per_second:
        return None
    return max(run.steps_total - run.step, 0) / run.steps_per_second
