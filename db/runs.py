"""Runs from the side of the people who submit them: submit, look, ask for a stop."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from db.database import now
from db.errors import Conflict, Invalid, NotFound
from db.tables import ACTIVE, ENDED, Checkpoint, Diagnosis, Request, Run, RunStatus, Status, User

#: The powers of two that fp32, the scale's own type, holds in full; so it does their reciprocals.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
#: A training exists that can obey a request at its next step boundary.
OBEYING = (Status.STARTING, Status.RUNNING)


def submit(
    session: Session,
    *,
    recipe: str,
    config: dict[str, Any],
    owner: User,
    name: str = "",
    tags: str = "",
    priority: int = 0,
    devices_per_node: int = 1,
    after_id: int | None = None,
    parent_id: int | None = None,
    parent_step: int | None = None,
) -> Run:
    """Queue a run behind the others of its priority. The configuration must be valid already.

    after_id: it does not start before that run has ended.
    parent_id, parent_step: it starts from that checkpoint, and counts its steps on from there.
    Raises Invalid for a run or a checkpoint that there is not.
    """
    if after_id is not None and session.get(Run, after_id) is None:
        raise Invalid({"after_id": f"there is no run {after_id}"})
    if parent_id is not None:
        _check_parent(session, recipe, config, parent_id, parent_step)
    run = Run(
        name=name or f"{recipe}-{config['precision']}",
        recipe=recipe,
        config=config,
        precision=config["precision"],
        tags=tags,
        priority=priority,
        devices_per_node=devices_per_node,
        after_id=after_id,
        parent_id=parent_id,
        parent_step=parent_step,
        owner_id=owner.id,
        steps_total=config["training"]["steps"],
        position=session.scalar(select(func.coalesce(func.max(Run.position), 0.0) + 1.0)),
    )
    session.add(run)
    session.flush()
    set_status(session, run, Status.QUEUED, reason=f"submitted by {owner.name}")
    return run


def _check_parent(
    session: Session, recipe: str, config: dict[str, Any], parent_id: int, parent_step: int | None
) -> None:
    """See that a run can start from another's checkpoint. Raises Invalid."""
    steps = session.scalars(
        select(Checkpoint.step)
        .where(Checkpoint.run_id == parent_id, Checkpoint.kind == "checkpoint")
        .order_by(Checkpoint.step)
    ).all()
    if parent_step not in steps:
        has = f"has them at {', '.join(map(str, steps))}" if steps else "has none"
        message = f"there is no checkpoint at step {parent_step}; run {parent_id} {has}"
        raise Invalid({"parent_step": message})
    if (of := get(session, parent_id).recipe) != recipe:
        raise Invalid({"recipe": f"{recipe} cannot start from a checkpoint of {of}"})
    if config["training"]["steps"] <= parent_step:
        message = f"{config['training']['steps']} is not beyond the checkpoint's step {parent_step}"
        raise Invalid({"config.training.steps": message})


def get(session: Session, run_id: int, *, lock: bool = False) -> Run:
    """Return a run, locked against other writers if asked for. Raises NotFound."""
    run = session.get(Run, run_id, with_for_update=lock or None)
    if run is None:
        raise NotFound(f"There is no run {run_id}.")
    return run


def newest(
    session: Session,
    *,
    status: str = "",
    text: str = "",
    before: int | None = None,
    limit: int = 50,
) -> list[tuple[Run, str]]:
    """List runs with their owners' names, newest first.

    status: one status, or "active"; text: in name, recipe, precision, tags or owner; before: a run
    id, to page.
    """
    query = select(Run, User.name).join(User, User.id == Run.owner_id).order_by(Run.id.desc())
    if status == "active":
        query = query.where(Run.status.in_((Status.QUEUED, *ACTIVE)))
    elif status:
        query = query.where(Run.status == status)
    if text:
        columns = (Run.name, Run.recipe, Run.precision, Run.tags, User.name)
        query = query.where(or_(*(column.icontains(text, autoescape=True) for column in columns)))
    if before is not None:
        query = query.where(Run.id < before)
    return [(run, owner) for run, owner in session.execute(query.limit(limit))]


def owned(session: Session, run_ids: Collection[int]) -> list[tuple[Run, str]]:
    """Return runs with their owners' names, newest first; ids that there are not are left out."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id)
    query = query.where(Run.id.in_(run_ids)).order_by(Run.id.desc())
    return [(run, owner) for run, owner in session.execute(query)]


def get_owned(session: Session, run_id: int) -> tuple[Run, str]:
    """Return a run with its owner's name. Raises NotFound."""
    run = get(session, run_id)
    return run, session.get_one(User, run.owner_id).name


def forks(session: Session, run_id: int) -> list[Run]:
    """List the runs that started from a checkpoint of this one, oldest first."""
    return list(session.scalars(select(Run).where(Run.parent_id == run_id).order_by(Run.id)))


def newest_id(session: Session) -> int:
    """Return the id of the newest run, 0 if there is none."""
    return session.scalar(select(func.max(Run.id))) or 0


def statuses(session: Session, run_id: int) -> list[RunStatus]:
    """Return the history of a run's status, oldest first."""
    query = select(RunStatus).where(RunStatus.run_id == run_id).order_by(RunStatus.id)
    return list(session.scalars(query))


def applied(session: Session, run: Run) -> int:
    """Return how many of a run's own steps changed the weights: not skipped, or retried in fp32."""
    retried = 0
    if run.config.get("scaler", {}).get("retry_in_fp32"):
        query = select(func.count()).where(Diagnosis.run_id == run.id, Diagnosis.kind == "retry")
        # The spool brings a retry before its step.
        query = query.where(Diagnosis.content["applied"].as_boolean(), Diagnosis.step <= run.step)
        retried = session.scalar(query) or 0
    return run.own_steps - run.skipped + retried


def cancel(session: Session, run_id: int, user: User) -> Run:
    """End a run: at once if it waits, with a last checkpoint if it trains.

    Asked again, as by who had no answer in time, it changes nothing. Raises Conflict if it has
    ended.
    """
    run = get(session, run_id, lock=True)
    if run.status in ENDED:
        raise Conflict(f"Run {run_id} is {run.status} already, so it cannot be cancelled.")
    if run.wanted in ("cancel", "kill"):
        return run
    run.wanted = "cancel"
    run.stop_reason = f"cancelled by {user.name}"
    if run.status in ACTIVE:
        set_status(session, run, Status.STOPPING, reason=run.stop_reason)
    else:
        set_status(session, run, Status.CANCELLED, reason=run.stop_reason)
    return run


def kill(session: Session, run_id: int, user: User) -> Run:
    """End a training run at once: what it did since its last checkpoint is lost.

    Raises Conflict if it does not train.
    """
    run = get(session, run_id, lock=True)
    if run.status not in ACTIVE:
        raise Conflict(f"Run {run_id} is {run.status}: only one that trains can be killed.")
    if run.wanted != "kill":
        run.wanted, run.stop_reason = "kill", f"killed by {user.name}"
        set_status(session, run, Status.STOPPING, reason=run.stop_reason)
    return run


def pause(session: Session, run_id: int, user: User) -> Run:
    """Hold a run: a waiting one keeps out of the queue, a training one leaves a checkpoint first.

    Raises Conflict if it is neither.
    """
    run = get(session, run_id, lock=True)
    if run.status not in (Status.QUEUED, *OBEYING):
        raise Conflict(f"Run {run_id} is {run.status}: only a queued or running one can be paused.")
    run.wanted = "pause"
    run.stop_reason = f"paused by {user.name}"
    waiting = run.status == Status.QUEUED
    set_status(session, run, Status.PAUSED if waiting else Status.PAUSING, reason=run.stop_reason)
    return run


def resume(session: Session, run_id: int, user: User) -> Run:
    """Queue a paused run again, at its old place. Raises Conflict if it is not paused."""
    run = get(session, run_id, lock=True)
    if run.status != Status.PAUSED:
        raise Conflict(f"Run {run_id} is {run.status}: only a paused one can be resumed.")
    run.wanted = "run"
    run.stop_reason = None
    set_status(session, run, Status.QUEUED, reason=f"resumed by {user.name}")
    return run


def set_priority(session: Session, run_id: int, priority: int) -> Run:
    """Change a queued run's priority; higher starts sooner. Raises Conflict if it has started."""
    run = get(session, run_id, lock=True)
    if run.status not in (Status.QUEUED, Status.PAUSED):
        raise Conflict(f"Run {run_id} is {run.status}: its priority no longer matters.")
    run.priority = priority
    run.revision += 1
    return run


def move(session: Session, run_id: int, before_id: int) -> Run:
    """Put a waiting run before another one in the queue, at that one's priority.

    Raises Conflict if one of them does not wait.
    """
    run, other = get(session, run_id, lock=True), get(session, before_id, lock=True)
    for each in (run, other):
        if each.status != Status.QUEUED:
            raise Conflict(f"Run {each.id} is {each.status}: only queued ones have a place.")
    ahead = select(func.max(Run.position)).where(
        Run.priority == other.priority, Run.position < other.position, Run.id != run.id
    )
    previous = session.scalar(ahead)
    gap = 1.0 if previous is None else other.position - previous
    run.priority, run.position = other.priority, other.position - gap / 2
    run.revision += 1
    return run


def move_to_front(session: Session, run_id: int) -> Run:
    """Put a waiting run before all others. Raises Conflict if it does not wait."""
    waiting = select(Run.id).where(Run.status == Status.QUEUED)
    first = session.scalar(waiting.order_by(Run.priority.desc(), Run.position).limit(1))
    return get(session, run_id) if first == run_id else move(session, run_id, first or run_id)


def request_checkpoint(session: Session, run_id: int, user: User) -> Request:
    """Ask for a checkpoint at the next step. Raises Conflict if the run does not train."""
    _obeying(session, run_id, "save a checkpoint")
    return _request(session, run_id, user, "checkpoint")


def request_scale(session: Session, run_id: int, user: User, scale: float) -> Request:
    """Ask to go on with another loss scale. Raises Conflict, or Invalid if it makes no sense."""
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise Invalid({"scale": f"{scale:g}; allowed: 2^-126 to 2^127"})
    run = _obeying(session, run_id, "change its scale")
    if run.precision != "fp16":
        raise Conflict(f"Run {run_id} trains in {run.precision}, which has no loss scale.")
    if not run.config.get("scaler", {}).get("enabled", True):
        raise Conflict(f"Run {run_id} trains with scaler.enabled false: it has no loss scale.")
    return _request(session, run_id, user, "scale", scale)


def request_replay(session: Session, run_id: int, user: User, step: int) -> Request:
    """Ask to replay the batch of a step. Raises Conflict, or Invalid if there is no such step."""
    run = _obeying(session, run_id, "replay a step")
    first = (run.parent_step or 0) + 1  # a fork may see other batches than its parent saw
    if not first <= step <= run.steps_total:
        raise Invalid({"step": f"{step}; allowed: {first} to {run.steps_total}"})
    return _request(session, run_id, user, "replay", step)


def _obeying(session: Session, run_id: int, what: str) -> Run:
    run = get(session, run_id, lock=True)
    if run.status not in OBEYING:
        raise Conflict(f"Run {run_id} is {run.status}: only a running one can {what}.")
    return run


def _request(
    session: Session, run_id: int, user: User, kind: str, value: float | None = None
) -> Request:
    request = Request(run_id=run_id, user_id=user.id, kind=kind, value=value)
    session.add(request)
    session.flush()
    return request


def set_status(
    session: Session,
    run: Run,
    status: Status,
    *,
    reason: str | None = None,
    fault: str | None = None,
) -> None:
    """Change a run's status and write down when and why."""
    run.status = status
    run.revision = (run.revision or 0) + 1
    if status in ENDED:
        run.ended_at = session.scalar(select(now()))
    session.add(
        RunStatus(run_id=run.id, attempt=run.attempt, status=status, reason=reason, fault=fault)
    )
    session.flush()
