"""Losses that are not finite, whether their gradients were, and losses that had grown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from db.tables import FLAGGED, Run, Step
from db.telemetry import step_rows
from halfstep.telemetry.flags import NORM_OVERFLOW, NOT_STEPPED, SKIPPED

ROWS_READ = 100  # the first ones and the last ones
FIRST_STEPS, STEPS_BEFORE = 5, 20
DIVERGED, LARGE = 100.0, 10.0  # times the smallest of the first losses, and at least
RISEN_STEPS = 100  # before them a loss above its first value may be chance


@dataclass(frozen=True)
class LostLosses:
    """Applied steps with a loss that is not finite and finite gradients."""

    count: int
    last: int  # the last of these steps
    has_nan: bool
    has_inf: bool


@dataclass(frozen=True)
class Growth:
    """The smallest of the first losses, and the last one before a step."""

    first_step: int
    first_loss: float
    last_step: int
    last_loss: float


@dataclass(frozen=True)
class Risen:
    """The first step of a run and its latest, whose loss is more than twice as large."""

    first: int
    last: int
    losses: tuple[float, float]
    rate: float  # the larger of both learning rates


def lost_losses(session: Session, run: Run) -> LostLosses | None:
    """Return the applied steps of a run whose loss was not finite, but their gradients.

    None if there are none, or if any gradients that are read are not finite: then the weights are
    not, and steps are not counted, which may be millions.
    """
    connection, of_run = session.connection(), {"run_id": run.id}
    rows = [*connection.execute(_rows_query(is_last=False), of_run)]
    rows += connection.execute(_rows_query(is_last=True), of_run)
    if not rows or not all(_is_finite(row.grad_norm, row.flags) for row in rows):
        return None
    return LostLosses(
        count=connection.scalar(_count_query(), of_run) or 0,
        last=max(row.step for row in rows),
        has_nan=any(row.loss is None for row in rows),
        has_inf=any(row.loss is not None for row in rows),
    )


def _is_finite(norm: float | None, flags: int) -> bool:
    """Return whether gradients were known to be finite. norm: None for NaN and if unknown."""
    return norm is not None and (math.isfinite(norm) or bool(flags & NORM_OVERFLOW))


@cache
def _count_query() -> Select[int]:
    return _lost(select(func.count(Step.step)))


@cache
def _rows_query(*, is_last: bool) -> Select[Any]:
    order = Step.step.desc() if is_last else Step.step
    rows = _lost(select(Step.step, Step.loss, Step.grad_norm, Step.flags))
    return rows.order_by(order).limit(ROWS_READ)


def _lost(columns: Any) -> Select[Any]:
    # Without the hint SQLite reads all steps instead of this partial index.
    query: Select[Any] = columns.with_hint(Step, "INDEXED BY ix_steps_nonfinite", "sqlite")
    is_applied = Step.flags.op("&")(SKIPPED | NOT_STEPPED) == 0
    return query.where(Step.run_id == bindparam("run_id"), FLAGGED["nonfinite"], is_applied)


def growth_before(session: Session, run: Run, step: int) -> Growth | None:
    """Return how the loss had grown before a step if it had diverged, else None.

    A loss that begins near 0, as of PPO or GRPO, grows in sound training as well.
    """
    first = (run.parent_step or 0) + 1
    begun = step_rows.read_rows(
        session, run.id, first=first, last=min(first + FIRST_STEPS, step) - 1, most=FIRST_STEPS
    )
    before = step_rows.read_rows(
        session, run.id, first=max(first, step - STEPS_BEFORE), last=step - 1, most=STEPS_BEFORE
    )
    losses, latest = _magnitudes(begun), _magnitudes(before)[-1:]
    if not losses or not latest:
        return None
    (least, at), (last, step) = min(losses), latest[0]
    has_diverged = last >= max(DIVERGED * least, LARGE) and step > at
    return Growth(at, least, step, last) if has_diverged else None


def _magnitudes(rows: Sequence[step_rows.StepRow]) -> list[tuple[float, int]]:
    """Return the finite losses of some steps without their signs, and the steps."""
    finite = [row for row in rows if row.loss is not None and math.isfinite(row.loss)]
    return [(abs(row.loss or 0.0), row.step) for row in finite]


def risen(session: Session, run: Run) -> Risen | None:
    """Return a run's first and latest loss if the latest is more than twice as large."""
    if run.own_steps < RISEN_STEPS or run.loss is None:
        return None
    first = next(iter(step_rows.read_rows(session, run.id, most=1)), None)
    last = step_rows.last_row(session, run.id)
    if first is None or last is None or first.loss is None or last.loss is None:
        return None
    if not math.isfinite(first.loss) or not math.isfinite(last.loss):
        return None
    if last.loss - first.loss <= abs(first.loss):
        return None
    rate = max(first.lr or 0.0, last.lr or 0.0)
    return Risen(first.step, last.step, (first.loss, last.loss), rate)
