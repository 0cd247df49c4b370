"""The queue from the workers' side: start, lease and end of attempts.

Every write names the attempt."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from db import clock
from db.clock import now
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
from db.telemetry import metric_block_writer, step_block_writer
from db.terminal_codes import without_codes


@dataclass(frozen=True)
class DesiredState:
    """The desired state and pending control requests of an attempt."""

    # run, pause, preempt, cancel, or kill, which is a cancel that does not wait.
    desired_state: str
    requests: tuple[ControlRequest, ...] = ()  # not acknowledged yet, in order


#: Bound of a reason and an error, which a run may have written.
MOST_CHARACTERS = 200_000


def list_queued(session: Session) -> list[int]:
    """Return the ids of the runs in the queue, in no order."""
    return list(session.scalars(select(Run.id).where(Run.status == Status.QUEUED)))


def is_queued(session: Session, run_id: int) -> bool:
    """Return whether a run is queued."""
    return session.scalar(select(Run.status).where(Run.id == run_id)) == Status.QUEUED


def fail_unclaimable(session: Session, run_id: int, reason: str) -> None:
    """Fail a queued run that cannot be claimed, without reading its row, which may be broken."""
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
    """Return a node of an attempt; by default node 0, which records."""
    return session.get_one(RunNode, (run_id, attempt, number))


def active_runs(session: Session) -> list[int]:
    """Return the runs with an attempt."""
    return list(session.scalars(select(Run.id).where(Run.status.in_(ACTIVE))))


def nodes_of_worker(session: Session, worker_id: int) -> list[RunNode]:
    """Return a worker's active nodes, to adopt them after a restart."""
    query = select(RunNode).where(RunNode.worker_id == worker_id, RunNode.ended_at.is_(None))
    return list(session.scalars(query))


def seconds_since_start(session: Session, run: Run) -> float:
    """Return the seconds since a run's first start; 0 if it has not started."""
    moment = clock.current(session)
    if run.started_at is None:
        run.started_at = moment
    return moment - run.started_at


def seconds_in_training(session: Session, run_id: int) -> float:
    """Return the training time of all attempts of a run, killed ones included."""
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
    """Record that the training has started, and at which step. Raises StaleAttempt."""
    run = lock_active_attempt(session, run_id, attempt)
    run.resumed_step = node(session, run_id, attempt).resumed_step = resumed_step
    if run.status in (Status.STARTING, Status.UNREACHABLE):
        runs.set_status(session, run, Status.RUNNING, reason=reason)


def run_command(session: Session, run_id: int, attempt: int) -> None:
    """Record that a command runs; it may never report a step. Raises StaleAttempt."""
    run = lock_active_attempt(session, run_id, attempt)
    if run.status in (Status.STARTING, Status.UNREACHABLE):
        runs.set_status(session, run, Status.RUNNING)


def renew(
    session: Session, run_id: int, attempt: int, lease_seconds: float, number: int = 0
) -> DesiredState:
    """Renew a node's lease; return the desired state and requests. Raises StaleAttempt."""
    run = lock_active_attempt(session, run_id, attempt)
    node(session, run_id, attempt, number).lease_expires_at = now() + lease_seconds
    if run.status == Status.UNREACHABLE and not _is_silent(session, run):
        back = {"run": Status.RUNNING, "pause": Status.PAUSING, "preempt": Status.PAUSING}.get(
            run.desired_state, Status.STOPPING
        )
        runs.set_status(session, run, back, reason="its supervisor is back")
    pending = select(ControlRequest).where(
        ControlRequest.run_id == run_id, ControlRequest.acknowledged_at.is_(None)
    )
    return DesiredState(
        run.desired_state, tuple(session.scalars(pending.order_by(ControlRequest.id)))
    )


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
    """Close an attempt. Status QUEUED returns the run to its old position.

    reason, error: may contain output of the script; terminal codes are removed.
    Raises StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    step_block_writer.join_tail(session.connection(), run_id)
    metric_block_writer.end_tail(session.connection(), run_id)
    reason, error = (text and without_codes(text)[:MOST_CHARACTERS] for text in (reason, error))
    if status in (Status.QUEUED, Status.PAUSED) and run.desired_state in ("cancel", "kill"):
        status = Status.CANCELLED
        if run.desired_state == "kill":  # the user requested it
            reason = failure_kind = None
    elif status == Status.QUEUED and run.desired_state == "pause":
        status = Status.PAUSED
    elif status == Status.QUEUED and run.desired_state == "preempt":
        run.desired_state = "run"
        reason = reason if failure_kind else run.stop_reason
    run.error = error
    run.worker_id = None if status == Status.QUEUED else run.worker_id
    unended = (RunNode.attempt == attempt) & RunNode.ended_at.is_(None)
    session.execute(update(RunNode).where(RunNode.run_id == run_id, unended).values(ended_at=now()))
    if status in (Status.CANCELLED, Status.PAUSED):  # other ends were not requested
        reason = reason or run.stop_reason
    if (
        status == Status.CANCELLED
        and run.desired_state == "cancel"
        and _was_pruned(session, run_id)
    ):
        failure_kind = SWEEP
    runs.set_status(session, run, status, reason=reason, failure_kind=failure_kind)


def _was_pruned(session: Session, run_id: int) -> bool:
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
    """Close a killed attempt: queue the run again, or fail it after too many attempts.

    log: details of the death, for the error of a failed run. Raises StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    has_stalled = run.step <= node(session, run_id, attempt).step_before
    run.stalled_attempts = run.stalled_attempts + 1 if has_stalled else 0
    run.killed_attempts += run.desired_state not in ("cancel", "kill")
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
    """Return whether another attempt on this worker repeats the steps after `step` exactly.

    It does not if another worker made them, or if the scale was set by hand.
    """
    workers_so_far = select(RunNode.worker_id).where(RunNode.run_id == run_id).distinct()
    set_by_hand = exists().where(
        ScalerEvent.run_id == run_id, ScalerEvent.kind == "set", ScalerEvent.step > after
    )
    return len(session.scalars(workers_so_far).all()) == 1 and not session.scalar(
        select(set_by_hand)
    )


def mark_unreachable(session: Session, expired_before: Collection[int]) -> set[int]:
    """Return active runs with an expired lease; mark those `unreachable` that expired before.

    One check is not enough: a lease that expired in an outage, or by a jump of SQLite's clock, is
    renewed within a second.
    """
    silent = (RunNode.run_id == Run.id) & (RunNode.attempt == Run.attempt)
    silent &= RunNode.ended_at.is_(None) & (RunNode.lease_expires_at < now())
    lost = select(Run).where(Run.status.in_(ACTIVE), exists().where(silent))
    rows = session.scalars(lost.with_for_update(skip_locked=True)).all()
    for run in rows:
        if run.status != Status.UNREACHABLE and run.id in expired_before:
            reason = "its supervisor has not reported for a whole lease"
            runs.set_status(
                session, run, Status.UNREACHABLE, reason=reason, failure_kind="infrastructure"
            )
    return {run.id for run in rows}


def requeue_unreachable(session: Session, run_ids: Collection[int]) -> list[int]:
    """Queue unreachable runs again if none of their nodes can still train; return their ids.

    Only for a caller that has reached the database for a whole lease.
    """
    alive = (RunNode.run_id == Run.id) & (RunNode.attempt == Run.attempt)
    alive &= RunNode.ended_at.is_(None) & (RunNode.lease_expires_at >= now())
    gone = select(Run).where(
        Run.id.in_(run_ids), Run.status == Status.UNREACHABLE, ~exists().where(alive)
    )
    rows = session.scalars(gone.with_for_update(skip_locked=True)).all()
    for run in rows:
        reason = "queued again after its lease expired"
        end(
            session,
            run.id,
            run.attempt,
            Status.QUEUED,
            reason=reason,
            failure_kind="infrastructure",
        )
    return [run.id for run in rows]


def lock_active_attempt(session: Session, run_id: int, attempt: int) -> Run:
    """Lock and return the run if this attempt is the current one: the fence of every write.

    Raises StaleAttempt.
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
