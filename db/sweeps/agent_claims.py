"""Points of a sweep that agents take, each by one agent at a time.

A claim is a trial with an agent and a lease, made under the lock of the sweep's row. An agent
renews its lease while its script runs. If it does not, the point is given to the next agent, and
the run of the first one accepts nothing more.
"""

import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy import and_, or_, select, update
from sqlalchemy.orm import Session

from db import clock
from db.clock import now
from db.errors import Conflict
from db.queue import quotas
from db.runs import config_values, runs
from db.runs.outcomes import SWEEP
from db.sweeps import sweeps
from db.tables import ENDED, WATCH, Run, RunNode, Status, Sweep, Trial, User
from halfstep.telemetry.plain_json import JsonObject

#: Duration of a claim without a heartbeat.
LEASE_SECONDS = 60.0
#: How long a run whose script has ended may take to arrive.
ARRIVAL_SECONDS = 600.0
LOST = "its agent stopped responding; the point goes to another agent"
RETURNED = "its agent returned its point"
NOT_WATCHED = "its script did not call halfstep.watch"


def take(
    session: Session,
    sweep: Sweep,
    user: User,
    agent_id: str,
    next_point: Callable[[Session, Sweep], dict[str, Any]],
    config_of: Callable[[Sweep, JsonObject], JsonObject],
    name_of: Callable[[JsonObject], str],
) -> tuple[Trial, Run] | None:
    """Claim a point for an agent: one that was given back, else a new one; None if there is none.

    sweep: locked, of agents.  next_point: chooses a new point.  config_of, name_of: configuration
    and name of a point's run.  Raises Conflict for another sweep.
    """
    if not sweep.is_for_agents:
        raise Conflict(f"The runs of sweep {sweep.id} are queued for workers, not for agents.")
    sweeps.settle(session, sweep)
    if sweep.status != sweeps.RUNNING:
        return None
    trial = _free(session, sweep)
    if trial is None and sweep.submitted >= sweep.runs_total:
        return None
    point = trial.params if trial else next_point(session, sweep)
    run = _new_run(session, sweep, user, config_of(sweep, point), name_of(point))
    if trial is None:
        trial = sweeps.add(session, sweep, run, point)
    else:
        _end(session, trial.run_id, LOST)
        sweeps.run_again(session, sweep, trial, run)
    trial.agent_id = agent_id
    _extend(session, trial, LEASE_SECONDS)
    return trial, run


def _free(session: Session, sweep: Sweep) -> Trial | None:
    """Return the first trial whose lease has expired, or that is to be run again, if any."""
    has_expired = and_(Trial.state == sweeps.OPEN, Trial.lease_expires_at < now())
    is_free = or_(has_expired, Trial.state == sweeps.WAITING)
    query = select(Trial).where(Trial.sweep_id == sweep.id, is_free)
    return session.scalar(query.order_by(Trial.number).limit(1))


def _new_run(session: Session, sweep: Sweep, user: User, config: JsonObject, name: str) -> Run:
    """Create the watched run of a point, which its script's uploader begins."""
    quotas.check_storage(session, sweep.project, 0)
    run = Run(
        name=name,
        source=WATCH,
        watch_id=uuid.uuid4().hex,
        project=sweep.project,
        recipe="",
        precision="",
        config=config,
        tags=sweep.tags,
        owner_id=user.id,
        steps_total=0,
    )
    session.add(run)
    session.flush()
    config_values.note(session, run)
    runs.remark(session, run, f"taken by an agent of {user.name}")
    return run


def renew(session: Session, sweep: Sweep, number: int, agent_id: str) -> bool:
    """Extend an agent's lease; return whether its run goes on: no one has ended it.

    Raises Conflict if another agent has the point, or none.
    """
    trial = _get_own(session, sweep, number, agent_id)
    _extend(session, trial, LEASE_SECONDS)
    run = session.get_one(Run, trial.run_id)
    return sweep.status != sweeps.CANCELLED and run.desired_state == "run"


def finish(
    session: Session, sweep: Sweep, number: int, agent_id: str, *, was_watched: bool
) -> None:
    """Record that the script of a point has ended. Raises Conflict, as `renew` does.

    was_watched: the script's uploader sends the rest, also if it has not begun yet.
    """
    trial = _get_own(session, sweep, number, agent_id)
    run = runs.get(session, trial.run_id, lock=True)
    trial.agent_id, trial.lease_expires_at = None, None
    if run.attempt == 0 and was_watched:
        _extend(session, trial, ARRIVAL_SECONDS)
    elif run.attempt == 0:
        _end(session, run.id, NOT_WATCHED, Status.FAILED)
    sweep.revision += 1
    sweeps.settle(session, sweep)


def give_back(session: Session, sweep: Sweep, number: int, agent_id: str) -> None:
    """Give a point back, for the next agent. Raises Conflict, as `renew` does."""
    trial = _get_own(session, sweep, number, agent_id)
    _end(session, trial.run_id, RETURNED)
    trial.agent_id = None
    _extend(session, trial, -LEASE_SECONDS)
    sweep.revision += 1


def prune(session: Session, trial: Trial, reason: str) -> bool:
    """End the run of a trial, which its agent then stops; return whether it was training."""
    run = session.get_one(Run, trial.run_id, with_for_update=True)
    if run.status in ENDED:
        return False
    _end(session, run.id, reason, failure_kind=SWEEP)
    trial.lease_expires_at = None
    session.flush()
    return True


def keep_run(session: Session, run_id: int) -> None:
    """Keep a run whose script has ended: its upload has begun."""
    mine = (Trial.run_id == run_id, Trial.agent_id.is_(None), Trial.state == sweeps.OPEN)
    session.execute(update(Trial).where(*mine).values(lease_expires_at=None))


def _get_own(session: Session, sweep: Sweep, number: int, agent_id: str) -> Trial:
    trial = session.get(Trial, (sweep.id, number), populate_existing=True)
    if trial is None or trial.agent_id != agent_id:
        text = f"This agent does not have point {number} of sweep {sweep.id}"
        raise Conflict(f"{text}: its lease expired, or it has given it back.")
    return trial


def _extend(session: Session, trial: Trial, seconds: float) -> None:
    trial.lease_expires_at = clock.current(session) + seconds
    session.flush()


def _end(
    session: Session,
    run_id: int,
    reason: str,
    status: Status = Status.CANCELLED,
    failure_kind: str | None = None,
) -> None:
    """End a run that has not ended, so that it accepts nothing more from its uploader."""
    run = session.get_one(Run, run_id, with_for_update=True)
    if run.status in ENDED:
        return
    node = (RunNode.run_id == run_id, RunNode.attempt == run.attempt)
    session.execute(update(RunNode).where(*node).values(ended_at=now()))
    run.stop_reason = reason
    if status == Status.CANCELLED:
        run.desired_state = "cancel"
    else:
        run.error = reason
    runs.set_status(session, run, status, reason=reason, failure_kind=failure_kind)
