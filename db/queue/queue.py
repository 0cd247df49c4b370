"""Runs from the side of the workers: start, lease, end. Every write names the attempt."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from db.database import now
from db.errors import StaleAttempt
from db.runs import runs
from db.runs.outcomes import SWEEP
from db.tables import (
    ACTIVE,
    ControlRequest,
    Run,
    RunNode,
    RunStatus,
    ScalerEvent,
    Status,
    Trial,
)


@dataclass(frozen=True)
class Wishes:
    """What people want of a running attempt."""

    desired_state: str  # run, pause, cancel, or kill, which is a cancel that does not wait
    requests: tuple[ControlRequest, ...] = ()  # not told to be obeyed, in order


def queued(session: Session) -> list[int]:
    """Return the ids of the runs in the queue, in no order."""
    return list(session.scalars(select(Run.id).where(Run.status == Status.QUEUED)))


def is_queued(session: Session, run_id: int) -> bool:
    """Tell whether a run waits in the queue."""
    return session.scalar(select(Run.status).where(Run.id == run_id)) == Status.QUEUED


def set_aside(session: Session, run_id: int, reason: str) -> None:
    """Fail a queued run that cannot be claimed; reads nothing of it, which may be what fails."""
    failed = update(Run).where(Run.id == run_id, Run.status == Status.QUEUED)
    attempt = session.scalar(
        failed.values(
            status=Status.FAILED, error=reason, revision=Run.revision + 1, ended_at=now()
        ).returning(Run.attempt)
    )
    if attempt is not None:
        change = {"run_id": run_id, "attempt": attempt, "status": Status.FAILED}
        session.add(RunStatus(**change, reason=reason, failure_kind="settings"))


def node(session: Session, run_id: int, attempt: int, number: int = 0) -> RunNode:
    """Return a node of an attempt: the one that records, unless told otherwise."""
    return session.get_one(RunNode, (run_id, attempt, number))


def nodes_of_worker(session: Session, worker_id: int) -> list[RunNode]:
    """Return a worker's nodes that have not ended, to be found again after a restart."""
    query = select(RunNode).where(RunNode.worker_id == worker_id, RunNode.ended_at.is_(None))
    return list(session.scalars(query))


def seconds_since_start(session: Session, run: Run) -> float:
    """Return how long ago a run was first started, which is now if it was not."""
    moment = session.scalars(select(now())).one()
    if run.started_at is None:
        run.started_at = moment
    return moment - run.started_at


def seconds_in_training(session: Session, run_id: int) -> float:
    """Return how long the attempts of a run have trained so far, those that were killed too."""
    query = select(RunStatus.status, RunStatus.time).where(RunStatus.run_id == run_id)
    changes = session.execute(query.order_by(RunStatus.id)).all()
    return sum(
        max(until - since, 0.0)
        for (status, since), (_next, until) in pairwise(changes)
        if status in (Status.RUNNING, Status.PAUSING, Status.STOPPING)
    )


def start(
    session: Session,
    run_id: int,
    attempt: int,
    *,
    resumed_step: int = 0,
    reason: str | None = None,
) -> None:
    """Say that the training makes steps, from which one on. Raises Fenced."""
    run = held(session, run_id, attempt)
    run.resumed_step = node(session, run_id, attempt).resumed_step = resumed_step
    if run.status in (Status.STARTING, Status.UNREACHABLE):
        runs.set_status(session, run, Status.RUNNING, reason=reason)


def run_command(session: Session, run_id: int, attempt: int) -> None:
    """Say that a command runs, which may never tell of a step. Raises Fenced."""
    run = held(session, run_id, attempt)
    if run.status in (Status.STARTING, Status.UNREACHABLE):
        runs.set_status(session, run, Status.RUNNING)


def renew(
    session: Session, run_id: int, attempt: int, lease_seconds: float, number: int = 0
) -> Wishes:
    """Extend a node's lease and return what people want of the attempt. Raises Fenced."""
    run = held(session, run_id, attempt)
    node(session, run_id, attempt, number).lease_expires_at = now() + lease_seconds
    if run.status == Status.UNREACHABLE and not _is_silent(session, run):
        back = {"run": Status.RUNNING, "pause": Status.PAUSING}.get(
            run.desired_state, Status.STOPPING
        )
        runs.set_status(session, run, back, reason="its supervisor is back")
    pending = select(ControlRequest).where(
        ControlRequest.run_id == run_id, ControlRequest.acknowledged_at.is_(None)
    )
    return Wishes(run.desired_state, tuple(session.scalars(pending.order_by(ControlRequest.id))))


def _is_silent(session: Session, run: Run) -> bool:
    session.flush()
    silent = RunNode.ended_at.is_(None) & (RunNode.lease_expires_at < now())
    of_attempt = (RunNode.run_id == run.id) & (RunNode.attempt == run.attempt)
    return session.scalar(select(RunNode.node).where(of_attempt, silent).limit(1)) is not None


def end(
    session: Session,
    run_id: int,
    attempt: int,
    status: Status,
    *,
    reason: str | None = None,
    error: str | None = None,
    failure_kind: str | None = None,
) -> None:
    """Close an attempt. status QUEUED puts the run back at its old place. Raises Fenced."""
    run = held(session, run_id, attempt)
    if status in (Status.QUEUED, Status.PAUSED) and run.desired_state in ("cancel", "kill"):
        status = Status.CANCELLED
        if run.desired_state == "kill":  # how it died is what a person wished
            reason = failure_kind = None
    elif status == Status.QUEUED and run.desired_state == "pause":
        status = Status.PAUSED
    run.error = error
    run.worker_id = None if status == Status.QUEUED else run.worker_id
    unended = (RunNode.attempt == attempt) & RunNode.ended_at.is_(None)
    session.execute(update(RunNode).where(RunNode.run_id == run_id, unended).values(ended_at=now()))
    if status in (Status.CANCELLED, Status.PAUSED):  # any other end was not what a person wished
        reason = reason or run.stop_reason
    if (
        status == Status.CANCELLED
        and run.desired_state == "cancel"
        and _was_given_up(session, run_id)
    ):
        failure_kind = SWEEP
    runs.set_status(session, run, status, reason=reason, failure_kind=failure_kind)


def _was_given_up(session: Session, run_id: int) -> bool:
    query = select(Trial.pruned_step).where(Trial.run_id == run_id)
    return session.scalar(query) is not None


def end_killed(
    session: Session,
    run_id: int,
    attempt: int,
    *,
    reason: str,
    max_attempts: int,
    max_stalled_attempts: int,
    log: str = "",
) -> Status:
    """Close an attempt that was killed: queue the run again, or fail it if that leads nowhere.

    log: what is known of the death, for the error of a run that fails. Raises Fenced.
    """
    run = held(session, run_id, attempt)
    has_stalled = run.step <= node(session, run_id, attempt).step_before
    run.stalled_attempts = run.stalled_attempts + 1 if has_stalled else 0
    run.killed_attempts += 1
    error, status = None, Status.QUEUED
    if run.desired_state != "run":
        pass  # it was to end anyway
    elif run.killed_attempts >= max_attempts:
        error = f"{reason}; {run.killed_attempts} attempts were killed, as many as are allowed"
    elif run.stalled_attempts >= max_stalled_attempts:
        error = f"{reason}; {run.stalled_attempts} attempts in a row made no new step"
    if error:
        status, reason, error = Status.FAILED, error, f"{log}\n{error}".strip()
    end(session, run_id, attempt, status, reason=reason, error=error, failure_kind="infrastructure")
    return run.status


def is_repeatable(session: Session, run_id: int, *, after: int) -> bool:
    """Tell whether an attempt on the same worker makes the same of the steps after one.

    It does not if they were made by another worker, or with a scale that somebody set by hand.
    """
    workers_so_far = select(RunNode.worker_id).where(RunNode.run_id == run_id).distinct()
    set_by_hand = exists().where(
        ScalerEvent.run_id == run_id, ScalerEvent.kind == "set", ScalerEvent.step > after
    )
    return len(session.scalars(workers_so_far).all()) == 1 and not session.scalar(
        select(set_by_hand)
    )


def mark_unreachable(session: Session, found_before: Collection[int]) -> set[int]:
    """Find active runs that have a node whose lease ran out; mark those that were found before.

    One look is not enough: a lease that ran out in an outage, or in a jump of the clock that SQLite
    takes from its machine, is renewed within a second.
    """
    silent = (RunNode.run_id == Run.id) & (RunNode.attempt == Run.attempt)
    silent &= RunNode.ended_at.is_(None) & (RunNode.lease_expires_at < now())
    lost = select(Run).where(Run.status.in_(ACTIVE), exists().where(silent))
    found = session.scalars(lost.with_for_update(skip_locked=True)).all()
    for run in found:
        if run.status != Status.UNREACHABLE and run.id in found_before:
            reason = "its supervisor has not been heard of for a whole lease"
            runs.set_status(
                session, run, Status.UNREACHABLE, reason=reason, failure_kind="infrastructure"
            )
    return {run.id for run in found}


def requeue_unreachable(session: Session, run_ids: Collection[int]) -> list[int]:
    """Queue these runs again if no node of theirs may still train; return the ids of those.

    Only for a caller that has reached the database for a whole lease: an outage is no death.
    """
    alive = (RunNode.run_id == Run.id) & (RunNode.attempt == Run.attempt)
    alive &= RunNode.ended_at.is_(None) & (RunNode.lease_expires_at >= now())
    gone = select(Run).where(
        Run.id.in_(run_ids), Run.status == Status.UNREACHABLE, ~exists().where(alive)
    )
    found = session.scalars(gone.with_for_update(skip_locked=True)).all()
    for run in found:
        reason = "queued again after its lease ran out"
        end(
            session,
            run.id,
            run.attempt,
            Status.QUEUED,
            reason=reason,
            failure_kind="infrastructure",
        )
    return [run.id for run in found]


def held(session: Session, run_id: int, attempt: int) -> Run:
    """Lock and return the run if this attempt still holds it: the fence of every write.

    Raises Fenced.
    """
    run = session.scalar(
        select(Run)
        .where(Run.id == run_id, Run.attempt == attempt, Run.status.in_(ACTIVE))
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if run is None:
        raise StaleAttempt
    return run
