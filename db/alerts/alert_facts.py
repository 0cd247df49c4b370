"""Facts for alert conditions, read for many runs in a fixed number of queries."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.alerts.alert_conditions import RECENT_STEPS, Facts
from db.health import input_bound, scaling_health
from db.runs import runs
from db.tables import FLAGGED, AlertRule, Diagnosis, Run, RunStatus, Status, Step
from db.telemetry import latest_metrics
from db.telemetry.telemetry import SPIKE
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.scaling_health import CALIBRATING_FOR


def read(session: Session, some_runs: Sequence[Run], needs: set[str], moment: float) -> list[Facts]:
    """Read facts of runs. needs: names of the fields of Facts to read; no others are read."""
    values = {
        name: read_one(session, some_runs)
        for name, read_one in _READERS.items()
        if name in needs and some_runs
    }
    healths = values.get("health", {})
    for run in some_runs if "skips_in_a_row" in values else ():
        health = healths.get(run.id)
        if health is not None and health.word != "calibrating":
            streaks = values["skips_in_a_row"]
            streaks[run.id] = max(streaks.get(run.id, 0), health.figures.streak)
    return [
        Facts(
            run,
            moment,
            **{name: by_run[run.id] for name, by_run in values.items() if run.id in by_run},
        )
        for run in some_runs
    ]


def _ids(some_runs: Iterable[Run]) -> list[int]:
    return [run.id for run in some_runs]


def _count_applied(session: Session, some_runs: Collection[Run]) -> dict[int, Any]:
    finished = [run for run in some_runs if run.status == Status.FINISHED]
    return dict(runs.count_applied_of(session, finished))


def _streaks(session: Session, some_runs: Collection[Run]) -> dict[int, Any]:
    """Return the longest run of skips in recent steps, without the first scale search."""
    query = select(Step.run_id, Step.step).join(Run, Run.id == Step.run_id)
    query = query.with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
    searched = func.coalesce(Run.parent_step, 0) + CALIBRATING_FOR
    recent = (Step.step > Run.step - RECENT_STEPS, Step.step > searched, FLAGGED["skipped"])
    mine = Run.id.in_(_ids(run for run in some_runs if run.skipped))
    longest: dict[int, int] = {}
    before, streak = (0, 0), 0
    for run_id, step in session.execute(query.where(mine, *recent).order_by(Run.id, Step.step)):
        streak = streak + 1 if (run_id, step - 1) == before else 1
        before = (run_id, step)
        longest[run_id] = max(longest.get(run_id, 0), streak)
    return longest


def _nonfinite(session: Session, some_runs: Collection[Run]) -> dict[int, object]:
    query = select(Step.run_id, func.min(Step.step)).join(Run, Run.id == Step.run_id)
    query = query.with_hint(Step, "INDEXED BY ix_steps_nonfinite", "sqlite")
    recent = (Step.step > Run.step - RECENT_STEPS, FLAGGED["nonfinite"])
    return _pairs(session, query.where(Run.id.in_(_ids(some_runs)), *recent).group_by(Step.run_id))


def _lost(_session: Session, some_runs: Collection[Run]) -> dict[int, Any]:
    """Return the first step from which on no loss of a finished run was finite."""
    lost = [
        run
        for run in some_runs
        if run.status == Status.FINISHED and run.last_flags & NONFINITE_LOSS
    ]
    return {run.id: run.lost_since for run in lost}


def _spikes(session: Session, some_runs: Collection[Run]) -> dict[int, object]:
    query = select(Diagnosis.run_id, func.max(Diagnosis.step))
    query = query.join(Run, Run.id == Diagnosis.run_id).where(Run.id.in_(_ids(some_runs)))
    recent = (Diagnosis.kind == SPIKE, Diagnosis.step > Run.step - RECENT_STEPS)
    return _pairs(session, query.where(*recent).group_by(Diagnosis.run_id))


def _progress(session: Session, some_runs: Collection[Run]) -> dict[int, object]:
    """Return the time of each run's last step or status change, whichever was later."""
    changed = select(RunStatus.time).where(RunStatus.run_id == Run.id)
    changed = changed.order_by(RunStatus.id.desc()).limit(1).correlate(Run)
    columns = (Run.id, Run.started_at, Run.last_elapsed_ms, changed.scalar_subquery())
    rows = session.execute(select(*columns).where(Run.id.in_(_ids(some_runs))))
    return {
        run_id: max((started_at or 0.0) + (elapsed_ms or 0) / 1000, changed_at or 0.0)
        for run_id, started_at, elapsed_ms, changed_at in rows
    }


def _metrics(session: Session, some_runs: Collection[Run]) -> dict[int, object]:
    """Return the latest value of each metric that a rule names, by run."""
    named = select(AlertRule.metric).where(AlertRule.is_on, AlertRule.metric != "")
    latest = latest_metrics.points(session, _ids(some_runs), named)
    return {
        run_id: {name: point.value for name, point in of_run.items()}
        for run_id, of_run in latest.items()
    }


def _data_waits(session: Session, some_runs: Collection[Run]) -> dict[int, Any]:
    return input_bound.data_waits(session, _ids(some_runs))


def _pairs(session: Session, query: Any) -> dict[int, object]:
    return {row[0]: row[1] for row in session.execute(query)}


_READERS = {
    "applied": _count_applied,
    "health": scaling_health.health_of_runs,
    "skips_in_a_row": _streaks,
    "nonfinite_step": _nonfinite,
    "lost_from": _lost,
    "spike_step": _spikes,
    "progress_at": _progress,
    "data_wait": _data_waits,
    "metrics": _metrics,
}
