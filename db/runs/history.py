"""Complete, never sampled data of a run: scaler events and flagged steps."""

import math
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, func, select, union
from sqlalchemy.orm import Session

from db.paging import Page, page
from db.tables import (
    FLAGGED,
    Run,
    RunNode,
    ScalerEvent,
    Step,
)
from db.telemetry.series import Cursor, newest_rows
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.plain_json import json_safe


def events(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of scaler events in order of step."""
    query = select(ScalerEvent).where(ScalerEvent.run_id == run_id)
    key = (ScalerEvent.step, ScalerEvent.id)
    return page(session, query, key, after=after, limit=limit)


def read_flagged_steps(
    session: Session, run_id: int, *, after: int = 0, limit: int
) -> dict[str, list[object]]:
    """Return columns of skipped steps and steps with nonfinite loss after a step."""
    flagged: dict[int, tuple[int, Any]] = {}
    for flag, condition in FLAGGED.items():
        query = _select_flagged(flag, Step.step, Step.flags, Step.loss)
        query = query.where(Step.run_id == run_id, Step.step > after, condition)
        rows = session.execute(query.order_by(Step.step).limit(limit))
        flagged |= {step: (flags, _loss(flags, loss)) for step, flags, loss in rows}
    steps = sorted(flagged)[:limit]
    return {
        "step": steps,
        "flags": [flagged[step][0] for step in steps],
        "loss": [flagged[step][1] for step in steps],
    }


def _loss(flags: int, loss: float | None) -> object:
    """Return a stored loss for JSON; NaN is stored as NULL, as an unknown loss is."""
    return json_safe(math.nan if loss is None and flags & NONFINITE_LOSS else loss)


def count_flagged(session: Session, run_id: int) -> int:
    """Count the steps on all pages of `read_flagged_steps`."""
    either = [
        _select_flagged(flag, Step.step).where(Step.run_id == run_id, condition)
        for flag, condition in FLAGGED.items()
    ]
    return session.scalar(select(func.count()).select_from(union(*either).subquery())) or 0


def _select_flagged(flag: str, *columns: Any) -> Select[Any]:
    """Select from the index of a flag; without the hint, SQLite would read all steps."""
    return select(*columns).with_hint(Step, f"INDEXED BY ix_steps_{flag}", "sqlite")


def resumptions(session: Session, run_id: int) -> dict[int, int]:
    """Return the last step before the own steps of each attempt that resumed a run."""
    rows = session.connection().execute(_resumptions_query(), {"run_id": run_id})
    return {attempt: step for attempt, step in rows if step is not None}


@cache
def _resumptions_query() -> Select[int, int | None]:
    of_run = (RunNode.run_id == bindparam("run_id"), RunNode.node == 0)
    query = select(RunNode.attempt, RunNode.resumed_step)
    return query.where(*of_run, RunNode.resumed_step > 0)


def cursor_now(session: Session, run: Run, *, waiting: int = 0) -> Cursor:
    """Return the cursor of a client that has received all data of a run.

    waiting: marker of the reason why a queued run waits.
    """
    newest = newest_rows(session, run.id)
    # An attempt without steps may still delete earlier steps.
    has_begun = run.resumed_step is not None
    return Cursor(
        attempt=run.attempt if has_begun else max(run.attempt - 1, 0),
        revision=run.revision,
        **newest._mapping,
        files=run.files_revision,
        waiting=waiting,
        rollbacks=run.rollbacks,
    )
