"""Claims of runs on several nodes: all nodes or none, exclusive devices, and reservations."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.queue import pending_reasons, queue, quotas, reservations, run_control, workers
from db.runs import runs
from db.tables import Project, Run, RunNode, Status, User, Worker
from tests.db.conftest import CPU, DIGITS, is_blocked, submit
from tests.db.queue.claims_made import add_workers, claim, finish, nodes


def why(session: Session, run: Run) -> str:
    """Return the pending reason of a queued run."""
    return pending_reasons.reason(run, pending_reasons.Queue.read(session)).text


def test_a_gang_takes_a_node_of_each_of_several_workers_or_none(
    database: Database, ada: User
) -> None:
    """The claiming worker becomes node 0, and every other node is claimed with a lease, or none."""
    one, two, three = add_workers(database, 2, 2, 4)
    with database.writing() as session:
        node_group = submit(session, ada, nodes=3, devices_per_node=2)
        busy = submit(session, ada, priority=1)
        assert claim(session, one) == busy
        assert claim(session, two) is None  # one of the three has no room
        assert nodes(session, busy) == [(0, one.id, [0])]
        finish(session, busy)
        assert claim(session, two) == node_group
        assert nodes(session, node_group) == [
            (0, two.id, [0, 1]),
            (1, one.id, [0, 1]),
            (2, three.id, [0, 1]),
        ]
        assert (node_group.status, node_group.attempt, node_group.worker_id) == (
            Status.STARTING,
            1,
            two.id,
        )
        assert [node.node for node in queue.nodes_of_worker(session, three.id)] == [2]
        alive = select(RunNode).where(RunNode.lease_expires_at > now())
        assert len(session.scalars(alive).all()) == 4
        submit(session, ada, devices_per_node=2)
        assert claim(session, one) is None  # it knows of nothing there, the database does
        assert nodes(session, claim(session, three)) == [(0, three.id, [2, 3])]


@pytest.mark.parametrize(
    "lacking",
    [
        {"torch": "2.12.0"},
        {"memory_bytes": 2**30},
        {"fp16": False},
        {"recipes": ["other"]},
        {"seen_at": 0.0},
        {"stopped_at": 1.0},
    ],
    ids=str,
)
def test_a_gang_is_of_workers_that_can_train_it_together(
    database: Database, ada: User, lacking: dict[str, Any]
) -> None:
    """Runs on several nodes use only live workers with equal torch, the recipe, precision and
    memory.
    """
    (one,) = add_workers(database, 1)
    values = {name: value for name, value in lacking.items() if name in ("seen_at", "stopped_at")}
    torch = lacking.get("torch", "2.13.0")
    device = {name: value for name, value in lacking.items() if name in CPU}
    (two,) = add_workers(database, 1, torch=torch, prefix="v", **device)
    with database.writing() as session:
        if "recipes" in lacking:
            workers.offer(session, two.id, [{**DIGITS, "name": "other"}])
        if values:
            session.execute(update(Worker).where(Worker.id == two.id).values(**values))
        config = {"precision": "fp16", "training": {"steps": 1, "device_memory_gib": 4}}
        submit(session, ada, nodes=2, config=config)
        assert claim(session, one) is None
        (three,) = add_workers_in(session)
        assert claim(session, three) is not None


def test_a_gang_is_of_workers_that_offer_different_things_too(
    database: Database, ada: User
) -> None:
    """A run on several nodes may combine workers that offer different recipes."""
    one, two = add_workers(database, 1, 1)
    (three,) = add_workers(database, 2, prefix="v", memory_bytes=2.0**40)
    with database.writing() as session:
        workers.offer(session, two.id, [{**DIGITS, "name": "other"}, DIGITS])
        run = submit(session, ada, nodes=3)
        assert claim(session, two) is not None
        assert {worker for _node, worker, _devices in nodes(session, run)} == {
            *(one.id, two.id, three.id)
        }


def add_workers_in(session: Session) -> list[Worker]:
    """Register a worker in the test's own transaction."""
    offer = {"devices": [CPU], "recipes": [DIGITS], "versions": {"torch": "2.13.0"}}
    return [workers.register(session, name="u", host="u", pid=1, **offer)]


def test_a_gang_has_its_turn_by_priority_and_holds_as_any_run(
    database: Database, ada: User
) -> None:
    """A run on several nodes follows priority, after_id and limits, and a later run may pass it."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        first = submit(session, ada)
        node_group = submit(session, ada, nodes=2, after_id=first.id, priority=9)
        assert claim(session, one) == first
        assert claim(session, two) is None
        finish(session, first)
        passed = submit(session, ada, priority=10)
        assert claim(session, two, runs_per_user=1) == passed
        finish(session, passed)
        assert claim(session, one, runs_per_user=1, only=first.id) is None
        assert claim(session, one, runs_per_user=1) == node_group
        submit(session, ada, nodes=2)
        assert claim(session, one, runs_per_user=1) is None


def test_what_comes_free_is_kept_for_a_gang_that_waited(database: Database, ada: User) -> None:
    """After a delay devices are reserved for a waiting run of several nodes; later runs get the
    rest.
    """
    one, two, three, four = up = add_workers(database, 2, 2, 2, 2)
    with database.writing() as session:
        small = [submit(session, ada) for _ in range(8)]
        for worker in (*up, *up):
            assert claim(session, worker) in small
        node_group = submit(session, ada, nodes=3)
        later = submit(session, ada)
        finish(session, small[0])
        assert claim(session, one, reserve_after_seconds=1e9) == later  # it has not waited yet
        session.refresh(node_group)
        assert node_group.first_since is not None
        finish(session, later)
        later = submit(session, ada)
        assert claim(session, one, reserve_after_seconds=0) is None
        session.refresh(node_group)
        assert node_group.reservation is not None
        assert node_group.reservation["until"] is None  # the ends of these are unknown
        assert node_group.reservation["worker_ids"] == [one.id, two.id, three.id]
        finish(session, small[4])
        assert claim(session, one, reserve_after_seconds=1e9) == later  # two are free, it needs one
        finish(session, small[3])
        other = submit(session, ada)
        assert (
            claim(session, four, reserve_after_seconds=1e9) == other
        )  # of a worker that is not kept
        finish(session, small[1])
        ahead, held = submit(session, ada, priority=1), submit(session, ada)
        assert claim(session, two, reserve_after_seconds=1e9) == ahead
        finish(session, ahead)
        assert claim(session, two, reserve_after_seconds=1e9) is None
        assert "devices are reserved for run" in why(session, held)
        finish(session, small[2])
        assert claim(session, two, reserve_after_seconds=1e9) == node_group
        assert (node_group.first_since, node_group.reservation) == (None, None)
        finish(session, node_group)
        assert claim(session, three) == held


def test_more_is_kept_if_ends_of_runs_are_unknown(database: Database, ada: User) -> None:
    """Another worker is reserved after each period, and one in place of each lost worker."""
    up = add_workers(database, 2, 2, 2)
    with database.writing() as session:
        small = [submit(session, ada) for _ in range(6)]
        for worker in (*up, *up):
            assert claim(session, worker) in small
        wide = submit(session, ada, devices_per_node=2)
        finish(session, small[0])
        submit(session, ada)

        def find_kept(patience: float) -> Any:
            assert claim(session, up[0], reserve_after_seconds=patience) is None
            session.refresh(wide)
            return [up.index(each) for each in up if each.id in wide.reservation["worker_ids"]]

        assert find_kept(0) == [0]
        assert find_kept(1e9) == [0]
        assert find_kept(0) == [0, 1]
        for waited, kept in ((150.0, [0, 1]), (250.0, [0, 1, 2]), (350.0, [0, 1, 2])):
            since = session.scalar(select(now() - waited))
            wide.reservation, wide.first_since = wide.reservation | {"since": since}, since
            assert find_kept(100.0) == kept
        wide.reservation = wide.reservation | {"worker_ids": [up[0].id, up[1].id]}
        away = update(Worker).where(Worker.id.in_([up[0].id, up[1].id]))
        session.execute(away.values(seen_at=0.0))
        assert find_kept(1e9) == [0, 1]  # of which the claiming one is up
        session.execute(update(Worker).where(Worker.id == up[1].id).values(seen_at=now()))
        assert claim(session, up[1], reserve_after_seconds=1e9) is None
        wide.reservation = wide.reservation | {"worker_ids": [up[1].id, up[2].id]}
        session.execute(update(Worker).where(Worker.id != up[0].id).values(seen_at=0.0))
        assert find_kept(0) == [0]


def test_a_run_that_ends_before_the_gang_can_start_goes_first(
    database: Database, ada: User
) -> None:
    """A short run passes a reservation if it ends before the reserved devices are all free."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        long = submit(session, ada, expected_seconds=1000.0)
        assert claim(session, two) == long
        node_group = submit(session, ada, nodes=2)
        for seconds in (None, 2000.0):
            submit(session, ada, expected_seconds=seconds)
        assert claim(session, one, reserve_after_seconds=0) is None
        session.refresh(node_group)
        assert node_group.reservation is not None
        assert node_group.reservation["until"] - node_group.reservation["since"] == pytest.approx(
            1000
        )
        short = submit(session, ada, expected_seconds=500.0)
        assert claim(session, one) == short
        finish(session, short)
        node_group.reservation = {
            **node_group.reservation,
            "until": node_group.reservation["since"] + 400,
        }
        submit(session, ada, expected_seconds=500.0)
        assert claim(session, one) is None
        long.step, long.steps_total, long.steps_per_second = 40, 50, 0.5
        node_group.reservation = None
        assert claim(session, one, reserve_after_seconds=0) is None
        session.refresh(node_group)
        assert node_group.reservation["until"] - node_group.reservation["since"] == pytest.approx(
            20
        )


def test_one_gang_at_a_time_has_devices_kept(database: Database, ada: User) -> None:
    """Only the first waiting run gets a reservation, and none that no workers could train."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        busy = submit(session, ada)
        assert claim(session, two) == busy
        impossible = submit(session, ada, nodes=3, priority=2)
        later, first = submit(session, ada, nodes=2), submit(session, ada, nodes=2, priority=1)
        assert claim(session, one, reserve_after_seconds=0) is None
        for run in (impossible, later, first):
            session.refresh(run)
        assert [bool(run.reservation) for run in (impossible, later, first)] == [False, False, True]
        run_control.cancel(session, first.id, ada)
        assert first.reservation is None


def test_runs_that_no_worker_could_train_hide_no_other(
    database: Database, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that no worker can train do not block a later one, however many there are."""
    monkeypatch.setattr(reservations, "MOST_CANDIDATES", 1)
    one, _two = add_workers(database, 1, 1)
    with database.writing() as session:
        for changes in ({"nodes": 3}, {"devices_per_node": 2}, {"recipe": "other"}):
            submit(session, ada, **({"nodes": 2} | changes))
        assert claim(session, one) is None
        node_group = submit(session, ada, nodes=2)
        assert claim(session, one) == node_group


def test_claims_at_once_share_no_device(database: Database, ada: User) -> None:
    """Concurrent claims get complete runs, and each device is claimed once."""
    sizes, chance = (2, 4, 4, 2, 3, 4), random.Random(1)
    up = add_workers(database, *sizes)
    # The runs of one node, every seventh, cannot take all devices.
    shapes = [
        (chance.choice((2, 3)) if number % 7 else 1, chance.choice((1, 1, 2)))
        for number in range(40)
    ]
    with database.writing() as session:
        for count, devices in shapes:
            submit(session, ada, nodes=count, devices_per_node=devices)
    barrier = threading.Barrier(len(up))
    failed: list[Exception] = []

    def ask(worker: Worker) -> None:
        barrier.wait()
        try:
            for _ in range(12):
                with database.writing() as session:
                    claim(session, worker)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(worker,)) for worker in up]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    # Claims at once pass over what others have locked: the last ones are made one by one.
    for worker in up:
        with database.writing() as session:
            while claim(session, worker):
                pass
    with database.reading() as session:
        found = session.scalars(select(RunNode)).all()
        taken = Counter((node.worker_id, device) for node in found for device in node.devices)
        claimed = {run.id: run for run in session.scalars(select(Run).where(Run.attempt == 1))}
    assert set(taken.values()) == {1}
    assert Counter(node.run_id for node in found) == {run.id: run.nodes for run in claimed.values()}
    assert all(len(node.devices) == claimed[node.run_id].devices_per_node for node in found)
    assert any(run.nodes > 1 for run in claimed.values())
    # What is left are the devices of one worker: all that wait need two.
    assert sum(taken.values()) >= sum(sizes) - max(sizes)


@pytest.mark.only_on("postgresql")
def test_a_claim_without_a_result_takes_no_lock(database: Database, ada: User) -> None:
    """A claim without a result locks neither limited projects nor the reservation."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        session.add(Project(name="vision", devices=3))
        node_group = submit(session, ada, nodes=2, project="vision")
        gang_id = node_group.id
        submit(session, ada, recipe="other", project="vision")
        busy = submit(session, ada, project="vision", priority=1)
        assert claim(session, one) == busy
    with database.writing() as other:
        quotas.take_turns(other, per_user=True)
        runs.get(other, gang_id, lock=True)
        with database.writing() as session:
            session.execute(text("SET LOCAL lock_timeout = '10s'"))
            assert claim(session, two, runs_per_user=9) is None
    with database.writing() as session:
        assert runs.get(session, gang_id).first_since is None
        assert claim(session, two, runs_per_user=9) is None
        assert runs.get(session, gang_id).first_since is not None


@pytest.mark.only_on("postgresql")
def test_a_claim_that_had_to_wait_notes_nothing_that_is_old(database: Database, ada: User) -> None:
    """A claim that waited for a lock does not overwrite the reservation's time with older state."""
    one, two = add_workers(database, 1, 1)
    with database.writing() as session:
        busy = submit(session, ada, priority=1)
        assert claim(session, one) == busy
        gang_id = submit(session, ada, nodes=2).id
        submit(session, ada)

    def take() -> None:
        with database.writing() as session:
            assert claim(session, two, runs_per_user=9) is not None

    with ThreadPoolExecutor() as pool:
        with database.writing() as other:
            quotas.take_turns(other, per_user=True)
            taking = pool.submit(take)
            while not is_blocked(database) and not taking.done():
                pass
            other.execute(update(Run).where(Run.id == gang_id).values(first_since=1.0))
        taking.result()
    with database.reading() as session:
        assert runs.get(session, gang_id).first_since == 1.0
