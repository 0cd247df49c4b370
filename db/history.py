"""What a viewer of a run gets whole, never sampled: scaler events and steps with a flag."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.series import Cursor, plain
from db.tables import LogLine, Metric, Run, ScalerEvent, Step


def events(session: Session, run_id: int) -> list[ScalerEvent]:
    """Return all that the scaler did, in order of step."""
    query = select(ScalerEvent).where(ScalerEvent.run_id == run_id)
    return list(session.scalars(query.order_by(ScalerEvent.step, ScalerEvent.id)))


def flagged_steps(session: Session, run_id: int) -> dict[str, list[Any]]:
    """Return columns of the steps that were skipped or whose loss or norm was not finite."""
    query = (
        select(Step.step, Step.flags, Step.loss)
        .where(Step.run_id == run_id, Step.flags != 0)
        .order_by(Step.step)
    )
    rows = session.execute(query).all()
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    names = ("step", "flags", "loss")
    return {name: list(map(plain, column)) for name, column in zip(names, columns, strict=True)}


def cursor_now(session: Session, run: Run) -> Cursor:
    """Return the cursor of somebody who has seen all that there is of a run."""

    def newest(column: Any) -> int:
        query = select(func.max(column)).where(column.class_.run_id == run.id)
        return session.scalar(query) or 0

    return Cursor(
        attempt=run.attempt,
        revision=run.revision,
        step=newest(Step.step),
        event=newest(ScalerEvent.id),
        metric=newest(Metric.id),
        log=newest(LogLine.number),
    )
