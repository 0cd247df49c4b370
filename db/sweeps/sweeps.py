"""Sweeps: runs that try points of a space of settings, how far they are, and what is asked of them.

A trial is a row whose key is its sweep and its number, and whoever adds one holds the sweep's row:
so no point is submitted twice, however many servers look after it, and a kill loses nothing.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, bindparam, exists, func, or_, select
from sqlalchemy.orm import Session

from db.errors import Conflict, NotFound
from db.queue import run_control
from db.runs import runs
from db.runs.outcomes import ending
from db.tables import ENDED, Metric, Run, Status, Step, Sweep, Trial, User
from db.telemetry import latest_metrics

RUNNING, PAUSED, CANCELLED, FAILED = "running", "paused", "cancelled", "failed"
#: What a sweep is called whose every run has ended.
FINISHED = "finished"
OPEN, COMPLETE, PRUNED, LOST = "open", "complete", "pruned", "failed"
MINIMISE, MAXIMISE = "minimise", "maximise"
#: Of a sweep, that it gives up runs that fall behind, as app.sweeps.hyperband has it.
HYPERBAND = "hyperband"
LOSS = "loss"
LARGEST = 1.7976931348623157e308  # finite number
ERROR_CHARACTERS = 1000
#: Of a run's steps; in these parts a trial's rungs are counted.
RUNGS_WHOLE, RUNG_FACTOR = 27, 3


@dataclass(frozen=True)
class Tally:
    """How many trials of a sweep are open, complete, pruned and failed; the best complete value."""

    open: int = 0
    complete: int = 0
    pruned: int = 0
    failed: int = 0
    best: float | None = None


def get(session: Session, sweep_id: int, *, lock: bool = False) -> Sweep:
    """Return a sweep, locked against other writers, and as it is then, if asked for.

    Raises NotFound.
    """
    query = select(Sweep).where(Sweep.id == sweep_id)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    found = session.scalar(query)
    if found is None:
        raise NotFound(f"There is no sweep {sweep_id}.")
    return found


def newest(
    session: Session, *, before: int | None = None, limit: int = 50
) -> list[tuple[Sweep, str, Tally]]:
    """List sweeps with their owners' names, newest first. before: an id, to page."""
    query = select(Sweep, User.name).join(User, User.id == Sweep.owner_id)
    if before is not None:
        query = query.where(Sweep.id < before)
    rows = session.execute(query.order_by(Sweep.id.desc()).limit(limit)).all()
    found = tallies(session, [sweep for sweep, _owner in rows])
    return [(sweep, owner, found[sweep.id]) for sweep, owner in rows]


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
            counts[sweep_id]["best"] = lowest if goals[sweep_id] == MINIMISE else highest
    return {sweep_id: Tally(**each) for sweep_id, each in counts.items()}


def status(sweep: Sweep, tally: Tally) -> str:
    """Return where a sweep is, in one word."""
    is_over = sweep.submitted >= sweep.runs_total and not tally.open
    return FINISHED if sweep.status == RUNNING and is_over else sweep.status


def of_run(session: Session, run_id: int) -> Trial | None:
    """Return the trial that a run is, if it is one."""
    return session.scalar(_OF_RUN, {"run_id": run_id})


_OF_RUN = select(Trial).where(Trial.run_id == bindparam("run_id"))


def params(session: Session, sweep_id: int) -> list[dict[str, Any]]:
    """Return what all trials of a sweep have tried, in order."""
    query = select(Trial.params).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
    return list(session.scalars(query))


def trials(
    session: Session, sweep: Sweep, *, best_first: bool = False, after: int = 0, limit: int
) -> list[tuple[Trial, Run]]:
    """List trials with their runs: newest first, or the best of the complete ones first, then
    those that were pruned, and those without a value last.

    after: how many of them to leave out.
    """
    value = Trial.value.asc() if sweep.goal == MINIMISE else Trial.value.desc()
    best = (Trial.state == PRUNED, value.nulls_last(), Trial.number)
    order = best if best_first else (Trial.number.desc(),)
    query = select(Trial, Run).join(Run, Run.id == Trial.run_id)
    query = query.where(Trial.sweep_id == sweep.id).order_by(*order).offset(after).limit(limit)
    return [(trial, run) for trial, run in session.execute(query)]


def values(session: Session, metric: str, some_runs: Collection[Run]) -> dict[int, float]:
    """Return the last value of a metric, or of the loss, of each run where it is finite.

    Of a run without steps of its own the loss is what its script logs by that name.
    """
    told = latest_metrics.points(session, [run.id for run in some_runs], [metric])
    last = {run_id: found[metric].value for run_id, found in told.items() if found}
    if metric == LOSS:
        last |= {run.id: run.loss for run in some_runs if run.own_steps}
    return {
        run_id: value
        for run_id, value in last.items()
        if value is not None and math.isfinite(value)
    }


def value_from(session: Session, metric: str, run_id: int, step: int) -> float | None:
    """Return the first finite value of a metric, or of the loss, from a step on."""
    table: type[Step | Metric] = Step if metric == LOSS else Metric
    value = Step.loss if metric == LOSS else Metric.value
    query = select(value).where(table.run_id == run_id, table.step >= step)
    query = query.where(func.abs(value) <= LARGEST)
    if metric != LOSS:
        query = query.where(Metric.name == metric)
    return session.scalar(query.order_by(table.step).limit(1))


def due(session: Session) -> list[int]:
    """Return the sweeps that have something to be done: a run to submit, one that has ended, or one
    that has come to its next rung.
    """
    open_trials = select(func.count()).join_from(Trial, Run, Run.id == Trial.run_id)
    open_trials = open_trials.where(Trial.sweep_id == Sweep.id, Trial.state == OPEN)
    is_wanting = and_(
        Sweep.status == RUNNING,
        Sweep.submitted < Sweep.runs_total,
        open_trials.correlate(Sweep).scalar_subquery() < Sweep.at_once,
    )
    has_ended = (Trial.sweep_id == Sweep.id, Trial.state == OPEN, Run.status.in_(ENDED))
    told = exists().where(*has_ended, Run.id == Trial.run_id)
    climbing = (Trial.sweep_id == Sweep.id, Trial.state == OPEN, Trial.pruned_step.is_(None))
    has_come = Run.step * RUNGS_WHOLE >= Run.steps_total * Trial.next_rung
    climbed = exists().where(*climbing, Run.id == Trial.run_id, Run.steps_total > 0, has_come)
    is_judging = and_(Sweep.kind == HYPERBAND, climbed)
    query = select(Sweep.id).where(or_(is_wanting, told, is_judging))
    return list(session.scalars(query.order_by(Sweep.id)))


def under_way(session: Session, sweep: Sweep) -> list[tuple[Trial, Run]]:
    """List the trials whose end is not written down yet, with their runs, in order."""
    query = select(Trial, Run).join(Run, Run.id == Trial.run_id)
    query = query.where(Trial.sweep_id == sweep.id, Trial.state == OPEN).order_by(Trial.number)
    return [(trial, run) for trial, run in session.execute(query)]


def report(session: Session, sweep: Sweep, trial: Trial, value: float) -> None:
    """Write down what a trial came to at its rung; the caller holds the sweep."""
    sweep.revision += 1
    said = {"rung": trial.next_rung, "value": value, "turn": sweep.revision}
    trial.reports = [*trial.reports, said]
    trial.next_rung *= RUNG_FACTOR
    session.flush()


def all_trials(session: Session, sweep: Sweep) -> list[Trial]:
    """List all trials of a sweep, in order."""
    query = select(Trial).where(Trial.sweep_id == sweep.id).order_by(Trial.number)
    return list(session.scalars(query))


def settle(session: Session, sweep: Sweep) -> int:
    """Write down what became of the trials that have ended; return how many are open still.

    The caller holds the sweep. A run that the sweep gave up is a pruned trial; one that did not
    finish, applied nothing, diverged, or never told of the metric is a failed one.
    """
    rows = under_way(session, sweep)
    ended = [(trial, run) for trial, run in rows if run.status in ENDED]
    finished = [run for _trial, run in ended if run.status == Status.FINISHED]
    applied = runs.applied_of(session, finished)
    sound = [run for run in finished if ending(run, applied[run.id]) is None]
    given_up = [run for _trial, run in ended if ending(run, 0) == "pruned"]
    found = values(session, sweep.metric, sound + given_up)
    for trial, run in ended:
        trial.value = found.get(run.id)
        how = PRUNED if run in given_up else COMPLETE
        trial.state = LOST if trial.value is None else how
        sweep.revision += 1
    session.flush()
    return len(rows) - len(ended)


def add(session: Session, sweep: Sweep, run: Run, params: dict[str, Any]) -> Trial:
    """Make a run the next trial; the caller holds the sweep."""
    sweep.submitted += 1
    sweep.revision += 1
    trial = Trial(
        sweep_id=sweep.id, number=sweep.submitted, run_id=run.id, params=params, state=OPEN
    )
    session.add(trial)
    session.flush()
    return trial


def cancel(session: Session, sweep_id: int, user: User) -> Sweep:
    """Submit no more, and cancel what waits or trains. Asked again, it changes nothing."""
    sweep = get(session, sweep_id, lock=True)
    if status(sweep, tallies(session, [sweep])[sweep.id]) == FINISHED:
        raise Conflict(f"Sweep {sweep_id} is finished already, so it cannot be cancelled.")
    _change(sweep, CANCELLED)
    query = select(Trial.run_id).where(Trial.sweep_id == sweep_id, Trial.state == OPEN)
    # By id, as everybody locks runs: two that lock in other orders would wait for each other.
    for run_id in session.scalars(query.order_by(Trial.run_id)).all():
        if runs.get(session, run_id, lock=True).status not in ENDED:
            run_control.cancel(session, run_id, user)
    return sweep


def pause(session: Session, sweep_id: int) -> Sweep:
    """Submit no more runs until it is resumed; those that are under way go on."""
    sweep = get(session, sweep_id, lock=True)
    if sweep.status not in (RUNNING, PAUSED):
        text = f"Sweep {sweep_id} is {sweep.status}: only a running one can be paused."
        raise Conflict(text)
    _change(sweep, PAUSED)
    return sweep


def resume(sweep: Sweep) -> None:
    """Go on submitting runs, after a pause or a fault. sweep: locked. Raises Conflict."""
    if sweep.status not in (PAUSED, FAILED):
        text = f"Sweep {sweep.id} is {sweep.status}: only a paused or failed one can be resumed."
        raise Conflict(text)
    sweep.error = None
    _change(sweep, RUNNING)


def fail(session: Session, sweep_id: int, error: str) -> None:
    """Submit no more runs, for a reason that its page tells."""
    sweep = get(session, sweep_id, lock=True)
    if sweep.status == RUNNING:
        sweep.error = error[:ERROR_CHARACTERS]
        _change(sweep, FAILED)


def mark(session: Session, sweep_id: int) -> str:
    """Return what differs once its page would: its revision, and those of the runs under way."""
    under_way = select(func.coalesce(func.sum(Run.revision), 0))
    under_way = under_way.join(Trial, Trial.run_id == Run.id)
    under_way = under_way.where(Trial.sweep_id == sweep_id, Trial.state == OPEN)
    query = select(Sweep.revision, under_way.scalar_subquery()).where(Sweep.id == sweep_id)
    found = session.execute(query).one_or_none()
    if found is None:
        raise NotFound(f"There is no sweep {sweep_id}.")
    return f"{found[0]}.{found[1]}"


def _change(sweep: Sweep, status: str) -> None:
    if sweep.status != status:
        sweep.status = status
        sweep.revision += 1
