"""Queries of recorded data: charts, events, log lines and changes since a cursor."""

from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, Row, Select, bindparam, func, select
from sqlalchemy.orm import Session

from db.errors import Invalid
from db.paging import Page
from db.tables import (
    ENDED,
    FLAGGED,
    LARGEST_COUNT,
    LARGEST_ID,
    Artifact,
    CheckpointFile,
    Diagnosis,
    LogLine,
    MetricTail,
    Run,
    RunStatus,
    ScalerEvent,
    Step,
    StepBlock,
)
from db.telemetry import loss_curves, metric_blocks, step_rows
from db.telemetry.metric_blocks import News, Point
from db.telemetry.pyramid import END
from db.telemetry.step_rows import StepRow
from halfstep.telemetry.plain_json import json_safe
from halfstep.telemetry.scaling_health import CALIBRATING_FOR, find_settled_step

SPARKLINE_POINTS = 60


#: Keys of the rows that a cursor counts, by its field: later rows have larger ones.
KEYS: dict[str, Any] = {
    "event": ScalerEvent.id,
    "metric": MetricTail.revision,
    "log": LogLine.number,
    "diagnosis": Diagnosis.id,
    "status": RunStatus.id,
}


@dataclass(frozen=True)
class Cursor:
    """Position in a run's changes that a client has received.

    `str` and `parse` convert it to and from a URL parameter.
    """

    attempt: int = 0
    revision: int = -1
    step: int = 0
    event: int = 0
    metric: int = 0  # the revision that the last flush with metrics has made
    log: int = 0
    diagnosis: int = 0
    status: int = 0
    files: int = 0  # the run's files_revision
    waiting: int = 0  # marker of the reason why a queued run waits
    rollbacks: int = 0  # the run's number of rollbacks

    @property
    def _is_possible(self) -> bool:
        ids = (self.attempt, self.event, self.diagnosis, self.status)
        counts = (self.revision, self.step, self.metric, self.log, self.files)
        others = (self.waiting, self.rollbacks)
        return all(0 <= n <= LARGEST_ID for n in ids) and all(
            -1 <= n <= LARGEST_COUNT for n in (*counts, *others)
        )

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Parse a cursor; invalid text gives the initial cursor."""
        try:
            cursor = cls(*(int(part) for part in text.split(".")))
            return cursor if cursor._is_possible else cls()
        except (TypeError, ValueError):
            return cls()


@dataclass(frozen=True)
class Changes:
    """Changes of a run between two cursors."""

    run: Run
    steps: dict[str, list[Any]]
    events: list[ScalerEvent]
    metrics: list[Point]
    has_new_metrics: bool  # also true if only others than the requested ones have new points
    has_all_metrics: bool  # False: a client must reload its points, of earlier flushes
    log_lines: list[LogLine]
    diagnoses: list[Diagnosis]
    statuses: list[RunStatus]
    checkpoints: list[CheckpointFile]  # new or changed
    artifacts: list[Artifact]  # new or changed
    has_new_files: bool  # also true if any were only deleted
    goes_back: bool  # steps were taken back, so a client must reload its events
    is_over: bool  # no more changes will follow
    cursor: Cursor


def changes(
    session: Session,
    run_id: int,
    since: Cursor,
    *,
    waiting: int = 0,
    most: int = 5000,
    metrics: Collection[str] | None = None,
) -> Changes | None:
    """Return the changes since a cursor, at most `most` rows of each kind, or None.

    metrics: names of the metrics to return; None: all.

    After a resume or a rollback the cursor moves back to the step of its checkpoint: clients
    replace their rows from the first step of the changes on.
    """
    run = session.get(Run, run_id)
    if run is None or (run.revision, waiting) == (since.revision, since.waiting):
        return None
    seen, attempt = since.step, since.attempt
    goes_back = False
    if run.attempt != attempt and run.resumed_step is not None:
        goes_back, seen, attempt = True, min(seen, run.resumed_step), run.attempt
    if run.rollbacks != since.rollbacks and run.rollback_step is not None:
        # Only the step of the last rollback is known.
        is_next = run.rollbacks == since.rollbacks + 1
        goes_back, seen = True, min(seen, run.rollback_step) if is_next else 0
    if goes_back:
        since = replace(
            since,
            event=_newest_id(session, ScalerEvent, run_id, seen),
            diagnosis=_newest_id(session, Diagnosis, run_id, seen),
        )
    steps = raw_steps(session, run_id, first=seen + 1, most=most)
    newest = newest_rows(session, run_id)

    def after(name: str) -> list[Any]:
        seen = getattr(since, name)
        if getattr(newest, name) <= seen:  # mostly: one query instead of one for each kind
            return []
        key = KEYS[name]
        query = select(key.class_).where(key.class_.run_id == run_id, key > seen)
        return list(session.scalars(query.order_by(key).limit(most)))

    news = News([], since.metric, is_full=False, is_complete=True)
    if newest.metric > since.metric:
        news = metric_blocks.news(session.connection(), run_id, since.metric, metrics, most)
    events, log_lines = after("event"), after("log")
    diagnoses, statuses = after("diagnosis"), after("status")
    has_new_files = run.files_revision != since.files
    kinds = (steps["step"], events, log_lines, diagnoses, statuses)
    full = news.is_full or any(len(rows) == most for rows in kinds)
    cursor = Cursor(
        attempt=attempt,
        # A full page may have more rows after it: request again.
        revision=-1 if full else run.revision,
        step=steps["step"][-1] if steps["step"] else seen,
        event=events[-1].id if events else since.event,
        metric=news.flush,
        log=log_lines[-1].number if log_lines else since.log,
        diagnosis=diagnoses[-1].id if diagnoses else since.diagnosis,
        status=statuses[-1].id if statuses else since.status,
        files=run.files_revision,
        waiting=waiting,
        rollbacks=run.rollbacks,
    )
    return Changes(
        run=run,
        steps=steps,
        events=events,
        metrics=news.points,
        has_new_metrics=news.flush > since.metric,
        has_all_metrics=news.is_complete,
        log_lines=log_lines,
        diagnoses=diagnoses,
        statuses=statuses,
        checkpoints=_list_changed(session, CheckpointFile, run_id, since.files)
        if has_new_files
        else [],
        artifacts=_list_changed(session, Artifact, run_id, since.files) if has_new_files else [],
        has_new_files=has_new_files,
        goes_back=goes_back,
        is_over=run.status in ENDED and not full,
        cursor=cursor,
    )


def raw_steps(
    session: Session, run_id: int, *, first: int = 1, last: int | None = None, most: int = 5000
) -> dict[str, list[Any]]:
    """Return columns of steps in order, with None for what is unknown.

    Non-finite values are "NaN", "Infinity" or "-Infinity".
    """
    stored = step_rows.read_rows(session, run_id, first=first, last=last, most=most)
    rows = [row.with_nan() for row in stored]
    columns = zip(*rows, strict=True) if rows else [()] * len(StepRow._fields)
    return {
        name: list(map(json_safe, column))
        for name, column in zip(StepRow._fields, columns, strict=True)
    }


def skips(
    session: Session, run_id: int, *, most: int = 200, steps: Collection[int] | None = None
) -> list[ScalerEvent]:
    """Return the latest skips with their culprits, newest first.

    steps: only skips of these steps.
    """
    given: dict[str, object] = {"run_id": run_id, "most": most, "steps": steps}
    if steps is None:
        given["steps"] = first_skip_of_latest(session, run_id, most=most)
    return list(session.scalars(_skips_query(is_latest=steps is None), given))


@cache
def _skips_query(*, is_latest: bool) -> Select[ScalerEvent]:
    steps = bindparam("steps", None, BigInteger, expanding=not is_latest)
    step = ScalerEvent.step
    its = (ScalerEvent.run_id == bindparam("run_id"), ScalerEvent.kind == "skip")
    query = select(ScalerEvent).where(*its, step >= steps if is_latest else step.in_(steps))
    return query.order_by(step.desc(), ScalerEvent.optimizer).limit(bindparam("most"))


def last_skip_of_calibration(session: Session, run_id: int) -> ScalerEvent | None:
    """Return the last skip of the initial calibration of a run's scale; a fork has none."""
    if session.get_one(Run, run_id).parent_id is not None:
        return None
    early = skips(session, run_id, steps=range(1, CALIBRATING_FOR + 1))
    end = find_settled_step(CALIBRATING_FOR, sorted(skip.step for skip in early))
    return next((skip for skip in early if end is None or skip.step < end), None)


def first_skip_of_latest(session: Session, run_id: int, *, most: int) -> int:
    """Return the earliest of the latest `most` skipped steps, or 0 if there are none.

    The query uses the index of skipped steps only instead of reading all scaler events.
    """
    given = {"run_id": run_id, "most": most}
    return session.connection().scalar(_first_skip_query(), given) or 0


@cache
def _first_skip_query() -> Select[int | None]:
    latest = (
        select(Step.step)
        .with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
        .where(Step.run_id == bindparam("run_id"), FLAGGED["skipped"])
        .order_by(Step.step.desc())
        .limit(bindparam("most"))
    )
    return select(func.min(latest.subquery().c.step))


def sparklines(session: Session, some_runs: Collection[Run]) -> dict[int, list[Any]]:
    """Return each run's loss at about evenly spaced steps; its cost depends on no run's length."""
    ids = [run.id for run in some_runs if run.own_steps]
    curves = loss_curves.read(session.connection(), ids) if ids else {}
    return {run.id: _drawn(run, curves[run.id]) if run.id in curves else [] for run in some_runs}


def _drawn(run: Run, curve: loss_curves.Points) -> list[object]:
    """Return the losses of a curve at evenly spaced steps, or of the last point before each."""
    steps, losses = curve["step"], curve["loss"].tolist()
    if steps[-1] < run.step:
        steps, losses = np.append(steps, run.step), [*losses, run.known_loss]
    count, first = min(SPARKLINE_POINTS, run.own_steps), run.step - run.own_steps + 1
    spaced = [first + round(i * (run.own_steps - 1) / max(count - 1, 1)) for i in range(count)]
    found = np.unique(np.searchsorted(steps, spaced, side="right") - 1).tolist()
    drawn = [losses[index] for index in found if index >= 0]
    return [None if loss is None or loss != loss else json_safe(loss) for loss in drawn]


def log_lines(
    session: Session, run_id: int, *, before: int | None = None, most: int = 1000
) -> list[LogLine]:
    """Return the latest log lines before a line number, oldest first."""
    query = select(LogLine).where(LogLine.run_id == run_id).order_by(LogLine.number.desc())
    if before is not None:
        query = query.where(LogLine.number < before)
    return list(reversed(session.scalars(query.limit(most)).all()))


def count_log_lines(session: Session, run_id: int) -> int:
    """Count the stored log lines of a run."""
    query = select(func.count()).select_from(LogLine).where(LogLine.run_id == run_id)
    return session.scalar(query) or 0


def metrics(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of a run's metric points in order of name and step.

    Raises Invalid for a cursor that is not the `next` of a page.
    """
    connection, seen = session.connection(), ("", -END)
    if after:
        step, is_cursor, name = after.partition("-")
        if not (step.isdecimal() and len(step) < 20 and is_cursor):
            raise Invalid({"after": f"{after[:100]!r} is not valid; allowed: the next of a page"})
        seen = (name, int(step))
    rows = metric_blocks.page(connection, run_id, after=seen, limit=limit + 1)
    last = rows[limit - 1] if len(rows) > limit else None
    cursor = f"{last.step}-{last.name}" if last else None
    return Page(rows[:limit], metric_blocks.count(connection, run_id), cursor)


def _list_changed(session: Session, table: Any, run_id: int, seen: int) -> list[Any]:
    query = select(table).where(table.run_id == run_id, table.revision > seen)
    return list(session.scalars(query.order_by(table.step, table.id)))


def newest_rows(session: Session, run_id: int) -> Row[Any]:
    """Return the largest step and the largest key of each of KEYS, by name; 0 without rows."""
    return session.connection().execute(_newest_query(), {"run_id": run_id}).one()


@cache
def _newest_query() -> Select[Any]:
    def newest(column: Any) -> Any:
        of_run = column.class_.run_id == bindparam("run_id")
        return select(func.coalesce(func.max(column), 0)).where(of_run).scalar_subquery()

    of_run = StepBlock.run_id == bindparam("run_id")
    last = select(StepBlock.last).where(of_run).order_by(StepBlock.first.desc()).limit(1)
    step = func.coalesce(last.scalar_subquery(), 0).label("step")
    return select(step, *(newest(column).label(name) for name, column in KEYS.items()))


def _newest_id(session: Session, table: Any, run_id: int, step: int) -> int:
    """Return the newest id up to a step: SQLite reuses the ids of deleted rows."""
    query = select(func.max(table.id)).where(table.run_id == run_id, table.step <= step)
    return session.scalar(query) or 0
