"""Read what trainings told: charts, events, log lines, and what is new since a cursor."""

import math
from dataclasses import astuple, dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.tables import Checkpoint, Diagnosis, LogLine, Metric, Run, ScalerEvent, Step

#: No count is larger, and both databases can still add to it.
MOST = 2**62


@dataclass(frozen=True)
class Cursor:
    """How much of a run somebody has seen; `str` and `parse` carry it through an address."""

    attempt: int = 0
    revision: int = -1
    step: int = 0
    event: int = 0
    metric: int = 0
    log: int = 0
    diagnosis: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read a cursor; one that makes no sense is as good as none."""
        try:
            numbers = [int(part) for part in text.split(".")]
            return cls(*numbers) if all(-1 <= n <= MOST for n in numbers) else cls()
        except (TypeError, ValueError):
            return cls()


@dataclass(frozen=True)
class Changes:
    """Everything about a run that lies between two cursors."""

    run: Run
    steps: dict[str, list[Any]]
    events: list[ScalerEvent]
    metrics: list[Metric]
    log_lines: list[LogLine]
    diagnoses: list[Diagnosis]
    checkpoints: list[Checkpoint]
    cursor: Cursor


def changes(session: Session, run_id: int, since: Cursor, *, most: int = 5000) -> Changes | None:
    """Return what is new since a cursor, at most `most` rows of each kind, or None.

    After a resume the cursor is taken back to the step of its checkpoint: whoever applies the
    changes replaces from their first step on.
    """
    run = session.get(Run, run_id, populate_existing=True)
    if run is None or run.revision == since.revision:
        return None
    seen, attempt = since.step, since.attempt
    if run.attempt != attempt and run.resumed_step is not None:
        seen, attempt = min(seen, run.resumed_step), run.attempt
        since = replace(
            since,
            event=_newest_id(session, ScalerEvent, run_id, seen),
            metric=_newest_id(session, Metric, run_id, seen),
            diagnosis=_newest_id(session, Diagnosis, run_id, seen),
        )
    steps = raw_steps(session, run_id, first=seen + 1, most=most)
    events = _after(session, ScalerEvent, ScalerEvent.id, run_id, since.event, most)
    metrics = _after(session, Metric, Metric.id, run_id, since.metric, most)
    log_lines = _after(session, LogLine, LogLine.number, run_id, since.log, most)
    diagnoses = _after(session, Diagnosis, Diagnosis.id, run_id, since.diagnosis, most)
    kinds = (steps["step"], events, metrics, log_lines, diagnoses)
    full = any(len(rows) == most for rows in kinds)
    cursor = Cursor(
        attempt=attempt,
        # A page of changes that is full has more behind it: ask again.
        revision=-1 if full else run.revision,
        step=steps["step"][-1] if steps["step"] else seen,
        event=events[-1].id if events else since.event,
        metric=metrics[-1].id if metrics else since.metric,
        log=log_lines[-1].number if log_lines else since.log,
        diagnosis=diagnoses[-1].id if diagnoses else since.diagnosis,
    )
    query = select(Checkpoint).where(Checkpoint.run_id == run_id)
    saved = list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.kind)))
    return Changes(run, steps, events, metrics, log_lines, diagnoses, saved, cursor)


def raw_steps(
    session: Session, run_id: int, *, first: int = 1, last: int | None = None, most: int = 5000
) -> dict[str, list[Any]]:
    """Return columns of steps in order. NaN is None; infinities are "Infinity", "-Infinity"."""
    query = (
        select(
            Step.step,
            Step.elapsed_ms,
            Step.step_us,
            Step.loss,
            Step.scale,
            Step.grad_norm,
            func.coalesce(Step.grad_norm_clipped, Step.grad_norm).label("grad_norm_clipped"),
            Step.lr,
            Step.flags,
        )
        .where(Step.run_id == run_id, Step.step >= first)
        .order_by(Step.step)
        .limit(most)
    )
    if last is not None:
        query = query.where(Step.step <= last)
    names = [column.name for column in query.selected_columns]
    rows = session.execute(query).all()
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: list(map(plain, column)) for name, column in zip(names, columns, strict=True)}


def skips(session: Session, run_id: int, *, most: int = 200) -> list[ScalerEvent]:
    """Return the latest skips with their culprits, newest first."""
    query = (
        select(ScalerEvent)
        .where(ScalerEvent.run_id == run_id, ScalerEvent.kind == "skip")
        .order_by(ScalerEvent.step.desc(), ScalerEvent.optimizer)
        .limit(most)
    )
    return list(session.scalars(query))


def sparkline(session: Session, run: Run, points: int = 60) -> list[Any]:
    """Return the loss at evenly spaced steps, a primary-key look-up each, however long the run."""
    count, first = min(points, run.own_steps), run.step - run.own_steps + 1
    wanted = {first + round(i * (run.own_steps - 1) / max(count - 1, 1)) for i in range(count)}
    query = select(Step.loss).where(Step.run_id == run.id, Step.step.in_(wanted))
    return list(map(plain, session.scalars(query.order_by(Step.step))))


def log_lines(
    session: Session, run_id: int, *, before: int | None = None, most: int = 1000
) -> list[LogLine]:
    """Return the latest lines before a number, oldest first."""
    query = select(LogLine).where(LogLine.run_id == run_id).order_by(LogLine.number.desc())
    if before is not None:
        query = query.where(LogLine.number < before)
    return list(reversed(session.scalars(query.limit(most)).all()))


def metrics(session: Session, run_id: int) -> list[Metric]:
    """Return all that a recipe named itself, in order of step."""
    query = select(Metric).where(Metric.run_id == run_id).order_by(Metric.step, Metric.id)
    return list(session.scalars(query))


def plain(value: Any) -> Any:
    """Make a number fit for JSON, which has neither NaN (None here) nor infinity (its name)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value).replace("inf", "Infinity")
    return value


def _newest_id(session: Session, table: Any, run_id: int, step: int) -> int:
    """Return the newest id up to a step: SQLite gives those of deleted rows to new ones."""
    query = select(func.max(table.id)).where(table.run_id == run_id, table.step <= step)
    return session.scalar(query) or 0


def _after(session: Session, table: Any, key: Any, run_id: int, seen: int, most: int) -> list[Any]:
    query = select(table).where(table.run_id == run_id, key > seen).order_by(key).limit(most)
    return list(session.scalars(query))
