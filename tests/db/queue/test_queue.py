"""The queue: claims, leases, fencing and ends."""

import threading
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from db.access import accounts
from db.clock import now
from db.database import Database
from db.errors import Invalid, StaleAttempt
from db.queue import pending_reasons, queue, run_control
from db.runs import runs
from db.runs.run_filters import NeedsAttention
from db.tables import Run, RunNode, RunStatus, Status, User, Worker
from tests.db.conftest import CPU, DIGITS, add_worker, claim, config, submit
from tests.db.telemetry.telemetry_made import record
from tests.site import until


def why(session: Session, run: Run, *, runs_per_user: int = 0) -> str:
    """Return the pending reason of a queued run."""
    return pending_reasons.reason(
        run, pending_reasons.Queue.read(session), runs_per_user=runs_per_user
    ).text


def find_silent(session: Session) -> set[int]:
    """Mark runs as unreachable after two polls, as a worker does."""
    return queue.mark_unreachable(session, queue.mark_unreachable(session, set()))


def test_claims_go_by_priority_then_by_age(database: Database, ada: User, worker: Worker) -> None:
    """Runs are claimed by priority, and then in order of submission."""
    with database.writing() as session:
        first, second = submit(session, ada), submit(session, ada)
        urgent = submit(session, ada, priority=5)
        order = [claim(session, worker) for _ in range(4)]
    assert [run and run.id for run in order] == [urgent.id, first.id, second.id, None]


def test_seconds_in_training_are_those_of_all_attempts(
    database: Database, ada: User, worker: Worker
) -> None:
    """Training seconds include killed attempts, but no pauses and queues."""
    with database.writing() as session:
        run = submit(session, ada)
        history = [("starting", 5), ("running", 10), ("pausing", 16), ("paused", 17)]
        history += [("queued", 50), ("starting", 60), ("running", 70), ("queued", 75)]
        for status, moment in history:
            session.add(RunStatus(run_id=run.id, attempt=1, status=Status(status), time=moment))
        session.flush()
        session.execute(delete(RunStatus).where(RunStatus.time > 1000))  # of the submission
        assert queue.seconds_in_training(session, run.id) == 7 + 5


def test_claim_passes_over_what_does_not_fit(database: Database, ada: User, worker: Worker) -> None:
    """A run of another recipe, precision, size or memory waits; a later one that fits starts."""
    with database.writing() as session:
        submit(session, ada, recipe="gpt")
        submit(session, ada, config=config(precision="bf16"))
        submit(session, ada, devices_per_node=2)
        submit(session, ada, config=config(device_memory_gib=8.5))
        fits = submit(session, ada, config=config(device_memory_gib=8))
        claimed = claim(session, worker, free_devices=[0], device_memory_bytes=8 * 2**30)
    assert claimed is not None
    assert claimed.id == fits.id


def test_a_request_for_more_memory_than_any_number_of_bytes_waits(
    database: Database, ada: User, worker: Worker
) -> None:
    """A request for an impossible amount of memory waits, and delays no other claim."""
    with database.writing() as session:
        bad = submit(session, ada, config=config(device_memory_gib=1e308))
        fits = submit(session, ada)
        claimed = claim(session, worker, device_memory_bytes=8 * 2**30)
        assert claimed is not None
        assert claimed.id == fits.id
        assert why(session, bad).startswith("it needs devices of ∞, and no worker")
        bad.config = config(device_memory_gib=10**400)
        assert why(session, bad).startswith("it needs devices of ∞, and no worker")


def test_claim_opens_an_attempt_with_a_lease(database: Database, ada: User, worker: Worker) -> None:
    """A claim raises the attempt and takes devices and a lease by the database's clock."""
    with database.writing() as session:
        submit(session, ada)
        run = claim(session, worker, free_devices=[3, 1])
        assert run is not None
        node = queue.node(session, run.id, 1)
        assert (run.attempt, run.status, node.devices) == (1, Status.STARTING, [1])
        left = session.scalar(
            update(RunNode).values(node=0).returning(RunNode.lease_expires_at - now())
        )
    assert left == pytest.approx(60, abs=5)


def test_one_run_is_claimed_by_one_of_many_workers(
    database: Database, ada: User, worker: Worker
) -> None:
    """Concurrent claims get each run once."""
    with database.writing() as session:
        wanted = {submit(session, ada).id for _ in range(20)}
    taken: list[int] = []

    def work() -> None:
        while True:
            with database.writing() as session:
                run = claim(session, worker)
            if run is None:
                return
            taken.append(run.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(wanted)


def test_an_attempt_given_up_can_write_nothing(database: Database, running: Run) -> None:
    """Every write of a stale or ended attempt is refused."""
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.QUEUED, reason="its worker was stopped")
    for act in (
        lambda session: queue.start(session, running.id, 1),
        lambda session: queue.renew(session, running.id, 1, 60.0),
        lambda session: queue.end(session, running.id, 1, Status.FINISHED),
    ):
        with pytest.raises(StaleAttempt), database.writing() as session:
            act(session)
    with database.reading() as session:
        assert runs.get(session, running.id).status == Status.QUEUED


def test_a_lease_that_runs_out_queues_the_run_again(
    database: Database, running: Run, worker: Worker
) -> None:
    """A silent node makes its run unreachable, then queued, with the old attempt fenced."""
    with database.writing() as session:
        session.execute(update(RunNode).values(lease_expires_at=now() - 1))
        assert find_silent(session) == {running.id}
        assert queue.requeue_unreachable(session, {running.id}) == [running.id]
        again = claim(session, worker)
    assert again is not None
    assert again.attempt == 2
    with database.reading() as session:
        history = [row.status for row in runs.statuses(session, running.id)]
    assert history == ["queued", "starting", "running", "unreachable", "queued", "starting"]


def test_a_lease_is_found_to_have_run_out_twice_before_it_counts(
    database: Database, running: Run
) -> None:
    """A lease must be found expired twice, since a live supervisor renews it within a second."""
    with database.writing() as session:
        session.execute(update(RunNode).values(lease_expires_at=now() - 1))
        assert queue.mark_unreachable(session, set()) == {running.id}
        assert runs.get(session, running.id).status == Status.RUNNING
        queue.renew(session, running.id, 1, 60.0)
        assert queue.mark_unreachable(session, {running.id}) == set()
        assert "unreachable" not in [row.status for row in runs.statuses(session, running.id)]


def test_an_unreachable_run_comes_back_with_its_supervisor(
    database: Database, running: Run
) -> None:
    """An unreachable run continues if its supervisor renews the lease."""
    with database.writing() as session:
        session.execute(update(RunNode).values(lease_expires_at=now() - 1))
        assert find_silent(session) == {running.id}
        queue.renew(session, running.id, 1, 60.0)
        assert runs.get(session, running.id).status == Status.RUNNING
        assert queue.requeue_unreachable(session, {running.id}) == []


def test_a_gang_is_queued_again_only_when_every_node_is_gone(
    database: Database, running: Run
) -> None:
    """A run on several nodes is queued again only once all nodes are gone."""
    with database.writing() as session:
        lost = queue.node(session, running.id, 1)
        values = {"run_id": running.id, "attempt": 1, "worker_id": lost.worker_id, "devices": [0]}
        session.add(RunNode(**values, node=1, lease_expires_at=now() + 60))
        lost.lease_expires_at = now() - 1
        session.flush()
        assert find_silent(session) == {running.id}
        assert queue.requeue_unreachable(session, {running.id}) == []
        session.execute(update(RunNode).values(lease_expires_at=now() - 1))
        assert queue.requeue_unreachable(session, {running.id}) == [running.id]


def test_a_renewed_lease_does_not_run_out(database: Database, running: Run) -> None:
    """A renewal keeps the run and returns the user's requests."""
    with database.writing() as session:
        control = queue.renew(session, running.id, 1, 60.0)
        assert find_silent(session) == set()
    assert control == queue.DesiredState("run")


def test_control_messages_carry_cancel_and_requests(
    database: Database, running: Run, ada: User
) -> None:
    """User requests reach the holder of the lease, each with its id, in order."""
    with database.writing() as session:
        run_control.request_checkpoint(session, running.id, ada)
        for scale in (512.0, 512.0):
            run_control.request_scale(session, running.id, ada, scale)
        run_control.request_replay(session, running.id, ada, 7)
        run_control.cancel(session, running.id, ada)
        control = queue.renew(session, running.id, 1, 60.0)
    asked = [(request.kind, request.value) for request in control.requests]
    assert asked == [("checkpoint", None), ("scale", 512.0), ("scale", 512.0), ("replay", 7.0)]
    assert len({request.id for request in control.requests}) == 4
    assert control.desired_state == "cancel"


def test_a_request_is_pending_until_acknowledged(
    database: Database, running: Run, ada: User
) -> None:
    """Only its event acknowledges a request, and invalid events are rejected. A request that was
    merely passed on is not lost with its training.
    """
    with database.writing() as session:
        first = run_control.request_scale(session, running.id, ada, 512.0)
        again = run_control.request_scale(session, running.id, ada, 512.0)
        queue.renew(session, running.id, 1, 60.0)
    record(database, running, events=[{"event": "obeyed", "step": 5, "request": first.id}])
    with database.writing() as session:
        control = queue.renew(session, running.id, 1, 60.0)
    assert [request.id for request in control.requests] == [again.id]
    for act in (
        lambda session: run_control.request_scale(session, running.id, ada, 0.0),
        lambda session: run_control.request_scale(session, running.id, ada, 1e-40),
        lambda session: run_control.request_replay(session, running.id, ada, 101),
    ):
        with pytest.raises(Invalid, match="allowed"), database.writing() as session:
            act(session)


def test_a_cancelled_run_is_not_queued_again(database: Database, running: Run, ada: User) -> None:
    """A run whose process dies during a cancel is cancelled, not queued."""
    with database.writing() as session:
        run_control.cancel(session, running.id, ada)
        queue.end(session, running.id, 1, Status.QUEUED)
        assert runs.get(session, running.id).status == Status.CANCELLED


def test_a_run_waits_for_the_end_of_another(database: Database, ada: User, worker: Worker) -> None:
    """A dependent run starts once the other has ended with any outcome."""
    with database.writing() as session:
        first = submit(session, ada)
        second = submit(session, ada, after_id=first.id, priority=9)
        assert getattr(claim(session, worker), "id", None) == first.id
        assert claim(session, worker) is None
        assert "end of run 1" in why(session, second)
        queue.end(session, first.id, 1, Status.FAILED)
        assert getattr(claim(session, worker), "id", None) == second.id


def test_a_user_has_so_many_runs_in_training(database: Database, ada: User, worker: Worker) -> None:
    """A user's runs wait at the user's limit, and other users' runs pass them."""
    with database.writing() as session:
        submit(session, ada)
        waits = submit(session, ada)
        other = submit(session, accounts.user_named(session, "bob"))
        order = [claim(session, worker, runs_per_user=1) for _ in range(3)]
        assert [run and run.id for run in order] == [1, other.id, None]
        assert "the maximum" in why(session, waits, runs_per_user=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": "gpt"}, "offers the recipe gpt"),
        ({"config": config(precision="bf16")}, "devices for bf16"),
        ({"devices_per_node": 2}, "needs 2 devices"),
        ({"config": config(device_memory_gib=80)}, "of 80 GiB, and no worker that is up has more"),
        ({"nodes": 2}, "and only 1 worker can take part"),
        ({}, "1 run is ahead: 1 (digits-fp16)"),
    ],
)
def test_a_queued_run_shows_its_pending_reason(
    database: Database, ada: User, changes: dict[str, Any], reason: str
) -> None:
    """A run that no worker can train shows the reason and the remedy, and needs attention."""
    with database.writing() as session:
        assert why(session, submit(session, ada)) == "no worker reports at the moment"
    add_worker(database, "w1", [DIGITS], [CPU])
    with database.writing() as session:
        run = submit(session, ada, **changes)
        text = why(session, run)
        assert reason in text
        assert ("start one that can take it, or cancel" in text) == bool(changes)
        found = session.scalars(select(Run.id).where(NeedsAttention().sql())).all()
        assert found == ([run.id] if changes else [])


def test_a_run_that_is_killed_again_and_again_fails(
    database: Database, running: Run, worker: Worker
) -> None:
    """A run fails after several attempts in a row without a new step."""
    limits = {"max_attempts": 9, "max_stalled_attempts": 2}

    def kill_at(step: int) -> str:
        with database.writing() as session:
            run = runs.get(session, running.id)
            run.step = step
            status = queue.end_killed(session, run.id, run.attempt, reason="killed", **limits)
            claim(session, worker)
        return status

    assert [kill_at(step) for step in (5, 5, 6, 6)] == [Status.QUEUED] * 4
    assert kill_at(6) == Status.FAILED
    with database.reading() as session:
        error = runs.get(session, running.id).error
    assert error == "killed; 2 attempts in a row made no new step"


def test_attempts_are_limited(database: Database, running: Run) -> None:
    """A run fails with its last allowed attempt, and the reason is that attempt's end."""
    with database.writing() as session:
        limits = {"max_attempts": 1, "max_stalled_attempts": 5}
        queue.end_killed(session, running.id, 1, reason="killed", log="Killed", **limits)
        run = runs.get(session, running.id)
    result = "Killed\nkilled; 1 attempts were killed, as many as are allowed"
    assert (run.status, run.error) == ("failed", result)


@pytest.mark.only_on("postgresql")
def test_two_claims_at_once_keep_to_the_limit_of_a_user(
    database: Database, ada: User, worker: Worker
) -> None:
    """Of two concurrent claims at a user's limit the second waits, and gets none."""
    claimed: list[Run | None] = []
    is_waiting = select(func.count()).where(text("wait_event_type = 'Lock'"))
    is_waiting = is_waiting.select_from(text("pg_stat_activity"))
    with database.writing() as session:
        submit(session, ada)
        submit(session, ada)

    def claim_another() -> None:
        with database.writing() as session:
            claimed.append(claim(session, worker, runs_per_user=1))

    def waits_or_is_done() -> bool:
        with (
            database.reading() as session
        ):  # a new session: PostgreSQL shows a transaction the same each time
            return not other.is_alive() or bool(session.scalar(is_waiting))

    other = threading.Thread(target=claim_another)
    with database.writing() as session:
        assert claim(session, worker, runs_per_user=1) is not None
        other.start()
        until(waits_or_is_done)
    other.join()
    assert claimed == [None]


@pytest.mark.parametrize("said", [Status.PAUSED, Status.QUEUED])
def test_a_cancel_prevails_over_an_earlier_pause(
    database: Database, running: Run, ada: User, said: Status
) -> None:
    """A run that is cancelled after a pause ends as cancelled."""
    with database.writing() as session:
        run_control.pause(session, running.id, ada)
        run_control.cancel(session, running.id, ada)
        queue.end(session, running.id, 1, said)
        assert runs.get(session, running.id).status == Status.CANCELLED


def test_a_cancelled_run_that_is_killed_ends_cancelled(
    database: Database, running: Run, ada: User
) -> None:
    """A cancelled run that is killed ends as cancelled, also in its last allowed attempt."""
    with database.writing() as session:
        run_control.cancel(session, running.id, ada)
        limits = {"max_attempts": 1, "max_stalled_attempts": 1}
        status = queue.end_killed(session, running.id, 1, reason="killed", **limits)
    assert status == Status.CANCELLED


def test_a_run_killed_on_request_says_so(database: Database, running: Run, ada: User) -> None:
    """A process killed by a forced stop is no error."""
    with database.writing() as session:
        run_control.cancel(session, running.id, ada)
        run_control.kill(session, running.id, ada)
        limits = {"max_attempts": 1, "max_stalled_attempts": 1}
        queue.end_killed(session, running.id, 1, reason="killed by SIGKILL", **limits)
        last = runs.statuses(session, running.id)[-1]
    assert (last.status, last.reason, last.failure_kind) == ("cancelled", "killed by ada", None)


def test_a_run_that_cannot_be_claimed_fails_and_its_pages_show_it(
    database: Database, running: Run, ada: User
) -> None:
    """Its revision, by which pages see changes, rises; one that has started stays."""
    with database.writing() as session:
        waiting = submit(session, ada)
        before = waiting.revision
        for run in (waiting, running):
            queue.fail_unclaimable(session, run.id, "steps: -1")
        session.refresh(waiting)
        assert (waiting.status, waiting.error) == (Status.FAILED, "steps: -1")
        assert waiting.revision > before
        assert runs.get(session, running.id).status == Status.RUNNING


@pytest.mark.parametrize("act", [run_control.cancel, run_control.pause], ids=lambda f: f.__name__)
def test_a_run_that_finishes_in_spite_of_a_request_does_not_mention_it(
    database: Database, running: Run, ada: User, act: Any
) -> None:
    """A run that finishes before it executes a stop request is finished without mentioning it."""
    with database.writing() as session:
        act(session, running.id, ada)
        queue.end(session, running.id, 1, Status.FINISHED)
        last = runs.statuses(session, running.id)[-1]
    assert (last.status, last.reason) == ("finished", None)


def test_text_that_a_database_cannot_hold_is_mended(database: Database, running: Run) -> None:
    """Half a surrogate pair or a zero byte in a traceback is replaced, and the end is stored."""
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FAILED, error="caf\udce9\x00")
    with database.reading() as session:
        assert runs.get(session, running.id).error == "caf?\N{REPLACEMENT CHARACTER}"
