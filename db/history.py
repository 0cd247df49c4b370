"""What a viewer of a run gets whole, never sampled: scaler events and steps with a flag."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

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


def events(session: Session, run_id: int) -> list[ScalerEvent]:
    """Return all that the scaler did, in order of step."""
    query = select(ScalerEvent).where(ScalerEvent.run_id == run_id)
    return list(session.scalars(query.order_by(ScalerEvent.step, ScalerEvent.id)))


def flagged_steps(session: Session, run_id: int) -> dict[str, list[Any]]:
    """Return columns of the steps that were skipped or whose loss was not finite."""
    found: dict[int, tuple[int, Any]] = {}
    for flag, condition in FLAGGED.items():
        # Left alone, SQLite would read all steps rather than the index that holds just these.
        query = (
            select(Step.step, Step.flags, Step.loss)
            .with_hint(Step, f"INDEXED BY ix_steps_{flag}", "sqlite")
            .where(Step.run_id == run_id, condition)
        )
        found |= {step: (flags, json_number(loss)) for step, flags, loss in session.execute(query)}
    steps = sorted(found)
    return {
        "step": steps,
        "flags": [found[step][0] for step in steps],
        "loss": [found[step][1] for step in steps],
    }


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
    )
