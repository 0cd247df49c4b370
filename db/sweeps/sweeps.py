"""Sweeps: their trials, progress and control.

A trial's key is its sweep and number, and adding one requires a lock on the sweep's row: no point
is submitted twice, even with several servers, and a killed server loses nothing.
"""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, exists, func, or_, select
from sqlalchemy.orm import Session

from db.errors import Conflict, NotFound, StepsNotConverted
from db.queue import run_control
from db.runs import runs
from db.runs.outcomes import run_outcome
from db.tables import ENDED, LatestMetric, Run, Status, Sweep, Trial, User
from db.telemetry import latest_metrics, metric_blocks, step_rows
from halfstep.telemetry.plain_json import JsonObject

RUNNING, PAUSED, CANCELLED, FAILED = "running", "paused", "cancelled", "failed"
#: Displayed status of a sweep with all runs ended.
FINISHED = "finished"
OPEN, COMPLETE, PRUNED, LOST = "open", "complete", "pruned", "failed"
#: State of a failed trial that is to be run again.
WAITING = "waiting"
MINIMIZE, MAXIMIZE = "minimize", "maximize"
#: Kind of a pruner, see app.sweeps.pruning.
HYPERBAND = "hyperband"
LOSS = "loss"
ERROR_CHARACTERS = 1000
#: Runs whose metrics are listed: the newest of the recent ones.
NEWEST_RUNS, RECENT_RUNS, MOST_METRICS = 20, 1000, 1000
#: Rungs of a recipe are counted in 27ths of a run's steps.
RUNGS_WHOLE = 27
#: Linear rungs are 1 % apart from there on, so that a trial has about a thousand, not millions.
SPARSE_RUNGS = 100


@dataclass(frozen=True)
class Tally:
    """Numbers of a sweep's trials by state, and the best value of the complete ones."""

    open: int = 0
    waiting: int = 0
    complete: int = 0
    pruned: int = 0
    failed: int = 0
    best: float | None = None


@dataclass(frozen=True)
class Pace:
    """How long a sweep's ended runs took on average; seconds is None if none has ended."""

    runs: int
    seconds: float | None

    def seconds_left(self, remaining: int, at_once: int) -> float | None:
        """Estimate the time for the remaining runs, `at_once` of them at a time."""
        if self.seconds is None:
            return None
        return self.seconds * -(-remaining // max(at_once, 1))


def pace(session: Session, sweep_id: int) -> Pace:
    """Return the mean time of a sweep's runs from their start to their end, pruned ones too."""
    query = (
        select(func.count(), func.avg(Run.ended_at - Run.started_at))
        .join(Trial, Trial.run_id == Run.id)
        .where(Trial.sweep_id == sweep_id, Trial.state != OPEN)
        .where(Run.ended_at.is_not(None), Run.started_at.is_not(None))
    )
    runs, seconds = session.execute(query).one()
    return Pace(runs, seconds)


def get(session: Session, sweep_id: int, *, lock: bool = False) -> Sweep:
    """Return a sweep. lock: against other writers, with its current values. Raises NotFound."""
    query = select(Sweep).where(Sweep.id == sweep_id)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    sweep = session.scalar(query)
    if sweep is None:
        raise NotFound(f"There is no sweep {sweep_id}.")
    return sweep


def newest(
    session: Session, *, before: int | None = None, limit: int = 50
) -> list[tuple[Sweep, str, Tally]]:
    """List sweeps with their owners' names, newest first. before: a sweep id, for paging."""
    query = select(Sweep, User.name).join(User, User.id == Sweep.owner_id)
    if before is not None:
        query = query.where(Sweep.id < before)
    rows = session.execute(query.order_by(Sweep.id.desc()).limit(limit)).all()
    counts = tallies(session, [sweep for sweep, _owner in rows])
    return [(sweep, owner, counts[sweep.id]) for sweep, owner in rows]


def tallies(session: Session, some: Collection[Sweep]) -> dict[int, Tally]:
    """Count the trials of some sweeps, in one query."""
    low, high = func.min(Trial.value), func.max(Trial.value)
    query = select(Trial.sweep_id, Trial.state, func.count(), low, high)
    query = query.where(Trial.sweep_id.in_([sweep.id for sweep in some]))
    counts: dict[int, dict[str, Any]] = {sweep.id: {} for sweep in some}
    goals = {sweep.id: sweep.goal for sweep in some}
    for sweep_id, state, count, lowest, highest in session.execute(
        query.group_by(Trial.sweep_id, Trial.state)
    ):
        counts[sweep_id][state] = count
        if state == COMPLETE:
            counts[sweep_id]["best"] = lowest if goals[sweep_id] == MINIMIZE else highest
    return {sweep_id: Tally(**count) for sweep_id, count in counts.items()}


def status(sweep: Sweep, tally: Tally) -> str:
    """Return the displayed status of a sweep."""
    is_over = sweep.submitted >= sweep.runs_total and not (tally.open or tally.waiting)
    return FINISHED if sweep.status == RUNNING and is_over else sweep.status


def of_run(session: Session, run_id: int) -> Trial | None:
    """Return the trial of a run, if it has one."""
    return session.scalar(_OF_RUN, {"run_id": run_id})


_OF_RUN = select(Trial).where(Trial.run_id == bindparam("run_id"))


def params(session: Session, sweep_id: int) -> list[dict[str, Any]]:
    """Return the parameters of all trials of a sweep, in order."""
    query = select(Trial.params).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
    return list(session.scalars(query))


def trials(
    session: Session, sweep: Sweep, *, best_first: bool = False, after: int = 0, limit: int
) -> list[tuple[Trial, Run]]:
    """List trials with their runs, newest first.

    best_first: complete trials by value, then pruned ones, then those without a value.
    after: number of trials to skip.
    """
    value = Trial.value.asc() if sweep.goal == MINIMIZE else Trial.value.desc()
    best = (Trial.state == PRUNED, value.nulls_last(), Trial.number)
    order = best if best_first else (Trial.number.desc(),)
    query = select(Trial, Run).join(Run, Run.id == Trial.run_id)
    query = query.where(Trial.sweep_id == sweep.id).order_by(*order).offset(after).limit(limit)
    return [(trial, run) for trial, run in session.execute(query)]


def values(session: Session, metric: str, some_runs: Collection[Run]) -> dict[int, float]:
    """Return the last value of a metric, or of the loss, of each run with a finite one.

    For a run without recorded steps the loss is the metric of that name.
    """
    points = latest_metrics.points(session, [run.id for run in some_runs], [metric])
    last: dict[int, float | None] = {
        run_id: by_name[metric].value for run_id, by_name in points.items() if by_name
    }
    if metric == LOSS:
        last |= {run.id: run.loss for run in some_runs if run.own_steps}
    return {
        run_id: value
        for run_id, value in last.items()
        if value is not None and math.isfinite(value)
    }


def value_from(session: Session, metric: str, run_id: int, step: int) -> float | None:
    """Return the first finite value of a metric, or of the loss, from a step on.

    None while the run is converted after an upgrade.
    """
    with suppress(StepsNotConverted):
        if metric == LOSS:
            return step_rows.first_loss(session, run_id, step)
        return metric_blocks.first_finite(session.connection(), run_id, metric, step)
    return None


def value_at(session: Session, metric: str, run: Run, count: int) -> float | None:
    """Return the value of a metric, or of the loss, that is the `count`th finite one.

    None while the run is converted after an upgrade.
    """
    with suppress(StepsNotConverted):
        if metric == LOSS and run.own_steps:
            return step_rows.first_loss(session, run.id, count) if run.step >= count else None
        return metric_blocks.first_finite(session.connection(), run.id, metric, number=count)
    return None


def due(session: Session) -> list[int]:
    """Return the sweeps with work: a run to submit, an ended run, or a run at its next rung."""
    open_trials = select(func.count()).join_from(Trial, Run, Run.id == Trial.run_id)
    open_trials = open_trials.where(Trial.sweep_id == Sweep.id, Trial.state == OPEN)
    is_waiting = exists().where(Trial.sweep_id == Sweep.id, Trial.state == WAITING)
    needs_run = and_(
        Sweep.status == RUNNING,
        or_(Sweep.recipe != "", Sweep.command.is_not(None)),  # agents take their points themselves
        or_(Sweep.submitted < Sweep.runs_total, is_waiting),
        open_trials.correlate(Sweep).scalar_subquery() < Sweep.at_once,
    )
    has_ended = (Trial.sweep_id == Sweep.id, Trial.state == OPEN, Run.status.in_(ENDED))
    # As in `settle`.
    is_final = or_(
        Trial.lease_expires_at.is_(None),
        Run.status == Status.FINISHED,
        Sweep.status == CANCELLED,
    )
    has_ended_run = exists().where(*has_ended, Run.id == Trial.run_id, is_final)
    unpruned = (Trial.sweep_id == Sweep.id, Trial.state == OPEN, Trial.pruned_step.is_(None))
    is_at_rung = Run.step * RUNGS_WHOLE >= Run.steps_total * Trial.next_rung
    of_recipe = and_(Sweep.recipe != "", Run.steps_total > 0, is_at_rung)
    # Values are counted by `value_at`; there cannot be more than steps.
    latest = exists().where(LatestMetric.run_id == Run.id, LatestMetric.name == Sweep.metric)
    latest = latest.where(LatestMetric.step + 1 >= Trial.next_rung)
    of_values = and_(Sweep.recipe == "", or_(Run.step >= Trial.next_rung, latest))
    is_training = Run.status == Status.RUNNING
    at_rung = exists().where(*unpruned, Run.id == Trial.run_id, or_(of_recipe, of_values))
    needs_pruning = and_(Sweep.pruner.is_not(None), at_rung.where(is_training))
    query = select(Sweep.id).where(or_(needs_run, has_ended_run, needs_pruning))
    return list(session.scalars(query.order_by(Sweep.id)))


def under_way(session: Session, sweep: Sweep) -> list[tuple[Trial, Run]]:
    """List the open trials with their runs, in order."""
    query = select(Trial, Run).join(Run, Run.id == Trial.run_id)
    query = query.where(Trial.sweep_id == sweep.id, Trial.state == OPEN).order_by(Trial.number)
    return [(trial, run) for trial, run in session.execute(query)]


def report(session: Session, sweep: Sweep, trial: Trial, value: float) -> None:
    """Record a trial's value at its rung; the caller must hold the sweep's lock."""
    sweep.revision += 1
    rung = {"rung": trial.next_rung, "value": value, "turn": sweep.revision}
    trial.reports = [*trial.reports, rung]
    pruner = sweep.pruner or {}
    if pruner["kind"] == HYPERBAND:
        trial.next_rung *= pruner["factor"]
    else:
        trial.next_rung += max(pruner["first"], trial.next_rung // SPARSE_RUNGS)
    session.flush()


def all_trials(session: Session, sweep: Sweep) -> list[Trial]:
    """List all trials of a sweep, in order."""
    query = select(Trial).where(Trial.sweep_id == sweep.id).order_by(Trial.number)
    return list(session.scalars(query))


def settle(session: Session, sweep: Sweep) -> int:
    """Record the results of ended trials; return the number of open ones.

    The caller must hold the sweep's lock. A run that the sweep cancelled is a pruned trial; one
    that did not finish, applied no step, diverged, or did not log the metric is a failed one. A
    run that an agent has, and that has not finished, is not: its point may be given back.
    """
    rows = under_way(session, sweep)
    ended = [
        (trial, run)
        for trial, run in rows
        if run.status in ENDED
        and (
            trial.lease_expires_at is None
            or run.status == Status.FINISHED
            or sweep.status == CANCELLED
        )
    ]
    _record(session, sweep, ended)
    return len(rows) - len(ended)


def revalue(session: Session, sweep: Sweep) -> None:
    """Record the results of all ended trials again, after a change of the sweep's metric.

    The caller must hold the sweep's lock.
    """
    query = select(Trial, Run).join(Run, Run.id == Trial.run_id)
    query = query.where(Trial.sweep_id == sweep.id, Trial.state.in_((COMPLETE, PRUNED, LOST)))
    rows = [(trial, run) for trial, run in session.execute(query)]
    for trial, _run in rows:
        trial.reports = []  # of the previous metric
    _record(session, sweep, rows)


def _record(session: Session, sweep: Sweep, ended: list[tuple[Trial, Run]]) -> None:
    finished = [run for _trial, run in ended if run.status == Status.FINISHED]
    applied = runs.count_applied_of(session, finished)
    sound = [run for run in finished if run_outcome(run, applied[run.id]) is None]
    pruned = [run for _trial, run in ended if run_outcome(run, 0) == "pruned"]
    results = values(session, sweep.metric, sound + pruned)
    for trial, run in ended:
        trial.value = results.get(run.id)
        state = PRUNED if run in pruned else COMPLETE
        trial.state = LOST if trial.value is None else state
    sweep.revision += len(ended)
    session.flush()


def own_metrics(session: Session, sweep_id: int) -> list[str]:
    """List metrics that the newest runs of a sweep logged."""
    return _metrics(session, Run.id.in_(select(Trial.run_id).where(Trial.sweep_id == sweep_id)))


def earlier_metrics(session: Session, recipe: str, line: str) -> list[str]:
    """List metrics that recent runs of a recipe, or of a command line, logged."""
    if not (recipe or line):
        return []
    first = session.scalar(select(func.max(Run.id))) or 0
    is_same = Run.recipe == recipe if recipe else Run.command["line"].as_string() == line
    return _metrics(session, Run.id > first - RECENT_RUNS, is_same)


def _metrics(session: Session, *conditions: ColumnElement[bool]) -> list[str]:
    has_logged = or_(Run.step > 0, exists().where(LatestMetric.run_id == Run.id))
    query = select(Run).where(*conditions, has_logged).order_by(Run.id.desc()).limit(NEWEST_RUNS)
    newest = session.scalars(query).all()
    page = latest_metrics.page_of_names(session, [run.id for run in newest], limit=MOST_METRICS)
    return [LOSS] * any(run.own_steps for run in newest) + [n for n in page.names if n != LOSS]


def add(session: Session, sweep: Sweep, run: Run, params: JsonObject) -> Trial:
    """Add a run as the next trial; the caller must hold the sweep's lock."""
    sweep.submitted += 1
    sweep.revision += 1
    trial = Trial(
        sweep_id=sweep.id,
        number=sweep.submitted,
        run_id=run.id,
        params=params,
        state=OPEN,
        next_rung=(sweep.pruner or {}).get("first", 1),
    )
    session.add(trial)
    session.flush()
    return trial


def retry_failed(session: Session, sweep: Sweep) -> None:
    """Let the points of failed trials wait to be run again; the caller holds the sweep's lock."""
    query = select(Trial).where(Trial.sweep_id == sweep.id, Trial.state == LOST)
    for trial in session.scalars(query):
        trial.state, trial.reports, trial.pruned_step = WAITING, [], None
        trial.next_rung = (sweep.pruner or {}).get("first", 1)
    sweep.revision += 1
    session.flush()


def waiting(session: Session, sweep: Sweep, *, limit: int) -> list[Trial]:
    """List the first trials whose points wait to be run again."""
    query = select(Trial).where(Trial.sweep_id == sweep.id, Trial.state == WAITING)
    return list(session.scalars(query.order_by(Trial.number).limit(limit)))


def run_again(session: Session, sweep: Sweep, trial: Trial, run: Run) -> None:
    """Give the point of a waiting trial to another run; the caller holds the sweep's lock."""
    trial.run_id, trial.state = run.id, OPEN
    sweep.revision += 1
    session.flush()


def cancel(session: Session, sweep_id: int, user: User) -> Sweep:
    """Cancel a sweep and its unended runs. Idempotent. Raises Conflict if it is finished."""
    sweep = get(session, sweep_id, lock=True)
    if status(sweep, tallies(session, [sweep])[sweep.id]) == FINISHED:
        raise Conflict(f"Sweep {sweep_id} is already finished and cannot be cancelled.")
    _change(sweep, CANCELLED)
    query = select(Trial.run_id).where(Trial.sweep_id == sweep_id, Trial.state == OPEN)
    # In order of ids, like all locks of runs, to avoid deadlocks.
    for run_id in session.scalars(query.order_by(Trial.run_id)).all():
        if runs.get(session, run_id, lock=True).status not in ENDED:
            run_control.cancel(session, run_id, user)
    return sweep


def pause(session: Session, sweep_id: int) -> Sweep:
    """Stop submitting runs until the sweep is resumed; submitted runs continue."""
    sweep = get(session, sweep_id, lock=True)
    if sweep.status not in (RUNNING, PAUSED):
        text = f"Sweep {sweep_id} is {sweep.status}: only a running one can be paused."
        raise Conflict(text)
    _change(sweep, PAUSED)
    return sweep


def resume(sweep: Sweep) -> None:
    """Resume submitting runs after a pause or a failure. sweep: locked. Raises Conflict."""
    if sweep.status not in (PAUSED, FAILED):
        text = f"Sweep {sweep.id} is {sweep.status}: only a paused or failed one can be resumed."
        raise Conflict(text)
    sweep.error = None
    _change(sweep, RUNNING)


def fail(session: Session, sweep_id: int, error: str) -> None:
    """Stop submitting runs because of an error, which the sweep's page shows."""
    sweep = get(session, sweep_id, lock=True)
    if sweep.status == RUNNING:
        sweep.error = error[:ERROR_CHARACTERS]
        _change(sweep, FAILED)


def mark(session: Session, sweep_id: int) -> str:
    """Return a marker that changes with the sweep's page: the revisions of sweep and open runs."""
    under_way = select(func.coalesce(func.sum(Run.revision), 0))
    under_way = under_way.join(Trial, Trial.run_id == Run.id)
    under_way = under_way.where(Trial.sweep_id == sweep_id, Trial.state == OPEN)
    query = select(Sweep.revision, under_way.scalar_subquery()).where(Sweep.id == sweep_id)
    row = session.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"There is no sweep {sweep_id}.")
    return f"{row[0]}.{row[1]}"


def _change(sweep: Sweep, status: str) -> None:
    if sweep.status != status:
        sweep.status = status
        sweep.revision += 1
