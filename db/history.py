"""What a viewer of a run gets whole, never sampled: scaler events and steps with a flag."""

from typing import Any

from sqlalchemy import Select, func, select, union
from sqlalchemy.orm import Session

from db.paging import Page, page
from db.series import Cursor, json_number
from db.tables import (
    FLAGGED,
    Diagnosis,
    LogLine,
    Metric,
    Run,
    RunNode,
    RunStatus,
    ScalerEvent,
    Step,
)


def events(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of what the scaler did, in order of step."""
    query = select(ScalerEvent).where(ScalerEvent.run_id == run_id)
    key = (ScalerEvent.step, ScalerEvent.id)
    return page(session, query, key, after=after, limit=limit)


def flagged_steps(
    session: Session, run_id: int, *, after: int = 0, limit: int
) -> dict[str, list[Any]]:
    """Return columns of the steps after one that were skipped or whose loss was not finite."""
    found: dict[int, tuple[int, Any]] = {}
    for flag, condition in FLAGGED.items():
        query = _flagged(flag, Step.step, Step.flags, Step.loss)
        query = query.where(Step.run_id == run_id, Step.step > after, condition)
        rows = session.execute(query.order_by(Step.step).limit(limit))
        found |= {step: (flags, json_number(loss)) for step, flags, loss in rows}
    steps = sorted(found)[:limit]
    return {
        "step": steps,
        "flags": [found[step][0] for step in steps],
        "loss": [found[step][1] for step in steps],
    }


def count_flagged(session: Session, run_id: int) -> int:
    """Count the steps that `flagged_steps` returns, page by page."""
    either = [
        _flagged(flag, Step.step).where(Step.run_id == run_id, condition)
        for flag, condition in FLAGGED.items()
    ]
    return session.scalar(select(func.count()).select_from(union(*either).subquery())) or 0


def _flagged(flag: str, *columns: Any) -> Select[Any]:
    """Select from the index of a flag: left alone, SQLite would read all steps."""
    return select(*columns).with_hint(Step, f"INDEXED BY ix_steps_{flag}", "sqlite")


def resumptions(session: Session, run_id: int) -> dict[int, int]:
    """Return the last step before each attempt's own, of those that resumed a run."""
    query = select(RunNode.attempt, RunNode.resumed_step).where(
        RunNode.run_id == run_id, RunNode.node == 0, RunNode.resumed_step > 0
    )
    return {attempt: step for attempt, step in session.execute(query) if step is not None}


def cursor_now(session: Session, run: Run, *, waiting: int = 0) -> Cursor:
    """Return the cursor of somebody who has seen all that there is of a run.

    waiting: the mark of what it waits for.
    """

    def newest(column: Any) -> int:
        query = select(func.max(column)).where(column.class_.run_id == run.id)
        return session.scalar(query) or 0

    # An attempt that has made no step yet may still take steps back.
    has_begun = run.resumed_step is not None
    return Cursor(
        attempt=run.attempt if has_begun else max(run.attempt - 1, 0),
        revision=run.revision,
        step=newest(Step.step),
        event=newest(ScalerEvent.id),
        metric=newest(Metric.id),
        log=newest(LogLine.number),
        diagnosis=newest(Diagnosis.id),
        status=newest(RunStatus.id),
        files=run.files_revision,
        waiting=waiting,
        rewinds=run.rewinds,
    )
