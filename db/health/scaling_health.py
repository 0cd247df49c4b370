"""Loss-scale health of a run, and the figures from which it is derived."""

import math
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, bindparam, null, select, union_all
from sqlalchemy.orm import Session

from db.tables import (
    ENDED,
    FLAGGED,
    RECIPE,
    TRAIN,
    Diagnosis,
    Run,
    ScalerEvent,
    Status,
    Step,
)
from halfstep.diagnosis.loop_mistakes import ZERO_STEPS
from halfstep.telemetry.flags import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    NOT_STEPPED,
    SKIPPED,
    UNKNOWN_NORM,
)
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.scaling_health import (
    SETTLED,
    WINDOW,
    Figures,
    ScalingHealth,
    count,
    judge,
)


def scaling_health(session: Session, run: Run) -> ScalingHealth | None:
    """Return the health of a run; None without a loss scale or without steps."""
    return health_of_runs(session, [run]).get(run.id)


def health_of_runs(session: Session, some_runs: Collection[Run]) -> dict[int, ScalingHealth]:
    """Return the health of each run that has a loss scale and steps."""
    scaled_runs = [run for run in some_runs if run.own_steps and has_scaler(run)]
    figures_by_run = figures_of(session, scaled_runs) if scaled_runs else {}
    lost = _lost_weights(session, scaled_runs)
    intervals = {
        run.id: run.settings.get("scaler", {}).get("growth_interval") for run in scaled_runs
    }
    runs = {run.id: run for run in scaled_runs}
    return {
        run_id: _at_the_end(
            runs[run_id],
            _unlearning(runs[run_id], figures, has_lost_weights=run_id in lost)
            or judge(figures, growth_interval=intervals[run_id]),
        )
        for run_id, figures in figures_by_run.items()
    }


def _at_the_end(run: Run, health: ScalingHealth) -> ScalingHealth:
    """Return the health with times before the end or the pause, of a run that does not train."""
    if run.status not in (*ENDED, Status.PAUSED):
        return health
    end = "the pause" if run.status == Status.PAUSED else "the end"
    return health._replace(reason=health.reason.replace(" ago", f" before {end}"))


def _lost_weights(session: Session, some_runs: Collection[Run]) -> set[int]:
    """Return the runs that applied their last step with non-finite loss and gradients."""
    ids = [
        run.id
        for run in some_runs
        if run.last_flags & NONFINITE_LOSS
        and not run.last_flags & (SKIPPED | NOT_STEPPED | NORM_OVERFLOW | UNKNOWN_NORM)
    ]
    rows = session.connection().execute(_last_norms_query(), {"run_ids": ids}) if ids else ()
    return {run_id for run_id, norm in rows if norm is None or math.isinf(norm)}  # NULL: NaN


@cache
def _last_norms_query() -> Select[int, float | None]:
    norms = select(Step.run_id, Step.grad_norm).join(Run, Run.id == Step.run_id)
    mine = Step.run_id.in_(bindparam("run_ids", expanding=True))
    return norms.where(mine, Step.step == Run.step)


def _unlearning(run: Run, figures: Figures, *, has_lost_weights: bool) -> ScalingHealth | None:
    """Return the health of a run with only zero gradients, no applied step or lost weights."""
    if run.zero_steps >= ZERO_STEPS:
        reason = f"All gradients were 0 in the last {run.zero_steps:,} steps."
    elif run.not_stepped and run.not_stepped + run.skipped >= run.own_steps:
        left_out = f"{run.not_stepped:,} of {run.own_steps:,} steps"
        reason = f"The loop omitted {left_out}, and no step was applied."
    elif has_lost_weights:
        reason = "The last step was applied with a non-finite loss and non-finite gradients."
    else:
        return None
    return ScalingHealth("dead", reason, figures)


def has_scaler(run: Run) -> bool:
    """Return whether a run scales its loss; a script's precision does not show that."""
    return (
        is_scaled(run.settings)
        if run.source == RECIPE
        else (run.scale not in (None, 1.0) or run.skipped > 0)
    )


def is_scaled(config: JsonObject) -> bool:
    """Return whether a configuration trains with a loss scale."""
    if config.get("lab", {}).get("task", TRAIN) != TRAIN:
        return False
    return config["precision"] == "fp16" and bool(config.get("scaler", {}).get("enabled", True))


def figures_of(session: Session, some_runs: Collection[Run]) -> dict[int, Figures]:
    """Read the figures of runs, in one query of a few rows per run.

    It reads the partial index of skips, so long runs cost no more.
    """
    latest, result = _latest_skips(session, some_runs), {}
    for run in some_runs:
        first = run.parent_step or 0  # only a fork's own steps count
        last, last_ms, end_ms, set_at, replaced_at = latest.ends[run.id]
        result[run.id] = count(
            run.own_steps,
            [step - first for step in latest.steps.get(run.id, ())],
            run.scale,
            last=None if last is None else last - first,
            set_at=None if set_at is None else set_at - first,
            replaced_at=None if replaced_at is None else replaced_at - first,
            growths=[step - first for step in latest.growths.get(run.id, ())],
            seconds_since_skip=_seconds_between(last_ms, end_ms) if last != run.step else None,
        )
    return result


def _seconds_between(start_ms: int | None, end_ms: int | None) -> float | None:
    return None if start_ms is None or end_ms is None else (end_ms - start_ms) / 1000


class _Latest(NamedTuple):
    """Latest skips and growths of runs."""

    steps: dict[int, list[int]]  # skips in the last 1000 steps
    growths: dict[int, list[int]]  # of the scale, in the last SETTLED steps
    # By run: its latest skip, the times of that and of its last step, and the steps at which the
    # scale was last set by hand and the scaler last replaced.
    ends: dict[int, Any]


def _latest_skips(session: Session, some_runs: Collection[Run]) -> _Latest:
    latest = _Latest({}, {}, {})
    ids = {"run_ids": [run.id for run in some_runs]}
    rows: Iterable[Any] = session.connection().execute(_latest_skips_query(), ids)
    for run_id, step, grown_at, *end in rows:
        if step is not None:
            latest.steps.setdefault(run_id, []).append(step)
        elif grown_at is not None:
            latest.growths.setdefault(run_id, []).append(grown_at)
        else:
            latest.ends[run_id] = end
    for steps in latest.steps.values():
        steps.sort()
    return latest


@cache  # slow to build, and every list needs it
def _latest_skips_query() -> Any:
    mine = Run.id.in_(bindparam("run_ids", expanding=True))
    skipped = and_(Step.run_id == Run.id, FLAGGED["skipped"])
    # Without the hint SQLite reads all steps instead of this partial index.
    recent = (
        select(Run.id, Step.step, *[null()] * 6)
        .join(Step, skipped & (Step.step > Run.step - WINDOW))
        .with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
        .where(mine)
    )

    of_scaler = and_(ScalerEvent.run_id == Run.id, ScalerEvent.kind == "growth")
    grown = (
        select(Run.id, null(), ScalerEvent.step, *[null()] * 5)
        .join(ScalerEvent, of_scaler & (ScalerEvent.step > Run.step - SETTLED))
        .where(mine)
    )

    def newest(column: Any) -> Any:
        skips = select(column).with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
        skips = skips.where(skipped).order_by(Step.step.desc()).limit(1)
        return skips.correlate(Run).scalar_subquery()

    def latest(table: Any, kind: str) -> Any:
        query = select(table.step).where(table.run_id == Run.id, table.kind == kind)
        query = query.where(table.step > Run.step - WINDOW).order_by(table.step.desc()).limit(1)
        return query.correlate(Run).scalar_subquery()

    by_hand, replaced = latest(ScalerEvent, "set"), latest(Diagnosis, "scaler_replaced")
    columns = (
        *(newest(Step.step), newest(Step.elapsed_ms)),
        *(Run.last_elapsed_ms, by_hand, replaced),
    )
    # First, since PostgreSQL takes the types of columns from the first two parts.
    ends = select(Run.id, Run.step * null(), Run.step * null(), *columns).where(mine)
    return union_all(ends, recent, grown)
