"""Runs from the side of the people who submit them: submit, look, ask for a stop."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.orm import Session

from db import notifications, pyramid, rights, run_settings
from db.conditions import Compared, Filter, Has, Order, seconds_until
from db.database import now
from db.endings import SWEEP
from db.errors import Conflict, InTheBin, Invalid, NotFound
from db.scales import in_words
from db.tables import (
    ACTIVE,
    COMMAND,
    ENDED,
    RECIPE,
    WATCH,
    Checkpoint,
    Diagnosis,
    Request,
    Run,
    RunNode,
    RunStatus,
    Status,
    User,
)

#: The powers of two that fp32, the scale's own type, holds in full; so it does their reciprocals.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
#: A training exists that can obey a request at its next step boundary.
OBEYING = (Status.STARTING, Status.RUNNING)
#: An uploader calls every few seconds; one that has not for so long is told of.
SILENCE_SECONDS = 30.0
#: Neither in the bin nor erased: all that lists, searches and groups show.
KEPT = Run.deleted_at.is_(None)
IN_THE_BIN = "Run {} was deleted. It is in the bin, from where it can be restored."
GONE = "Run {} was deleted for good."


def submit(
    session: Session,
    *,
    recipe: str,
    config: dict[str, Any],
    owner: User,
    name: str = "",
    tags: str = "",
    project: str = "",
    priority: int = 0,
    nodes: int = 1,
    devices_per_node: int = 1,
    expected_seconds: float | None = None,
    after_id: int | None = None,
    parent_id: int | None = None,
    parent_step: int | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a run behind the others of its priority. The configuration must be valid already.

    after_id: it does not start before that run has ended.
    parent_id, parent_step: it starts from that checkpoint, and counts its steps on from there.
    Raises Invalid for a run or a checkpoint that there is not.
    """
    if after_id is not None:
        check_is_kept(session.get(Run, after_id), "after_id", after_id)
    if parent_id is not None:
        _check_parent(session, recipe, config, parent_id, parent_step)
    run = Run(
        name=name or f"{recipe}-{config['precision']}",
        recipe=recipe,
        config=config,
        precision=config["precision"],
        tags=tags,
        project=project,
        priority=priority,
        nodes=nodes,
        devices_per_node=devices_per_node,
        expected_seconds=expected_seconds,
        after_id=after_id,
        parent_id=parent_id,
        parent_step=parent_step,
        idempotency_key=idempotency_key,
        steps_total=config["training"]["steps"],
    )
    _queue(session, run, owner)
    if parent_id is not None:
        _show_fork(session, parent_id, parent_step)
    return run


def submit_command(
    session: Session,
    *,
    command: dict[str, Any],
    config: dict[str, Any],
    owner: User,
    name: str,
    tags: str = "",
    project: str = "",
    priority: int = 0,
    devices_per_node: int = 1,
    after_id: int | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a command behind the others of its priority; it must be valid already.

    command, config: as the table of runs describes them.  after_id: as above. Raises Invalid.
    """
    if after_id is not None:
        check_is_kept(session.get(Run, after_id), "after_id", after_id)
    run = Run(
        name=name,
        source=COMMAND,
        recipe="",
        command=command,
        config=config,
        precision="",
        tags=tags,
        project=project,
        priority=priority,
        devices_per_node=devices_per_node,
        after_id=after_id,
        idempotency_key=idempotency_key,
        steps_total=0,
    )
    _queue(session, run, owner)
    return run


def _queue(session: Session, run: Run, owner: User) -> None:
    run.owner_id = owner.id
    run.position = session.scalars(select(func.coalesce(func.max(Run.position), 0.0) + 1.0)).one()
    session.add(run)
    session.flush()
    run_settings.note(session, run)
    set_status(session, run, Status.QUEUED, reason=f"submitted by {owner.name}")


def _check_parent(
    session: Session, recipe: str, config: dict[str, Any], parent_id: int, parent_step: int | None
) -> None:
    """See that a run can start from another's checkpoint. Raises Invalid."""
    parent = check_is_kept(session.get(Run, parent_id), "parent_id", parent_id)
    steps = session.scalars(
        select(Checkpoint.step)
        .where(Checkpoint.run_id == parent_id, Checkpoint.kind == "checkpoint")
        .order_by(Checkpoint.step)
    ).all()
    if parent_step not in steps:
        has = f"has them at {', '.join(map(str, steps))}" if steps else "has none"
        message = f"there is no checkpoint at step {parent_step}; run {parent_id} {has}"
        raise Invalid({"parent_step": message})
    check_has_recipe(parent, "be started from")
    if (of := parent.recipe) != recipe:
        raise Invalid({"recipe": f"{recipe} cannot start from a checkpoint of {of}"})
    if config["training"]["steps"] <= parent_step:
        message = f"{config['training']['steps']} is not beyond the checkpoint's step {parent_step}"
        raise Invalid({"config.training.steps": message})


def _show_fork(session: Session, parent_id: int, parent_step: int | None) -> None:
    """Let the parent's pages show the new run beside the checkpoint that it starts from."""
    parent = get(session, parent_id, lock=True)
    parent.revision += 1
    parent.files_revision = parent.revision
    at = (Checkpoint.run_id == parent_id, Checkpoint.step == parent_step)
    shown = update(Checkpoint).where(*at).values(revision=parent.revision)
    if session.execute(shown.returning(Checkpoint.id)).first() is None:  # deleted since the check
        raise Invalid({"parent_step": f"there is no checkpoint at step {parent_step} any more"})


def check_is_kept(run: Run | None, field: str, run_id: int) -> Run:
    """Return a run that another is to refer to. Raises Invalid, naming the field, if it is gone."""
    if run is None or run.erasing:
        raise Invalid({field: f"there is no run {run_id}"})
    if run.deleted_at is not None:
        raise Invalid({field: f"run {run_id} is in the bin; allowed: a run that is not deleted"})
    return run


def check_is_ours(run: Run, what: str) -> None:
    """See that a run's training is one that Halfstep started. Raises Conflict."""
    if run.source == WATCH:
        text = f"Run {run.id} is watched: Halfstep does not train it, so that it cannot {what}."
        raise Conflict(text)


def check_has_recipe(run: Run, what: str) -> None:
    """See that a run's loop is Halfstep's own. Raises Conflict."""
    check_is_ours(run, what)
    if run.source != RECIPE:
        raise Conflict(f"Run {run.id} is a command: its loop is its own, so that it cannot {what}.")


def get(session: Session, run_id: int, *, lock: bool = False) -> Run:
    """Return a run, locked against other writers if asked for. Raises NotFound, if deleted too."""
    run = session.get(Run, run_id, with_for_update=lock or None)
    if run is None:
        raise NotFound(f"There is no run {run_id}.")
    if run.deleted_at is not None:
        raise NotFound(GONE.format(run_id)) if run.erasing else InTheBin(IN_THE_BIN.format(run_id))
    return run


def newest(
    session: Session,
    *,
    conditions: Filter = (),
    sort: str = "-id",
    before: int | None = None,
    limit: int = 50,
) -> list[tuple[Run, str]]:
    """List runs with their owners' names, newest first if not told otherwise.

    conditions: all of them hold.  sort: one of ORDERS, or the name of a setting or metric,
    downwards with "-" before it.  before: a run id, to page: those that come after it.
    """
    order = Order.of(session, sort)
    query = _matching(select(Run.id), conditions, order)
    if before is not None:
        last, keys = _keys_of(session, before, order), tuple_(*order.keys)
        if last is None:
            return []
        query = query.where(keys < tuple_(*last) if order.falls else keys > tuple_(*last))
    return _read(session, session.scalars(_ordered(query, order).limit(limit)).all())


def newest_and_count(
    session: Session,
    *,
    conditions: Filter = (),
    sort: str = "-id",
    before: int | None = None,
    limit: int = 50,
) -> tuple[list[tuple[Run, str]], int]:
    """List as `newest` does, and count the runs of all its pages.

    A first page is filtered once for both. Without a filter all runs are counted by an index, and
    the newest of them are read without a look at the others.
    """
    if before is not None or not conditions:
        rows = newest(session, conditions=conditions, sort=sort, before=before, limit=limit)
        return rows, count(session, conditions)
    order = Order.of(session, sort)
    query = _matching(select(Run.id, func.count().over()), conditions, order)
    found = session.execute(_ordered(query, order).limit(limit)).all()
    return _read(session, [run_id for run_id, _total in found]), found[0][1] if found else 0


def count(session: Session, conditions: Filter = ()) -> int:
    """Count the runs that `newest` would list, page by page."""
    return session.scalar(_matching(select(func.count()), conditions)) or 0


def stored_bytes(session: Session) -> int:
    """Return what the files of all runs take in the store, those in the bin left out."""
    return int(session.scalar(select(func.sum(Run.stored_bytes)).where(KEPT)) or 0)


def _read(session: Session, run_ids: Sequence[int]) -> list[tuple[Run, str]]:
    """Read runs in this order. Their rows are long: only those that are shown are."""
    rows = {run.id: (run, owner) for run, owner in with_owners(session, run_ids)}
    return [rows[run_id] for run_id in run_ids]


def _ordered(query: Any, order: Order) -> Any:
    return query.order_by(*(key.desc() if order.falls else key for key in order.keys))


def _keys_of(session: Session, run_id: int, order: Order) -> Sequence[Any] | None:
    """Return what a run is compared by; by its id also one that is gone."""
    if len(order.keys) == 1:
        return (run_id,)
    of_run = _joined(select(*order.keys), order).where(Run.id == run_id)
    return session.execute(of_run).one_or_none()


def _matching(query: Any, conditions: Filter, order: Order | None = None) -> Any:
    # SQLite asks in this order: what reads other tables comes last, for fewer runs.
    terms = sorted(conditions, key=lambda term: isinstance(term.condition, Has | Compared))
    return _joined(query, order).where(KEPT, *(term.sql() for term in terms))


def _joined(query: Any, order: Order | None) -> Any:
    query = query.select_from(Run)
    return order.joined_to(query) if order else query


def with_owners(session: Session, run_ids: Collection[int]) -> list[tuple[Run, str]]:
    """Return runs with their owners' names, newest first; ids that there are not are left out."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id)
    query = query.where(Run.id.in_(run_ids), KEPT).order_by(Run.id.desc())
    return [(run, owner) for run, owner in session.execute(query)]


def get_with_owner(session: Session, run_id: int) -> tuple[Run, str]:
    """Return a run with its owner's name. Raises NotFound."""
    run = get(session, run_id)
    return run, session.get_one(User, run.owner_id).name


def forks(session: Session, run_id: int) -> list[Run]:
    """List the runs that started from a checkpoint of this one, oldest first."""
    query = select(Run).where(Run.parent_id == run_id, KEPT)
    return list(session.scalars(query.order_by(Run.id)))


def newest_id(session: Session) -> int:
    """Return the id of the newest run, 0 if there is none."""
    return session.scalar(select(func.max(Run.id)).where(KEPT)) or 0


def state(session: Session, run_id: int) -> tuple[int, Status, int]:
    """Return a run's revision and status, and for how long there was no news of it.

    Raises NotFound.
    """
    query = select(Run.revision, Run.status, Run.heard_at, now().label("moment"))
    found = session.execute(query.where(Run.id == run_id)).one_or_none()
    if found is None:
        raise NotFound(f"There is no run {run_id}.")
    return found.revision, found.status, silent_seconds(found, found.moment)


def silent_seconds(run: Any, moment: float) -> int:
    """Return for how long a watched run was not heard of, 0 while it is, or need not be.

    It is rounded as people would, so that a page that tells it need not change all the time.
    """
    if run.heard_at is None or run.status != Status.RUNNING:
        return 0
    seconds = moment - run.heard_at
    if seconds < SILENCE_SECONDS:
        return 0
    unit = next(unit for most, unit in ((120, 10), (7200, 60), (math.inf, 3600)) if seconds < most)
    return int(seconds // unit * unit)


def newest_and_now(session: Session) -> tuple[int, float]:
    """Return the id of the newest run, 0 if there is none, and the database's time."""
    query = select(func.coalesce(func.max(Run.id), 0), now()).where(KEPT)
    newest, moment = session.execute(query).one()
    return newest, moment


def durations(session: Session, run_ids: Collection[int], moment: float) -> dict[int, float | None]:
    """Return for how many seconds runs have gone on, pauses left out; None before the start."""
    query = select(Run.id, seconds_until(moment)).where(Run.id.in_(run_ids))
    return {row[0]: row[1] for row in session.execute(query)}


def ends(session: Session, run_ids: Collection[int]) -> list[tuple[float, int]]:
    """Return when those of these runs ended that have, and their numbers."""
    query = select(Run.ended_at, Run.id).where(Run.id.in_(run_ids), Run.status.in_(ENDED))
    return [(ended_at or 0.0, run_id) for ended_at, run_id in session.execute(query)]


def statuses(session: Session, run_id: int) -> list[RunStatus]:
    """Return the history of a run's status, oldest first."""
    query = select(RunStatus).where(RunStatus.run_id == run_id).order_by(RunStatus.id)
    return list(session.scalars(query))


def last_change(session: Session, run_id: int) -> RunStatus | None:
    """Return when and why a run's status became what it is; remarks may have followed."""
    mine = RunStatus.run_id == run_id
    status = select(Run.status).where(Run.id == run_id).scalar_subquery()
    before = select(func.max(RunStatus.id)).where(mine, RunStatus.status != status)
    since = select(RunStatus).where(mine, RunStatus.id > func.coalesce(before.scalar_subquery(), 0))
    return session.scalar(since.order_by(RunStatus.id).limit(1))


def applied(session: Session, run: Run) -> int:
    """Return how many of a run's own steps changed the weights: not skipped, or retried in fp32."""
    return applied_of(session, [run])[run.id]


def applied_of(session: Session, some_runs: Collection[Run]) -> dict[int, int]:
    """Return it of each run, in one query."""
    retrying = [run.id for run in some_runs if run.settings.get("scaler", {}).get("retry_in_fp32")]
    retried: dict[int, int] = {}
    if retrying:
        query = select(Diagnosis.run_id, func.count()).join(Run, Run.id == Diagnosis.run_id)
        query = query.where(Diagnosis.run_id.in_(retrying), Diagnosis.kind == "retry")
        # The spool brings a retry before its step.
        query = query.where(Diagnosis.content["applied"].as_boolean(), Diagnosis.step <= Run.step)
        rows = session.execute(query.group_by(Diagnosis.run_id))
        retried = {row[0]: row[1] for row in rows}
    return {run.id: run.own_steps - run.skipped + retried.get(run.id, 0) for run in some_runs}


def cancel(session: Session, run_id: int, user: User) -> Run:
    """End a run: at once if it waits, with a last checkpoint if it trains.

    A watched run takes nothing more from its uploader; its process goes on all the same. Asked
    again, as by who had no answer in time, it changes nothing. Raises Conflict if it has ended.
    """
    run = get(session, run_id, lock=True)
    if run.status in ENDED:
        raise Conflict(f"Run {run_id} is {run.status} already, so it cannot be cancelled.")
    if run.wanted in ("cancel", "kill"):
        return run
    run.wanted = "cancel"
    run.stop_reason = f"cancelled by {user.name}"
    if run.source == WATCH:
        node = (RunNode.run_id == run_id, RunNode.attempt == run.attempt)
        session.execute(update(RunNode).where(*node).values(ended_at=now()))
        set_status(session, run, Status.CANCELLED, reason=run.stop_reason)
    elif run.status in ACTIVE:
        set_status(session, run, Status.STOPPING, reason=run.stop_reason)
    else:
        set_status(session, run, Status.CANCELLED, reason=run.stop_reason)
    return run


def give_up(session: Session, run_id: int, reason: str) -> bool:
    """End a training run of a sweep, with a last checkpoint; tell whether there was one to end."""
    run = get(session, run_id, lock=True)
    if run.status not in OBEYING or run.wanted != "run":
        return False
    run.wanted, run.stop_reason = "cancel", reason
    set_status(session, run, Status.STOPPING, reason=reason, fault=SWEEP)
    return True


def kill(session: Session, run_id: int, user: User) -> Run:
    """End a training run at once: what it did since its last checkpoint is lost.

    Raises Conflict if it does not train.
    """
    run = get(session, run_id, lock=True)
    check_is_ours(run, "be killed; it can be cancelled")
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
    if run.status == Status.QUEUED:
        check_is_ours(run, "be paused")
    else:
        check_has_recipe(run, "be paused: it would begin anew; it can be cancelled")
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


def set_priority(session: Session, run_id: int, priority: int, user: User) -> Run:
    """Change a queued run's priority; higher starts sooner. Raises Conflict if it has started."""
    run = get(session, run_id, lock=True)
    if run.status not in (Status.QUEUED, Status.PAUSED):
        raise Conflict(f"Run {run_id} is {run.status}: its priority no longer matters.")
    run.priority = priority
    remark(session, run, f"priority {priority}, by {user.name}")
    return run


def move(session: Session, run_id: int, before_id: int, user: User) -> Run:
    """Put a waiting run before another one in the queue, at that one's priority.

    Raises Conflict if one of them does not wait.
    """
    _make_room(session, before_id)
    locked = {each: get(session, each, lock=True) for each in sorted({run_id, before_id})}
    run, other = locked[run_id], locked[before_id]
    for each in (run, other):
        if each.status != Status.QUEUED:
            raise Conflict(f"Run {each.id} is {each.status}: only queued ones have a place.")
    run.priority, run.position = other.priority, _position_before(session, other, run_id)
    remark(session, run, f"moved before run {before_id}, by {user.name}")
    return run


def _make_room(session: Session, before_id: int) -> None:
    """Number the waiting runs anew if the numbers between two of them have run out.

    A position is halfway between two others, and there are 52 halves in a double.
    """
    other = get(session, before_id)
    if _position_before(session, other) < other.position:
        return
    unended = select(Run).where(Run.status.not_in(ENDED))
    # By id, as everybody locks runs: two that lock in other orders would wait for each other.
    rows = session.scalars(unended.order_by(Run.id).with_for_update()).all()
    for place, row in enumerate(sorted(rows, key=lambda row: (row.position, row.id))):
        row.position = float(place)
    session.flush()


def _position_before(session: Session, other: Run, moved_id: int | None = None) -> float:
    """Return a position before a run and behind the one ahead of it, or its own if there is none.

    moved_id: a run that leaves its place.
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
    """Put a waiting run before all others. Raises Conflict if it does not wait."""
    waiting = select(Run.id).where(Run.status == Status.QUEUED)
    waiting = waiting.order_by(Run.priority.desc(), Run.position, Run.id).limit(1)
    with rights.unlimited(session):  # the first may be of a project that the user does not see
        first = session.scalar(waiting) or run_id
        return get(session, run_id) if first == run_id else move(session, run_id, first, user)


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
    text = f"{user.name} asked for a loss scale of {in_words(scale)} from the next step on"
    set_status(session, run, run.status, reason=text)
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
    check_has_recipe(run, what)
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
    run.status, run.fault = status, fault
    if status != Status.QUEUED:
        run.first_since = run.reservation = None
    if status in ENDED:
        run.ended_at = session.scalar(select(now()))
        pace = pyramid.steps_per_second(session.connection(), run.id)
        run.steps_per_second = pace or run.steps_per_second
    if status not in ACTIVE:
        notifications.tell(session, notifications.ANYBODY)
    remark(session, run, reason, fault=fault)


def remark(session: Session, run: Run, reason: str | None, *, fault: str | None = None) -> None:
    """Write a line into a run's history, with the status that it has."""
    run.revision = (run.revision or 0) + 1
    session.add(
        RunStatus(run_id=run.id, attempt=run.attempt, status=run.status, reason=reason, fault=fault)
    )
    session.flush()
