"""Run control by users: cancel, kill, pause, resume, queue position, control requests."""

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.orm import Session

from db.access import permissions
from db.clock import now
from db.errors import Conflict, Invalid
from db.runs import runs
from db.runs.outcomes import SWEEP
from db.tables import ACTIVE, ENDED, TRAIN, WATCH, ControlRequest, Run, RunNode, Status, User
from halfstep.number_formats import number
from halfstep.number_formats import scale as scale_text

#: The powers of two that fp32, the scale's own type, holds in full; so it does their reciprocals.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
#: Statuses in which a training applies control requests at its next step boundary.
CONTROLLABLE = (Status.STARTING, Status.RUNNING)


def cancel(session: Session, run_id: int, user: User) -> Run:
    """Cancel a run: at once if it is queued, after a last checkpoint if it trains.

    A watched run accepts nothing more from its uploader; its process continues. Idempotent. Raises
    Conflict if the run has ended.
    """
    run = runs.get(session, run_id, lock=True)
    if run.status in ENDED:
        raise Conflict(f"Run {run_id} is already {run.status} and cannot be cancelled.")
    if run.desired_state in ("cancel", "kill"):
        return run
    run.desired_state = "cancel"
    run.stop_reason = f"cancelled by {user.name}"
    if run.source == WATCH:
        node = (RunNode.run_id == run_id, RunNode.attempt == run.attempt)
        session.execute(update(RunNode).where(*node).values(ended_at=now()))
        runs.set_status(session, run, Status.CANCELLED, reason=run.stop_reason)
    elif run.status in ACTIVE:
        runs.set_status(session, run, Status.STOPPING, reason=run.stop_reason)
    else:
        runs.set_status(session, run, Status.CANCELLED, reason=run.stop_reason)
    return run


def prune(session: Session, run_id: int, reason: str) -> bool:
    """Prune a training run of a sweep, with a last checkpoint; return whether it was training."""
    run = runs.get(session, run_id, lock=True)
    if run.status not in CONTROLLABLE or run.desired_state != "run":
        return False
    run.desired_state, run.stop_reason = "cancel", reason
    runs.set_status(session, run, Status.STOPPING, reason=reason, failure_kind=SWEEP)
    return True


def kill(session: Session, run_id: int, user: User) -> Run:
    """Kill a training run: progress since its last checkpoint is lost.

    Raises Conflict if it is not training.
    """
    run = runs.get(session, run_id, lock=True)
    runs.check_is_ours(run, "be killed; it can be cancelled")
    if run.status not in ACTIVE:
        raise Conflict(f"Run {run_id} is {run.status}: only a running one can be killed.")
    if run.desired_state != "kill":
        run.desired_state, run.stop_reason = "kill", f"killed by {user.name}"
        runs.set_status(session, run, Status.STOPPING, reason=run.stop_reason)
    return run


def pause(session: Session, run_id: int, user: User) -> Run:
    """Pause a run: a queued one leaves the queue, a training one saves a checkpoint first.

    Raises Conflict for other statuses.
    """
    run = runs.get(session, run_id, lock=True)
    if run.status == Status.QUEUED:
        runs.check_is_ours(run, "be paused")
    else:
        runs.check_has_recipe(run, "be paused: it would restart; it can be cancelled")
    if run.status not in (Status.QUEUED, *CONTROLLABLE):
        raise Conflict(f"Run {run_id} is {run.status}: only a queued or running one can be paused.")
    if run.status != Status.QUEUED:
        _check_trains(run, "be paused: it would start again; it can be cancelled")
    run.desired_state = "pause"
    run.stop_reason = f"paused by {user.name}"
    waiting = run.status == Status.QUEUED
    runs.set_status(
        session, run, Status.PAUSED if waiting else Status.PAUSING, reason=run.stop_reason
    )
    return run


def resume(session: Session, run_id: int, user: User) -> Run:
    """Queue a paused run at its old position. Raises Conflict if it is not paused."""
    run = runs.get(session, run_id, lock=True)
    if run.status != Status.PAUSED:
        raise Conflict(f"Run {run_id} is {run.status}: only a paused one can be resumed.")
    run.desired_state = "run"
    run.stop_reason = None
    runs.set_status(session, run, Status.QUEUED, reason=f"resumed by {user.name}")
    return run


def set_priority(session: Session, run_id: int, priority: int, user: User) -> Run:
    """Change a queued run's priority; higher starts sooner. Raises Conflict if it has started."""
    run = runs.get(session, run_id, lock=True)
    if run.status not in (Status.QUEUED, Status.PAUSED):
        raise Conflict(f"Run {run_id} is {run.status}: only a queued or paused one has a priority.")
    run.priority = priority
    runs.remark(session, run, f"priority {priority}, by {user.name}")
    return run


def move(session: Session, run_id: int, before_id: int, user: User) -> Run:
    """Move a queued run before another one, with its priority.

    Raises Conflict if one of them is not queued.
    """
    _make_room(session, before_id)
    locked = {
        locked_id: runs.get(session, locked_id, lock=True)
        for locked_id in sorted({run_id, before_id})
    }
    run, other = locked[run_id], locked[before_id]
    for row in (run, other):
        if row.status != Status.QUEUED:
            raise Conflict(f"Run {row.id} is {row.status}: only queued runs have a position.")
    run.priority, run.position = other.priority, _position_before(session, other, run_id)
    runs.remark(session, run, f"moved before run {before_id}, by {user.name}")
    return run


def _make_room(session: Session, before_id: int) -> None:
    """Renumber the queued runs if there is no number left between two of them.

    A position is halfway between two others; a double can be halved 52 times.
    """
    other = runs.get(session, before_id)
    if _position_before(session, other) < other.position:
        return
    unended = select(Run).where(Run.status.not_in(ENDED))
    # In the order of ids, like all locks of runs, to avoid deadlocks.
    rows = session.scalars(unended.order_by(Run.id).with_for_update()).all()
    for position, row in enumerate(sorted(rows, key=lambda row: (row.position, row.id))):
        row.position = float(position)
    session.flush()


def _position_before(session: Session, other: Run, moved_id: int | None = None) -> float:
    """Return a position between a run and the one ahead of it; its own if no number is left.

    moved_id: the run that is moved.
    """
    same = (Run.priority == other.priority, Run.status.not_in(ENDED))
    others = Run.id.not_in([other.id, moved_id or 0])
    ahead = tuple_(Run.position, Run.id) < tuple_(other.position, other.id)
    previous = session.scalar(select(func.max(Run.position)).where(*same, others, ahead))
    if previous is None:
        return other.position - 1.0
    halfway = (previous + other.position) / 2
    return halfway if previous < halfway < other.position else other.position


def move_to_front(session: Session, run_id: int, user: User) -> Run:
    """Move a queued run to the front. Raises Conflict if it is not queued."""
    waiting = select(Run.id).where(Run.status == Status.QUEUED)
    waiting = waiting.order_by(Run.priority.desc(), Run.position, Run.id).limit(1)
    with permissions.lift_limit(session):  # the first may be of a project that is not visible
        first = session.scalar(waiting) or run_id
        return runs.get(session, run_id) if first == run_id else move(session, run_id, first, user)


def request_checkpoint(session: Session, run_id: int, user: User) -> ControlRequest:
    """Request a checkpoint at the next step. Raises Conflict if the run is not training."""
    _controllable(session, run_id, "save a checkpoint")
    return _request(session, run_id, user, "checkpoint")


def request_scale(session: Session, run_id: int, user: User, scale: float) -> ControlRequest:
    """Request another loss scale. Raises Conflict, Invalid."""
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise Invalid({"scale": f"{number(scale)}; allowed: 2^-126 to 2^127"})
    run = _controllable(session, run_id, "change its scale")
    if run.precision != "fp16":
        raise Conflict(f"Run {run_id} trains in {run.precision}, which has no loss scale.")
    if not run.config.get("scaler", {}).get("enabled", True):
        raise Conflict(f"Run {run_id} trains with scaler.enabled false: it has no loss scale.")
    text = f"{user.name} requested a loss scale of {scale_text(scale)} from the next step on"
    runs.set_status(session, run, run.status, reason=text)
    return _request(session, run_id, user, "scale", scale)


def request_replay(session: Session, run_id: int, user: User, step: int) -> ControlRequest:
    """Request a replay of a step's batch. Raises Conflict, or Invalid if there is no such step."""
    run = _controllable(session, run_id, "replay a step")
    first = (run.parent_step or 0) + 1  # a fork may get other batches than its parent
    if not first <= step <= run.steps_total:
        raise Invalid({"step": f"{step}; allowed: {first} to {run.steps_total}"})
    return _request(session, run_id, user, "replay", step)


def replaying_steps(session: Session, run_id: int) -> set[int]:
    """Return the steps whose replays are requested and not made yet."""
    query = select(ControlRequest.value).where(
        ControlRequest.run_id == run_id,
        ControlRequest.kind == "replay",
        ControlRequest.acknowledged_at.is_(None),
    )
    return {int(step) for step in session.scalars(query) if step is not None}


def request_precision_diff(session: Session, run_id: int, user: User) -> ControlRequest:
    """Request a precision diff of the next step. Raises Conflict if it cannot be made."""
    run = _controllable(session, run_id, "compare precisions")
    if run.precision not in ("fp16", "bf16"):
        raise Conflict(
            f"Run {run_id} trains in {run.precision}: a precision diff compares fp16 or bf16."
        )
    return _request(session, run_id, user, "precision_diff")


def _controllable(session: Session, run_id: int, what: str) -> Run:
    run = runs.get(session, run_id, lock=True)
    runs.check_has_recipe(run, what)
    _check_trains(run, what)
    if run.status not in CONTROLLABLE:
        raise Conflict(f"Run {run_id} is {run.status}: only a running one can {what}.")
    return run


def _check_trains(run: Run, what: str) -> None:
    if run.task != TRAIN:
        raise Conflict(f"Run {run.id} measures and makes no steps: it cannot {what}.")


def _request(
    session: Session, run_id: int, user: User, kind: str, value: float | None = None
) -> ControlRequest:
    request = ControlRequest(run_id=run_id, user_id=user.id, kind=kind, value=value)
    session.add(request)
    session.flush()
    return request
