"""Preemption: which running runs give their devices to a waiting one of higher priority."""

from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.access import accounts
from db.clock import now
from db.database import Database
from db.queue import pending_reasons, preemption, queue, run_control
from db.runs import runs
from db.tables import Project, Run, Status, User, Worker
from tests.db.conftest import submit, submit_command
from tests.db.queue.claims_made import add_workers, claim, finish, nodes

PREEMPTED = (Status.PAUSING, "preempt")


def start(session: Session, owner: User, worker: Worker, **changes: Any) -> Run:
    """Submit a preemptible run, or one with these changes, and claim it."""
    run = submit(session, owner, **({"preemptible": True} | changes))
    assert claim(session, worker, only=run.id) == run
    return run


def preempt(session: Session, **limits: int) -> list[int]:
    """Run the preemption twice; return the preempted runs."""
    for _ in range(2):  # the second time, those that stop are enough
        preemption.preempt(session, **limits)
    stopping = select(Run.id).where(Run.desired_state == "preempt").order_by(Run.id)
    return list(session.scalars(stopping))


def stop(session: Session, run: Run) -> None:
    """End a preempted run's attempt, as its supervisor does."""
    queue.end(session, run.id, run.attempt, Status.QUEUED)


def test_the_lowest_youngest_run_gives_its_device_to_a_higher_one(
    database: Database, ada: User
) -> None:
    """The youngest run of lowest priority is preempted for a higher one, and is queued again."""
    up = add_workers(database, 1, 1, 1, 1)
    with database.writing() as session:
        fixed = {"priority": -9, "preemptible": False}
        kinds: list[dict[str, Any]] = [{"priority": 1}, {}, {}, fixed]
        high, _old, young, _fixed = (
            start(session, ada, worker, **kind) for worker, kind in zip(up, kinds, strict=True)
        )
        first = submit(session, ada, priority=1)
        assert preempt(session) == [young.id]
        assert (young.status, young.desired_state) == PREEMPTED
        assert first.reservation is None  # one device becomes free at once
        run_control.cancel(session, first.id, ada)
        later = submit(session, ada, priority=2)  # it takes the place of the cancelled one
        assert preempt(session) == [young.id]
        stop(session, young)
        assert (young.status, young.desired_state) == (Status.QUEUED, "run")
        last = runs.statuses(session, young.id)[-1]
        assert (last.status, last.reason) == ("queued", f"preempted by run {first.id}")
        read = pending_reasons.Queue.read(session)
        reason = pending_reasons.reason(young, read).text
        assert reason.startswith("1 run is ahead")
        assert reason.endswith(f"; preempted by run {first.id}")
        assert claim(session, up[2]) == later
        finish(session, high)
        assert claim(session, up[0]) == young
        assert (young.attempt, young.stop_reason) == (2, None)


def test_a_run_that_fits_or_is_not_higher_preempts_none(database: Database, ada: User) -> None:
    """A run of equal priority, or one that is not blocked by devices alone, preempts none."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        running = start(session, ada, one)
        submit(session, ada)
        submit(session, ada, priority=5, recipe="other")
        submit(session, ada, priority=5, devices_per_node=2)
        submit(session, ada, priority=5, nodes=3)
        submit(session, ada, priority=5, after_id=running.id)
        large = {"precision": "fp16", "training": {"steps": 1, "device_memory_gib": 99}}
        submit(session, ada, priority=5, config=large)
        submit(session, ada, priority=5)  # it fits on the other worker
        assert preempt(session) == []
        run_control.pause(session, start(session, ada, two, priority=5).id, ada)
        assert preempt(session) == []  # it fits there soon
        submit_command(session, ada, priority=5)  # which no worker here runs
        assert preempt(session) == []
        submit(session, ada, priority=5)
        assert preempt(session) == [running.id]


def test_a_preempted_run_never_preempts_the_one_that_has_its_device(
    database: Database, ada: User
) -> None:
    """A preempted run does not preempt the one that replaced it, while that trains."""
    (one,) = add_workers(database, 1)
    with database.writing() as session:
        low = start(session, ada, one)
        high = submit(session, ada, priority=1, preemptible=True)
        assert preempt(session) == [low.id]
        stop(session, low)
        assert preempt(session) == []  # the device is free
        assert claim(session, one) == high
        assert preempt(session) == []
        finish(session, high)
        assert claim(session, one) == low


def test_a_gang_gets_the_fewest_runs_and_keeps_their_devices(database: Database, ada: User) -> None:
    """A run of two nodes is preempted rather than two of one, and devices that become free go to
    no lower run.
    """
    one, two, three = add_workers(database, 2, 2, 1)
    with database.writing() as session:
        gang = submit(session, ada, nodes=2, devices_per_node=2, preemptible=True, priority=1)
        assert claim(session, one) == gang
        start(session, ada, three)
        higher = submit(session, ada, nodes=2, devices_per_node=2, priority=2)
        assert preempt(session) == [gang.id]
        stop(session, gang)
        assert claim(session, two) == higher
        assert {worker for _node, worker, _devices in nodes(session, higher)} == {one.id, two.id}
        finish(session, higher)
        run_control.cancel(session, gang.id, ada)
        singles = [start(session, ada, worker) for worker in (one, one, two, two)]
        gang = submit(session, ada, nodes=2, devices_per_node=1, priority=3)
        assert preempt(session) == [singles[1].id, singles[3].id]  # of each worker the youngest
        stop(session, singles[1])
        assert claim(session, one, reserve_after_seconds=1e9) is None  # reserved
        stop(session, singles[3])
        assert claim(session, one, reserve_after_seconds=1e9) == gang


def test_limits_hold(database: Database, ada: User) -> None:
    """Runs that a project's or owner's limit holds back preempt none, even if one of two fits."""
    up = add_workers(database, 1, 1, 1)
    with database.writing() as session:
        session.add(Project(name="vision", devices=0))
        running = [start(session, ada, worker) for worker in up]
        submit(session, ada, priority=1, project="vision")
        assert preempt(session) == []
        session.get_one(Project, "vision").devices = 1
        session.flush()
        assert preempt(session, runs_per_user=3) == []
        assert preempt(session, devices_per_user=3) == []
        submit(session, ada, priority=1, project="vision")
        assert preempt(session) == [running[2].id]
        reason = runs.statuses(session, running[2].id)[-1].reason
        assert reason == "preempted by a run of another project"


def test_only_as_many_runs_stop_as_a_limit_per_user_lets_start(
    database: Database, ada: User
) -> None:
    """Only as many runs preempt others as their user's limit allows to start."""
    up = add_workers(database, 1, 1, 1)
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        for worker in up:
            start(session, ada, worker)
        for _ in range(3):
            submit(session, bob, priority=1)
        assert len(preempt(session, runs_per_user=2)) == 2


@pytest.mark.parametrize("act", [run_control.cancel, run_control.kill])
def test_a_run_can_be_cancelled_while_it_is_preempted(
    database: Database, ada: User, act: Any
) -> None:
    """A run cancelled during its preemption is not queued again; a killed attempt is."""
    (one,) = add_workers(database, 1)
    limits = {"max_attempts": 1, "max_stalled_attempts": 1}
    with database.writing() as session:
        low = start(session, ada, one)
        submit(session, ada, priority=1)
        assert preempt(session) == [low.id]
        died = queue.end_killed(session, low.id, 1, reason="its supervisor died", **limits)
        assert (died, low.desired_state) == (Status.QUEUED, "run")
        assert runs.statuses(session, low.id)[-1].reason == "its supervisor died"
        assert claim(session, one, only=low.id) == low
        assert preempt(session) == [low.id]
        act(session, low.id, ada)
        stop(session, low)
        assert low.status == Status.CANCELLED


def test_a_reservation_of_a_run_ahead_is_respected(database: Database, ada: User) -> None:
    """Devices that are reserved for an earlier run do not count for a later one."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        fixed = start(session, ada, one, preemptible=False)
        low = start(session, ada, two)
        gang = submit(session, ada, nodes=2, priority=9)
        gang.reservation = {"since": 0.0, "until": None, "worker_ids": [one.id, two.id]}
        gang.first_since = session.scalar(select(now()))
        submit(session, ada, priority=5)
        assert preempt(session) == []
        finish(session, fixed)
        assert preempt(session) == [low.id]  # by the gang
