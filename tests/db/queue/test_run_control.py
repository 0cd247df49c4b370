"""Control requests of users: end, pause, queue position and loss scale."""

from functools import partial
from typing import Any

import pytest

from db.database import Database
from db.errors import Conflict
from db.queue import pending_reasons, queue, run_control
from db.runs import runs
from db.tables import Run, Status, User, Worker
from tests.db.conftest import claim, config, submit


def test_cancel_ends_a_queued_run_and_stops_a_running_one(
    database: Database, running: Run, ada: User
) -> None:
    """A queued run is cancelled at once, and a running one once its training has stopped."""
    with database.writing() as session:
        waiting = submit(session, ada)
        assert run_control.cancel(session, waiting.id, ada).status == Status.CANCELLED
        assert run_control.cancel(session, running.id, ada).status == Status.STOPPING


def test_a_repeated_cancel_still_waits_for_the_checkpoint(
    database: Database, running: Run, ada: User
) -> None:
    """A repeated cancel still leaves a checkpoint; a forced stop is another action."""
    with database.writing() as session:
        for _ in range(2):
            run = run_control.cancel(session, running.id, ada)
            assert (run.status, run.desired_state) == (Status.STOPPING, "cancel")
        history = [row.status for row in runs.statuses(session, running.id)]
        assert history == ["queued", "starting", "running", "stopping"]
        for act in (run_control.kill, run_control.cancel):
            assert act(session, running.id, ada).desired_state == "kill"
    with pytest.raises(Conflict, match="only a running one"), database.writing() as session:
        run_control.kill(session, submit(session, ada).id, ada)


def test_pause_and_resume(database: Database, running: Run, ada: User) -> None:
    """A paused run keeps its queue position, and only a paused run resumes."""
    with database.writing() as session:
        assert run_control.pause(session, running.id, ada).status == Status.PAUSING
        queue.end(session, running.id, 1, Status.PAUSED)
        assert run_control.resume(session, running.id, ada).status == Status.QUEUED
        assert run_control.pause(session, running.id, ada).status == Status.PAUSED


@pytest.mark.parametrize("task", ["precision_plan", "precision_diff"])
@pytest.mark.parametrize(
    "act",
    [
        run_control.pause,
        run_control.request_checkpoint,
        partial(run_control.request_scale, scale=2.0),
        partial(run_control.request_replay, step=1),
        run_control.request_precision_diff,
    ],
    ids=["pause", "checkpoint", "scale", "replay", "diff"],
)
def test_a_measurement_is_only_cancelled(
    database: Database, running: Run, ada: User, task: str, act: Any
) -> None:
    """A measurement rejects requests that a training handles between steps."""
    with database.writing() as session:
        session.get_one(Run, running.id).config = config() | {"lab": {"task": task}}
    with (
        pytest.raises(Conflict, match="measures and makes no steps"),
        database.writing() as session,
    ):
        act(session, running.id, ada)
    with database.writing() as session:
        assert run_control.cancel(session, running.id, ada).status == Status.STOPPING
        limits = {"max_attempts": 3, "max_stalled_attempts": 3}
        ended = queue.end_killed(session, running.id, 1, reason="killed", **limits)
        assert (ended, runs.get(session, running.id).killed_attempts) == (Status.CANCELLED, 0)


def test_a_queued_measurement_leaves_the_queue(database: Database, ada: User) -> None:
    """A queued measurement can be paused and resumed."""
    with database.writing() as session:
        run = submit(session, ada, config=config() | {"lab": {"task": "precision_plan"}})
        assert run_control.pause(session, run.id, ada).status == Status.PAUSED
        assert run_control.resume(session, run.id, ada).status == Status.QUEUED


@pytest.mark.parametrize(
    "act",
    [run_control.cancel, run_control.pause, run_control.resume, run_control.request_checkpoint],
    ids=lambda f: f.__name__,
)
def test_an_ended_run_cannot_be_controlled(
    database: Database, running: Run, ada: User, act: object
) -> None:
    """Controlling an ended run is an error with its status."""
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
    with pytest.raises(Conflict, match="finished"), database.writing() as session:
        act(session, running.id, ada)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp32"}, "in fp32, which has no loss scale"),
        ({"precision": "bf16"}, "in bf16, which has no loss scale"),
        ({"scaler": {"enabled": False}}, "scaler.enabled false: it has no loss scale"),
    ],
)
def test_a_run_without_a_loss_scale_rejects_one(
    database: Database, ada: User, worker: Worker, changes: dict[str, Any], message: str
) -> None:
    """A scale requested of a run without loss scaling is rejected."""
    with database.writing() as session:
        submit(session, ada, config=config() | changes)
        run = claim(session, worker, precisions=["fp32", "fp16", "bf16"])
        assert run is not None
    with pytest.raises(Conflict, match=message), database.writing() as session:
        run_control.request_scale(session, run.id, ada, 512.0)


def test_a_scale_set_by_hand_is_in_the_history(database: Database, running: Run, ada: User) -> None:
    """The history has user and value of a scale set by hand."""
    with database.writing() as session:
        run_control.request_scale(session, running.id, ada, 512.0)
        assert run_control.replaying_steps(session, running.id) == set()
        last = runs.statuses(session, running.id)[-1]
    asked = "ada requested a loss scale of 2^9 from the next step on"
    assert (last.status, last.reason) == ("running", asked)


def test_priority_changes_only_while_it_matters(
    database: Database, running: Run, ada: User
) -> None:
    """Priority can be changed while a run is queued, not while it runs."""
    with database.writing() as session:
        waiting = submit(session, ada)
        assert run_control.set_priority(session, waiting.id, 7, ada).priority == 7
    with pytest.raises(Conflict), database.writing() as session:
        run_control.set_priority(session, running.id, 7, ada)


def test_a_waiting_run_is_moved_before_another(database: Database, running: Run, ada: User) -> None:
    """Users can reorder the queue, repeatedly."""
    with database.writing() as session:
        a, b, c, d = (submit(session, ada) for _ in range(4))
        for moved, before in ((d, b), (c, b), (a, d), (b, a)):
            run_control.move(session, moved.id, before.id, ada)
        assert list(pending_reasons.Queue.read(session).places) == [b.id, a.id, d.id, c.id]
    with pytest.raises(Conflict, match="running"), database.writing() as session:
        run_control.move(session, running.id, a.id, ada)


@pytest.mark.slow
def test_places_never_run_out(database: Database, running: Run, ada: User) -> None:
    """Repeatedly moving runs before a third keeps their order beyond a double's halvings."""
    with database.writing() as session:
        a, b, c = (submit(session, ada) for _ in range(3))
        for n in range(70):
            first, second = (a, b) if n % 2 else (b, a)
            run_control.move(session, first.id, c.id, ada)
            assert list(pending_reasons.Queue.read(session).places) == [second.id, first.id, c.id]
        assert len({run.position for run in (a, b, c)}) == 3
