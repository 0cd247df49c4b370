"""Writes of training data: steps, scaler events, metrics, log lines, system samples.

A flush is one fenced transaction and may be repeated: an existing row is replaced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict
from numpy.typing import NDArray
from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.clock import now
from db.queue.queue import lock_active_attempt
from db.tables import (
    FLAGGED,
    IS_NOT_STEPPED,
    ControlRequest,
    Diagnosis,
    LogLine,
    Run,
    RunNode,
    RunStatus,
    ScalerEvent,
    Step,
    SystemSample,
    Table,
)
from db.telemetry import (
    latest_metrics,
    loss_curves,
    metric_block_writer,
    step_block_writer,
    step_blocks,
)
from db.telemetry.metric_points import MetricPoints
from halfstep.diagnosis.zero_gradients import count_zero_steps
from halfstep.number_formats import number
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import fields_of
from halfstep.telemetry.events import Sample, StepEvent
from halfstep.telemetry.flags import NONFINITE_LOSS, NOT_STEPPED, SKIPPED, UNKNOWN_LOSS

SPEED_STEPS = 200  # over which a run's speed is averaged
SPIKE = "spike"
#: Events of a step that stay recorded when the training rolls back beyond the step.
OUTLAST = (SPIKE, "failed_diagnosis", "obeyed", "length")


#: The first and the latest lines of a run's log that the database keeps.
FIRST_LINES, MOST_LINES = 1_000, 50_000
LINES_PER_CHECK = 5_000  # lines between two checks for excess lines


@dataclass
class LogRow:
    """A line of a run's log; a row with `lines` stands for lines that only the log's file has."""

    attempt: int
    time: float  # seconds since 1970
    stream: str
    text: str
    lines: int = 0
    number: int = 0  # from 1, once `number_line` has set it

    @classmethod
    def of(cls, line: events.Line, attempt: int) -> Self:
        """Return the row of a printed line."""
        return cls(attempt, float(line.time), line.stream, line.text or "", line.lines or 0)


@dataclass
class Flush:
    """Rows of one transaction."""

    # Structured arrays with the fields of the spool's records.
    steps: list[NDArray[np.void]] = field(default_factory=list)
    events: list[StepEvent] = field(default_factory=list)
    log_lines: list[LogRow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps or self.events or self.log_lines or self.samples)


def number_lines(session: Session, run_id: int, attempt: int, lines: Iterable[LogRow]) -> None:
    """Number lines after the last stored line of the run's log. Raises StaleAttempt."""
    lock_active_attempt(session, run_id, attempt)
    newest = select(func.max(LogLine.number)).where(LogLine.run_id == run_id)
    last = session.scalar(newest) or 0
    for line in lines:
        last = number_line(line, last)


def number_line(line: LogRow, last: int) -> int:
    """Number a line after `last` and return the number, for a gap that of its last line."""
    line.number = last + 1
    if not line.lines:
        return last + 1
    line.text = _gap(last + 1, last + line.lines)
    return last + line.lines


def _gap(first: int, last: int) -> str:
    return f"[lines {first:,} to {last:,} are in the file of the log only]"


def _sample_row(run_id: int, sample: Sample) -> dict[str, object]:
    values = {name: None if value is UNSET else value for name, value in asdict(sample).items()}
    return {"run_id": run_id, **values}


def record(session: Session, run_id: int, attempt: int, flush: Flush) -> None:
    """Write a flush, idempotent on (run, step).

    Raises StaleAttempt if the attempt no longer holds the run.
    """
    run = lock_active_attempt(session, run_id, attempt)
    connection = session.connection()
    if flush.steps:
        steps = _in_order(np.concatenate(flush.steps))
        steps = _canonical(steps)
        are_new = step_block_writer.write(connection, run_id, steps)
        loss_curves.add(connection, run_id, steps)
        _count(run, steps)
        _summarise(run, steps)
        skips = int(np.count_nonzero(steps["flags"] & SKIPPED))
        run.skipped += skips
        if not are_new:
            run.skipped = _count_flagged(connection, run_id, "skipped")
    if run.not_stepped or any((batch["flags"] & NOT_STEPPED).any() for batch in flush.steps):
        run.not_stepped = _count_flagged(connection, run_id, "not_stepped")
    _record_events(connection, run, flush.events)
    _record_lines(connection, run_id, flush.log_lines)
    _upsert(connection, SystemSample, [_sample_row(run_id, sample) for sample in flush.samples])
    run.revision += 1


def _count_flagged(connection: Connection, run_id: int, flag: str) -> int:
    """Count the steps of a run that are skipped, or not stepped by a loop that updates a scaler."""
    condition = {**FLAGGED, "not_stepped": IS_NOT_STEPPED}[flag]
    query = select(func.count(Step.step)).where(Step.run_id == run_id, condition)
    hinted = query.with_hint(Step, f"INDEXED BY ix_steps_{flag}", "sqlite")
    return connection.scalar(hinted) or 0


def _record_lines(connection: Connection, run_id: int, lines: list[LogRow]) -> None:
    """Write log lines; replace excess old ones by one line with their numbers."""
    columns = ("number", "attempt", "time", "stream", "text")
    rows = [{"run_id": run_id, **{name: getattr(line, name) for name in columns}} for line in lines]
    _upsert(connection, LogLine, rows)
    if not rows or rows[0]["number"] // LINES_PER_CHECK == rows[-1]["number"] // LINES_PER_CHECK:
        return
    of_run = select(LogLine.number).where(LogLine.run_id == run_id)
    oldest = of_run.order_by(LogLine.number.desc()).offset(MOST_LINES).limit(1)
    cut = connection.scalar(oldest)
    if cut is not None and cut > FIRST_LINES:
        mine = (LogLine.run_id == run_id, LogLine.number > FIRST_LINES, LogLine.number <= cut)
        connection.execute(delete(LogLine).where(*mine))
        mark = {**rows[0], "number": cut, "stream": "halfstep", "text": _gap(FIRST_LINES + 1, cut)}
        _upsert(connection, LogLine, [mark])


def truncate(session: Session, run_id: int, attempt: int, *, after: int) -> None:
    """Delete the records after a step, which a later attempt repeats but not bit-identically.

    Raises StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    _delete_after(session, run, after)


def take_back(session: Session, run_id: int, attempt: int, event: events.RolledBack) -> None:
    """Delete the steps that a training rolled back and add a status; keep the spike.

    If the spool is read again, the status is added only once.
    Raises StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    after = event.step
    _delete_after(session, run, after, retained=OUTLAST)
    run.rollbacks, run.rollback_step = run.rollbacks + 1, after
    run.revision += 1
    reason = (
        f"rollback {event.rollbacks}: from step {event.from_step:,} to step {after:,}, for the "
        f"loss of {number(event.loss)} at step {event.spike:,}; continued without "
        f"{event.examples:,} examples"
    )
    known = select(RunStatus.id).where(
        RunStatus.run_id == run_id, RunStatus.attempt == attempt, RunStatus.reason == reason
    )
    if session.scalar(known.limit(1)) is None:
        change = {"run_id": run_id, "attempt": attempt, "status": run.status}
        session.add(RunStatus(**change, reason=reason))


def _delete_after(session: Session, run: Run, after: int, *, retained: Sequence[str] = ()) -> None:
    """Delete the records after a step. retained: kinds of diagnoses that are not deleted."""
    connection = session.connection()
    step_block_writer.truncate(connection, run.id, after=after)
    loss_curves.truncate(connection, run.id, after=after)
    scaler_events = (ScalerEvent.run_id == run.id, ScalerEvent.step > after)
    session.execute(delete(ScalerEvent).where(*scaler_events))
    metric_block_writer.truncate(connection, run.id, after=after)
    latest_metrics.take_back(connection, run.id, after=after)
    diagnoses = delete(Diagnosis).where(Diagnosis.run_id == run.id, Diagnosis.step > after)
    session.execute(diagnoses.where(Diagnosis.kind.not_in(retained)))
    run.step = after
    run.skipped = _count_flagged(connection, run.id, "skipped")
    run.not_stepped, run.zero_steps = _count_flagged(connection, run.id, "not_stepped"), 0
    run.last_elapsed_ms, run.lost_since = step_blocks.end_of(connection, run.id)


def newest_attempt(session: Session, run_id: int, attempt: int) -> int:
    """Return the newest attempt up to `attempt` that recorded steps; 0 if none has."""
    newest = select(func.max(RunNode.attempt)).where(
        RunNode.run_id == run_id, RunNode.attempt <= attempt, RunNode.resumed_step.is_not(None)
    )
    return session.scalars(newest).one() or 0


def _in_order(steps: NDArray[np.void]) -> NDArray[np.void]:
    """Sort steps; keep the latest record of a step repeated within the batch."""
    if (np.diff(steps["step"]) > 0).all():
        return steps
    latest_first = steps[::-1]
    return latest_first[np.unique(latest_first["step"], return_index=True)[1]]


def _canonical(steps: NDArray[np.void]) -> NDArray[np.void]:
    """Return steps as they are stored."""
    steps = steps.copy()
    clipped = steps["grad_norm_clipped"]
    clipped[clipped == steps["grad_norm"]] = np.nan  # the clip changed nothing
    # The index finds nonfinite losses by their flag, so the flag must match the loss.
    flags = steps["flags"] & ~np.uint32(NONFINITE_LOSS)
    flags[~np.isfinite(steps["loss"]) & (flags & UNKNOWN_LOSS == 0)] |= NONFINITE_LOSS
    steps["flags"] = flags
    return steps


def _count(run: Run, steps: NDArray[np.void]) -> None:
    """Count new steps, not those repeated bit-identically or sent twice."""
    is_new = steps["step"] > run.step
    run.recorded_steps += int(is_new.sum())
    run.recorded_skips += int((is_new & (steps["flags"] & SKIPPED != 0)).sum())


def _summarise(run: Run, steps: NDArray[np.void]) -> None:
    """Update the summary columns of the run's row to its last step."""
    last = steps[-1]
    run.step = max(run.step, int(last["step"]))
    is_known = not last["flags"] & UNKNOWN_LOSS
    if is_known:  # else the last known loss stays
        run.loss = _number(last["loss"])
    is_lost = is_known and not np.isfinite(last["loss"])
    run.last_flags = int(last["flags"]) & ~NONFINITE_LOSS | (NONFINITE_LOSS if is_lost else 0)
    applied = run.recorded_steps - run.recorded_skips - int((steps["flags"] & SKIPPED == 0).sum())
    run.zero_steps = count_zero_steps(steps, run.zero_steps, applied)
    run.last_elapsed_ms = int(last["elapsed_ms"])
    finite = np.flatnonzero(steps["flags"] & NONFINITE_LOSS == 0)
    if len(finite) == len(steps) or (len(finite) and finite[-1] == len(steps) - 1):
        run.lost_since = None
    elif len(finite) or run.lost_since is None:
        run.lost_since = int(steps["step"][finite[-1] + 1 if len(finite) else 0])
    run.scale = _number(last["scale"])
    run.steps_per_second = _speed(run, steps["step_us"][-SPEED_STEPS:])


def _speed(run: Run, step_us: NDArray[np.uint32]) -> float | None:
    """Return the mean steps per second of about the last 200 steps; step_us: of the newest.

    A run's first step is left out once there are others: it compiles, and fills caches. Of a
    logged one the duration is unknown.
    """
    if not step_us.any():
        return run.steps_per_second
    has_first, count = run.recorded_steps <= len(step_us), len(step_us)
    latest = max(float(step_us[1 if has_first and count > 1 else 0 :].mean()), 1.0)
    share = count / min(SPEED_STEPS, max(run.recorded_steps - 1, count))
    before = 1e6 / run.steps_per_second if run.steps_per_second else latest
    return 1e6 / (before + share * (latest - before))


def _record_events(connection: Connection, run: Run, rows: Iterable[events.StepEvent]) -> None:
    scaler_events: list[dict[str, object]] = []
    metrics: list[events.Metric] = []
    diagnoses: list[dict[str, object]] = []
    acknowledged: list[int] = []
    for event in rows:
        if isinstance(event, events.Metric):
            metrics.append(event)
        elif isinstance(event, events.Scaler):
            scaler_events.append(
                {
                    "run_id": run.id,
                    "step": event.step,
                    "kind": event.kind,
                    "optimizer": event.optimizer or "",
                    "scale_before": float(event.scale_before),
                    "scale_after": float(event.scale_after),
                    "loss_nonfinite": event.loss_nonfinite,
                    "culprits": [fields_of(culprit) for culprit in event.culprits],
                }
            )
        elif isinstance(event, events.Length):
            run.steps_total = event.steps
        elif isinstance(event, events.Workload):
            run.workload = {name: value for name, value in asdict(event).items() if name != "step"}
        elif isinstance(event, events.RequestDone):
            acknowledged.append(event.request)
        else:
            content = fields_of(event)
            kind = content.pop("event")
            diagnoses.append(
                {"run_id": run.id, "kind": kind, "step": event.step, "content": content}
            )
    if acknowledged:
        applied = update(ControlRequest).where(
            ControlRequest.run_id == run.id, ControlRequest.id.in_(acknowledged)
        )
        connection.execute(
            applied.where(ControlRequest.acknowledged_at.is_(None)).values(acknowledged_at=now())
        )
    grants = _without_worse_replays(connection, run.id, diagnoses)
    _upsert(connection, Diagnosis, grants, key=("run_id", "kind", "step"))
    _upsert(connection, ScalerEvent, scaler_events, key=("run_id", "step", "kind", "optimizer"))
    if metrics:
        _record_metrics(connection, run, metrics)


def _record_metrics(connection: Connection, run: Run, metrics: list[events.Metric]) -> None:
    """Write metric points and the latest point of each metric."""
    points = MetricPoints.of(metrics)
    never = metric_block_writer.NEVER
    before = latest_metrics.last_steps(connection, run.id, points.names, default=never)
    metric_block_writer.write(connection, run.id, run.revision + 1, points, before)
    latest_metrics.note(connection, run.id, points)


def _without_worse_replays(
    connection: Connection, run_id: int, diagnoses: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Drop inexact replays of steps that have an exact one.

    Inexact replays are manual ones, with later weights.
    """

    def is_exact(row: dict[str, Any]) -> bool:
        return bool(row["content"]["exact"])

    replays = [row for row in diagnoses if row["kind"] == "replay"]
    if all(map(is_exact, replays)):
        return diagnoses
    exact = {row["step"] for row in replays if is_exact(row)}
    before = select(Diagnosis.step).where(
        Diagnosis.run_id == run_id,
        Diagnosis.kind == "replay",
        Diagnosis.content["exact"].as_boolean(),
    )
    exact.update(connection.execute(before).scalars())
    worse = [row for row in replays if row["step"] in exact and not is_exact(row)]
    return [row for row in diagnoses if row not in worse]


def _upsert(
    connection: Connection,
    table: type[Table],
    rows: list[dict[str, object]],
    key: Sequence[str] = (),
) -> None:
    if not rows:
        return
    key = key or [column.name for column in table.__table__.primary_key]
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table)
    changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changed), rows)


def _number(value: Any) -> float | None:
    number = float(value)
    return None if number != number else number
