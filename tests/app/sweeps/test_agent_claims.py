"""Points of a sweep that agents claim: none is claimed twice, and none lost with an agent."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select, update
from starlette.testclient import TestClient

from app.sweeps import search_space, sweep_submission
from app.sweeps.agents_api import _config
from app.sweeps.sweep_submission import SweepSubmission
from db.clock import now
from db.database import Database
from db.errors import Conflict, Ended, Invalid
from db.queue import queue
from db.sweeps import agent_claims, sweeps
from db.tables import AuditEvent, Run, Status, Trial, User, Worker
from db.tables.access import CONTROL, FULL, READ, SUBMIT, WRITE
from db.telemetry import ingest, telemetry
from tests.app.conftest import client_of, offer_digits
from tests.db.conftest import claim as claim_by_worker
from tests.db.telemetry.telemetry_made import make_metric
from tests.spool_made import event_of

pytestmark = pytest.mark.sql_sample

A, B = "a" * 32, "b" * 32


def begin(database: Database, ada: User, **changes: Any) -> int:
    """Begin a sweep for agents over six points."""
    values: dict[str, Any] = {"space": {"lr": [0.1, 0.2, 0.3], "size": "1..2"}, "agents": True}
    values |= {"config": {"seed": 7}, "metric": "score", "goal": "maximise"}
    with database.writing() as session:
        submission = SweepSubmission(**(values | changes))
        return sweep_submission.begin(session, ada, submission).id


def take(database: Database, ada: User, sweep_id: int, agent: str = A) -> tuple[Trial, Run] | None:
    with database.writing() as session:
        return agent_claims.take(
            session,
            sweep_submission.lock(session, sweep_id),
            session.get_one(User, ada.id),
            agent,
            next_point=sweep_submission.next_point,
            config_of=_config,
            name_of=search_space.name,
        )


def take_point(database: Database, ada: User, sweep_id: int, agent: str = A) -> tuple[Trial, Run]:
    claimed = take(database, ada, sweep_id, agent)
    assert claimed is not None
    return claimed


def expire(database: Database, sweep_id: int) -> None:
    """Expire every lease of a sweep."""
    with database.writing() as session:
        mine = (Trial.sweep_id == sweep_id, Trial.lease_expires_at.is_not(None))
        session.execute(update(Trial).where(*mine).values(lease_expires_at=now() - 1))


def arrive(database: Database, ada: User, run: Run, **changes: Any) -> None:
    """Begin the upload of a run, as its script's uploader does."""
    values: dict[str, Any] = {"name": "n", "project": "", "config": run.config, "tags": ""}
    values |= {"host": "", "started_at": 0.0, "versions": {}}
    with database.writing() as session:
        user = session.get_one(User, ada.id)
        ingest.begin(session, user, str(run.watch_id), 1, **(values | changes))


def end(database: Database, ada: User, run: Run, score: float) -> None:
    """Log a score and end a run."""
    with database.writing() as session:
        event = event_of(make_metric(1, score, "score"))
        telemetry.record(session, run.id, 1, telemetry.Flush(events=[event]))
        queue.end(session, run.id, 1, Status.FINISHED)


def test_agents_take_each_point_once(database: Database, ada: User) -> None:
    """Eight concurrent agents claim each point once, and each point's run has its settings."""
    sweep_id = begin(database, ada)

    def work(number: int) -> list[tuple[float, int]]:
        points = []
        while claimed := take(database, ada, sweep_id, f"{number:032x}"):
            trial, run = claimed
            assert run.config == {"seed": 7, **trial.params}
            points.append((trial.params["lr"], trial.params["size"]))
        return points

    with ThreadPoolExecutor(8) as pool:
        points = sorted(point for points in pool.map(work, range(8)) for point in points)
    assert points == [(lr, size) for lr in (0.1, 0.2, 0.3) for size in (1, 2)]
    with database.reading() as session:
        assert sweeps.get(session, sweep_id).submitted == 6


@pytest.mark.sql
def test_a_dead_agents_point_goes_to_the_next(database: Database, ada: User) -> None:
    """After an agent dies, the next one gets its point under the same number, and the dead
    agent's run accepts nothing more.
    """
    sweep_id = begin(database, ada)
    first, old = take_point(database, ada, sweep_id)
    arrive(database, ada, old)
    second, _run = take_point(database, ada, sweep_id, B)
    assert second.number == 2
    expire(database, sweep_id)
    again, new = take_point(database, ada, sweep_id, B)
    assert (again.number, again.params) == (1, first.params)
    assert new.id != old.id
    with database.writing() as session:
        assert session.get_one(Run, old.id).status == Status.CANCELLED
        with pytest.raises(Ended):
            ingest.lock_attempt(session, session.get_one(User, ada.id), old.id, 1)
    with database.writing() as session, pytest.raises(Conflict, match="its lease expired"):
        agent_claims.renew(session, sweeps.get(session, sweep_id, lock=True), 1, A)
    with database.writing() as session:
        assert agent_claims.renew(session, sweeps.get(session, sweep_id, lock=True), 1, B)


def test_a_run_that_never_arrived_cannot_arrive_later(database: Database, ada: User) -> None:
    """A run whose lease expired before its upload cannot start once its point has another run."""
    sweep_id = begin(database, ada)
    _trial, old = take_point(database, ada, sweep_id)
    expire(database, sweep_id)
    take_point(database, ada, sweep_id, B)
    with pytest.raises(Ended):
        arrive(database, ada, old)


def test_a_returned_point_is_free_at_once(database: Database, ada: User) -> None:
    """After an agent's Ctrl-C the next agent gets its point at once."""
    sweep_id = begin(database, ada)
    trial, _run = take_point(database, ada, sweep_id)
    with database.writing() as session:
        agent_claims.give_back(session, sweeps.get(session, sweep_id, lock=True), 1, A)
    assert take_point(database, ada, sweep_id, B)[0].params == trial.params


def test_a_killed_script_gives_its_point_back_and_a_finished_one_does_not(
    database: Database, ada: User
) -> None:
    """A killed script returns its point, and a finished one keeps it until the agent reports."""
    sweep_id = begin(database, ada, space={"lr": [0.1, 0.2]})
    _killed, run = take_point(database, ada, sweep_id)
    arrive(database, ada, run)
    with database.writing() as session:
        queue.end(session, run.id, 1, Status.FAILED, reason="vanished")
        assert sweeps.due(session) == []
    _finished, other = take_point(database, ada, sweep_id)
    arrive(database, ada, other)
    end(database, ada, other, 0.5)
    expire(database, sweep_id)
    again, _new = take_point(database, ada, sweep_id, B)
    assert again.number == 1
    assert take(database, ada, sweep_id, B) is None
    with database.reading() as session:
        assert session.get_one(Trial, (sweep_id, 2)).state == sweeps.COMPLETE


@pytest.mark.sql
def test_results_decide_the_best_trial(database: Database, ada: User) -> None:
    """The metric that watched runs log decides the best trial; the last run ends the sweep."""
    sweep_id = begin(database, ada, space={"lr": [0.1, 0.2]})
    for score in (0.5, 0.9):
        trial, run = take_point(database, ada, sweep_id)
        arrive(database, ada, run)
        with database.writing() as session:
            sweep = sweeps.get(session, sweep_id, lock=True)
            agent_claims.finish(session, sweep, trial.number, A, was_watched=True)
        end(database, ada, run, score)
    expire(database, sweep_id)  # no lease is left
    assert take(database, ada, sweep_id) is None
    with database.reading() as session:
        sweep = sweeps.get(session, sweep_id)
        tally = sweeps.tallies(session, [sweep])[sweep_id]
        assert (tally.complete, tally.open, tally.best) == (2, 0, 0.9)
        assert sweeps.status(sweep, tally) == sweeps.FINISHED


def test_an_upload_that_comes_later_keeps_its_point(database: Database, ada: User) -> None:
    """After its script ends a point stays claimed for ten minutes, until its run is uploaded."""
    sweep_id = begin(database, ada, space={"lr": [0.1]})
    trial, run = take_point(database, ada, sweep_id)
    with database.writing() as session:
        sweep = sweeps.get(session, sweep_id, lock=True)
        agent_claims.finish(session, sweep, trial.number, A, was_watched=True)
    assert take(database, ada, sweep_id, B) is None
    arrive(database, ada, run)
    expire(database, sweep_id)
    assert take(database, ada, sweep_id, B) is None
    with database.reading() as session:
        assert session.scalars(select(Trial.lease_expires_at)).all() == [None]


def test_a_script_that_watches_nothing_has_failed(database: Database, ada: User) -> None:
    """The trial of a script that uploads no run fails, and the sweep continues."""
    sweep_id = begin(database, ada)
    trial, run = take_point(database, ada, sweep_id)
    with database.writing() as session:
        sweep = sweeps.get(session, sweep_id, lock=True)
        agent_claims.finish(session, sweep, trial.number, A, was_watched=False)
    with database.reading() as session:
        assert session.get_one(Run, run.id).error == agent_claims.NOT_WATCHED
        assert session.get_one(Trial, (sweep_id, 1)).state == sweeps.LOST


def test_neither_workers_nor_the_queue_take_an_agents_run(database: Database, ada: User) -> None:
    """Workers do not claim an agent's run, nor do agents claim a run of a recipe's sweep."""
    worker_id = offer_digits(database)
    sweep_id = begin(database, ada)
    take_point(database, ada, sweep_id)
    with database.writing() as session:
        worker = session.get_one(Worker, worker_id)
        assert claim_by_worker(session, worker, commands=True) is None
        assert sweeps.due(session) == []


def test_a_paused_or_cancelled_sweep_gives_no_points(database: Database, ada: User) -> None:
    """A paused sweep gives agents no points; cancelling it ends their runs."""
    sweep_id = begin(database, ada)
    trial, run = take_point(database, ada, sweep_id)
    with database.writing() as session:
        sweeps.pause(session, sweep_id)
    assert take(database, ada, sweep_id) is None
    with database.writing() as session:
        sweeps.cancel(session, sweep_id, session.get_one(User, ada.id))
    with database.writing() as session:
        sweep = sweeps.get(session, sweep_id, lock=True)
        assert not agent_claims.renew(session, sweep, trial.number, A)
        assert session.get_one(Run, run.id).status == Status.CANCELLED


@pytest.mark.sql
def test_weak_points_of_agents_are_pruned(database: Database, ada: User) -> None:
    """A weak trial is pruned: its agent is notified, and what it uploads later is refused."""
    space = {"lr": "uniform(0, 1)"}
    pruner = {"kind": "hyperband", "first": 2, "factor": 2}
    sweep_id = begin(database, ada, space=space, kind="random", runs=9, pruner=pruner)
    claimed = [take_point(database, ada, sweep_id, f"{number:032x}") for number in range(4)]
    for score, (_trial, run) in zip((3, 2, 1, 0), claimed, strict=True):
        arrive(database, ada, run)
        log(database, run, [0.0, float(score)])
    sweep_submission.submit_due(database)
    with database.writing() as session:
        sweep = sweeps.get(session, sweep_id, lock=True)
        trials = sweeps.all_trials(session, sweep)
        assert [[each["value"] for each in row.reports] for row in trials] == [[3], [2], [1], [0]]
        states = [row.state for row in trials]
        weak, best = states.index("pruned"), 1
        assert states[best - 1] == "open"
        assert not agent_claims.renew(session, sweep, weak + 1, f"{weak:032x}")
        assert agent_claims.renew(session, sweep, best, f"{0:032x}")
        run = session.get_one(Run, claimed[weak][1].id)
        assert (run.status, run.failure_kind) == (Status.CANCELLED, "sweep")
        assert "after 2 values its score" in str(run.stop_reason)
        agent_claims.finish(session, sweep, weak + 1, f"{weak:032x}", was_watched=True)
    with pytest.raises(Ended):
        arrive(database, ada, claimed[weak][1])
    with database.reading() as session:
        assert session.get_one(Trial, (sweep_id, weak + 1)).state == "pruned"


def test_checks_become_sparse_with_many_values(database: Database, ada: User) -> None:
    """A trial is checked at each of its first values, and later at sparser ones."""
    sweep_id = begin(database, ada, pruner={"kind": "median"})
    _trial, run = take_point(database, ada, sweep_id)
    arrive(database, ada, run)
    log(database, run, [*map(float, range(1000))])
    sweep_submission.submit_due(database)
    with database.reading() as session:
        rungs = [row["rung"] for row in session.get_one(Trial, (sweep_id, 1)).reports]
    assert rungs[:200] == [*range(1, 201)]
    assert rungs[200:203] == [202, 204, 206]
    assert rungs[-1] > 980
    assert all(after - rung <= rung / 100 for rung, after in pairwise(rungs[200:]))


def test_a_failed_point_goes_to_an_agent_again(database: Database, ada: User) -> None:
    """An agent gets a failed point again once a user has requested it."""
    sweep_id = begin(database, ada, space={"lr": [0.1]})
    trial, run = take_point(database, ada, sweep_id)
    with database.writing() as session:
        sweep = sweeps.get(session, sweep_id, lock=True)
        agent_claims.finish(session, sweep, trial.number, A, was_watched=False)
    assert take(database, ada, sweep_id) is None
    with database.writing() as session:
        sweep_submission.retry(session, sweep_id, session.get_one(User, ada.id))
    again, other = take_point(database, ada, sweep_id, B)
    assert (again.params, again.state) == (trial.params, "open")
    assert other.id != run.id


def log(database: Database, run: Run, scores: list[float]) -> None:
    with database.writing() as session:
        events = [event_of(make_metric(at, score, "score")) for at, score in enumerate(scores)]
        telemetry.record(session, run.id, 1, telemetry.Flush(events=events))


def test_what_agents_cannot_do_is_named(database: Database, ada: User) -> None:
    """The error for a recipe's sweep says that it needs workers, not agents."""
    with pytest.raises(Invalid, match="with a recipe or a command"):
        begin(database, ada, recipe="digits")


def test_the_audit_log_records_claims_that_give_a_point(
    database: Database, ada: User, script: TestClient
) -> None:
    """The audit log records a claim that got a point, but not the polls of a waiting agent."""
    sweep_id = begin(database, ada, space={"lr": [0.1]})
    path = f"/api/v1/sweeps/{sweep_id}/claims"
    states = [script.post(path, json={"agent": agent}).json()["state"] for agent in (A, B, B)]
    assert states == ["run", "wait", "wait"]
    with database.reading() as session:
        actions = session.scalars(select(AuditEvent.action)).all()
    assert actions == [f"POST {path}"]


@pytest.mark.parametrize("kind", [FULL, WRITE, READ, SUBMIT, CONTROL])
def test_only_a_token_that_may_upload_takes_a_point(
    app: FastAPI, database: Database, ada: User, kind: str
) -> None:
    """A claim needs a token that may upload, since the agent's script uploads with it."""
    sweep_id = begin(database, ada)
    client = client_of(app, database, ada, kind=kind)
    response = client.post(f"/api/v1/sweeps/{sweep_id}/claims", json={"agent": A})
    assert response.status_code == (200 if kind in (FULL, WRITE) else 403)
    assert (take(database, ada, sweep_id, B) or (Trial(number=0),))[0].number == (
        2 if kind in (FULL, WRITE) else 1
    )
