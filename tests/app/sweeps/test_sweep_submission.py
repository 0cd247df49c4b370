"""Which runs sweeps submit and when, each once."""

import math
import threading
from typing import Any

import pytest
from alembic import command
from sqlalchemy import select
from sqlalchemy import text as sql
from starlette.testclient import TestClient

from app.sweeps import optuna_study, sweep_submission
from db.database import Database
from db.errors import Conflict, Invalid
from db.files import erasure
from db.files.object_store import open_store
from db.queue import claims, queue, run_control
from db.runs import runs, trash
from db.settings import Settings
from db.sweeps import sweeps
from db.tables import LatestMetric, Run, Status, Sweep, Trial, User, Worker
from tests.app.conftest import CPU
from tests.app.sweeps.sweep_submission_made import LRS, begin, finish, members
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.marks import looped

pytestmark = pytest.mark.sql_sample


def the_sweep(database: Database, sweep_id: int = 1) -> tuple[Sweep, str]:
    with database.reading() as session:
        sweep = sweeps.get(session, sweep_id)
        return sweep, sweeps.status(sweep, sweeps.tallies(session, [sweep])[sweep_id])


def test_a_grid_is_submitted_as_its_runs_end(database: Database, ada: User, offered: None) -> None:
    """Runs of a grid are submitted two at once, each point once and named by its differences; the
    end of the last one finishes the sweep.
    """
    space = {"training.max_grad_norm": [0.5, 2.0], "training.batch_size": "16..32 step 16"}
    begin(database, ada, space=space, at_once=2, tags="a, b", priority=3)
    assert len(members(database, 1)) == 2
    sweep_submission.submit_due(database)
    assert len(members(database, 1)) == 2
    finish(database, 1, 0.25)
    sweep_submission.submit_due(database)
    assert [each[2:] for each in members(database, 1)] == [
        ("complete", 0.25), ("open", None), ("open", None),
    ]  # fmt: skip
    for run_id in (2, 3, 4):
        assert the_sweep(database)[1] == "running"
        finish(database, run_id, float(run_id))
        sweep_submission.submit_due(database)
    assert the_sweep(database)[1] == "finished"
    tried = [(each["training.max_grad_norm"], each["training.batch_size"])
             for _n, each, *_ in members(database, 1)]  # fmt: skip
    assert tried == [(0.5, 16), (0.5, 32), (2.0, 16), (2.0, 32)]
    with database.reading() as session:
        found = session.scalars(select(Run).order_by(Run.id)).all()
        assert [run.name for run in found][:2] == [
            "max_grad_norm=0.5, batch_size=16",
            "max_grad_norm=0.5, batch_size=32",
        ]
        assert {(run.tags, run.priority, run.owner_id) for run in found} == {("a, b", 3, ada.id)}
        assert found[3].config["training"]["max_grad_norm"] == 2.0
        assert sweeps.due(session) == []


@pytest.mark.slow
def test_two_servers_submit_no_run_twice(database: Database, ada: User, offered: None) -> None:
    """Two servers that repeatedly poll at the same moment submit one run for each point."""
    begin(database, ada, space={"training.batch_size": "1..12"}, at_once=1)
    with database.writing() as session:
        sweeps.get(session, 1, lock=True).at_once = 4
    for _ in range(4):
        start = threading.Barrier(3)

        def serve(start: threading.Barrier = start) -> None:
            start.wait()
            sweep_submission.submit_due(database)

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with database.reading() as session:
            waiting = session.scalars(select(Run.id).where(Run.status == Status.QUEUED)).all()
            assert len(waiting) == 4 or the_sweep(database)[0].submitted == 12
        for run_id in waiting:
            finish(database, run_id)
    sweep_submission.submit_due(database)
    assert [each[1]["training.batch_size"] for each in members(database, 1)] == list(range(1, 13))
    with database.reading() as session:
        assert len(session.scalars(select(Run.id)).all()) == 12
    assert the_sweep(database)[1] == "finished"


def test_a_kill_between_run_and_trial_leaves_neither(
    database: Database, ada: User, offered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction killed between run and trial stores neither, and is repeated once."""
    begin(database, ada)
    finish(database, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "add", _kill)
        with pytest.raises(KeyboardInterrupt):
            sweep_submission.submit_due(database)
    with database.reading() as session:
        assert len(session.scalars(select(Run.id)).all()) == 1
    sweep_submission.submit_due(database)
    assert [each[2] for each in members(database, 1)] == ["complete", "open"]


def test_a_grid_continues_after_one_of_its_runs_is_deleted(
    database: Database, settings: Settings, browser: TestClient, ada: User, offered: None
) -> None:
    """A deleted run's grid point counts as used, and only untried points remain."""
    begin(database, ada, at_once=1)
    finish(database, 1, 0.25)
    sweep_submission.submit_due(database)
    with database.writing() as session:
        trash.delete(session, 1, ada)
        trash.erase(session, 1, ada)
    erasure.erase(database, settings, open_store(settings), 1, threading.Event())
    for run_id in (2, 3):
        finish(database, run_id)
        sweep_submission.submit_due(database)
    tried = [each[1]["training.max_grad_norm"] for each in members(database, 1)]
    assert tried == [0.1, 1.0, None]
    assert the_sweep(database)[1] == "finished"
    page = browser.get("/sweeps/1").text
    assert "run 1, deleted permanently" in page
    assert "/compare?runs=2,3" in page
    assert 'href="/runs/1"' not in page
    with database.writing() as session:
        trash.delete(session, 2, ada)
    page = browser.get("/sweeps/1").text
    assert '2, in the <a href="/trash">trash</a>' in page
    assert 'href="/runs/2"' not in page


def _kill(*_: object) -> None:
    raise KeyboardInterrupt


def test_trials_without_a_finite_value_have_failed(
    database: Database, ada: User, offered: None
) -> None:
    """A trial fails if its run failed, diverged, applied no step or lacks the metric."""
    begin(database, ada, metric="val/accuracy", goal="", at_once=5, space={
        "training.batch_size": [1, 2, 3, 4, 5]})  # fmt: skip
    finish(database, 1, 0.5, Status.FAILED)
    finish(database, 3, 0.5)
    with database.writing() as session:
        run = claims.claim(session, 1, recipes=["digits"], precisions=["fp16"], free_devices=[0],
                          lease_seconds=60.0)  # fmt: skip
        assert run is not None
        queue.start(session, run.id, run.attempt)
    metrics = [make_metric(1, 0.9), make_metric(2, 0.75)]
    record(database, run, make_steps([2.0, 1.0]), events=metrics)
    with database.writing() as session:
        queue.end(session, run.id, run.attempt, Status.FINISHED)
    finish(database, 4, math.nan)
    with database.writing() as session:
        for run_id in (4, 5):
            runs.get(session, run_id, lock=True).skipped = 5 if run_id == 5 else 0
            session.add(LatestMetric(run_id=run_id, name="val/accuracy", step=5, value=0.1))
    finish(database, 5, 0.5)
    sweep_submission.submit_due(database)
    assert run.id == 2
    assert [each[2:] for each in members(database, 1)] == [
        ("failed", None), ("complete", 0.75), *3 * [("failed", None)],
    ]  # fmt: skip
    with database.reading() as session:
        tally = sweeps.tallies(session, [sweeps.get(session, 1)])[1]
        assert tally == sweeps.Tally(complete=1, failed=4, best=0.75)
        [best, *_] = sweeps.trials(session, sweeps.get(session, 1), best_first=True, limit=9)
        assert best[1].id == 2


def test_a_script_that_only_logs_has_the_loss_that_it_logs(
    database: Database, ada: User, offered: None
) -> None:
    """A script's logged loss is its result, unless its run has a recorded loss."""
    begin(database, ada, at_once=2, space={"training.batch_size": [1, 2]})
    with database.writing() as session:
        for run_id in (1, 2):
            session.add(LatestMetric(run_id=run_id, name="loss", step=5, value=0.25))
        runs.set_status(session, runs.get(session, 1, lock=True), Status.FINISHED)
    finish(database, 2, 0.5)
    sweep_submission.submit_due(database)
    assert [each[2:] for each in members(database, 1)] == [("complete", 0.25), ("complete", 0.5)]


@pytest.mark.slow
@pytest.mark.one_database
def test_random_points_are_those_of_the_seed(database: Database, ada: User, offered: None) -> None:
    """Random points depend on the seed only, not on server or time, and are within their bounds."""
    space = {
        "training.max_grad_norm": "loguniform(1e-4, 1)",
        "training.batch_size": "integers(1, 64)",
        "precision": "fp16, bf16",
    }
    begin(database, ada, kind="random", space=space, runs=6, at_once=6, seed=7)
    begin(database, ada, kind="random", space=space, runs=6, at_once=1, seed=7)
    for run_id in range(7, 12):
        finish(database, run_id)
        sweep_submission.submit_due(database)
    first, second = ([each[1] for each in members(database, n)] for n in (1, 2))
    assert first == second
    assert len({str(each) for each in first}) == 6
    assert all(1e-4 <= each["training.max_grad_norm"] <= 1 for each in first)
    assert all(type(each["training.batch_size"]) is int for each in first)


@pytest.mark.slow
@pytest.mark.one_database
def test_optuna_learns_from_the_rows(database: Database, ada: User, offered: None) -> None:
    """After ten ended trials Optuna suggests points near the best; a repeated poll after a kill
    suggests the same, and failed trials are reported as failed.
    """
    space = {"training.max_grad_norm": "loguniform(1e-4, 1e4)", "training.fused": "true, false"}
    begin(database, ada, kind="tpe", space=space, runs=30, at_once=2)
    with database.reading() as session:
        sweep = sweeps.get(session, 1)
        assert sweep_submission.next_point(session, sweep) == sweep_submission.next_point(
            session, sweep
        )
    for run_id in range(1, 31):
        with database.reading() as session:
            norm = runs.get(session, run_id).config["training"]["max_grad_norm"]
        is_lost = run_id in (3, 8)
        finish(database, run_id, math.nan if is_lost else math.log10(norm) ** 2)
        sweep_submission.submit_due(database)
    assert the_sweep(database)[1] == "finished"
    distances = [each[3] for each in members(database, 1) if each[2] == "complete"]
    assert len(distances) == 28
    assert sum(distances[-10:]) < sum(distances[:10])
    assert min(distances) < 0.1


def climb(database: Database, run_id: int, losses: list[float]) -> None:
    """Train a run and record these steps."""
    with database.writing() as session:
        run = claims.claim(session, 1, recipes=["digits"], precisions=["fp16"],
                             free_devices=range(64), lease_seconds=60.0)  # fmt: skip
        assert run is not None
        assert run.id == run_id
        queue.start(session, run.id, run.attempt)
    record(database, run, make_steps(losses))


@pytest.mark.one_database
def test_hyperband_gives_up_what_falls_behind(
    database: Database, browser: TestClient, ada: User, offered: None
) -> None:
    """Hyperband decides by rows only, so a repeated poll decides the same; a pruned run gets a
    checkpoint request and its own message, and the next point its slot.
    """
    with database.writing() as session:
        devices = [{**CPU, "index": index} for index in range(10)]
        session.get_one(Worker, 1).devices = devices
    space = {"training.max_grad_norm": "loguniform(1e-4, 1e4)"}
    begin(database, ada, kind="random", pruner="hyperband", space=space, runs=14, at_once=10)
    for run_id in range(1, 11):
        climb(database, run_id, [float(run_id)] * 14)
    sweep_submission.submit_due(database)
    assert not any(rows_of(database, 1, "reports"))  # a 27th of 400 steps is 14.8
    for run_id in range(1, 11):
        more(database, run_id, [float(run_id)] * 36)
    sweep_submission.submit_due(database)
    reports = rows_of(database, 1, "reports")
    assert [[each["rung"] for each in reported] for reported in reports] == [[1, 3]] * 10
    with database.reading() as session:
        sweep = sweeps.get(session, 1)
        behind = optuna_study.weak_trials(sweep, sweeps.all_trials(session, sweep), 0)
        asked = {run.id for run in session.scalars(select(Run)) if run.desired_state == "cancel"}
        assert 1 not in behind
        assert 3 <= len(behind) < 10
        assert asked == set(behind)
        assert {runs.get(session, each).status for each in behind} == {Status.STOPPING}
    sweep_submission.submit_due(database)
    assert len(members(database, 1)) == 10
    lost = max(behind)
    with database.writing() as session:
        queue.end(session, lost, 1, Status.CANCELLED)
    sweep_submission.submit_due(database)
    assert members(database, 1)[lost - 1][2:] == ("pruned", float(lost))
    assert len(members(database, 1)) == 11
    run = browser.get(f"/api/v1/runs/{lost}").json()
    assert (run["status"], run["outcome"]) == ("cancelled", "pruned")
    assert "Pruned by sweep 1: after 1/" in browser.get(f"/runs/{lost}").text
    listed = browser.get("/api/v1/runs?filter=status:pruned").json()["runs"]
    assert [each["id"] for each in listed] == [lost]
    page = browser.get("/sweeps/1?sort=value").text
    assert "1 pruned" in page
    assert browser.get("/api/v1/sweeps/1").json()["pruned"] == 1


@pytest.mark.slow
def test_a_person_who_cancels_gives_nothing_up(
    database: Database, ada: User, offered: None
) -> None:
    """In a Hyperband sweep a run cancelled by a user is not a pruned trial; nor is a finished one
    that was cancelled too late; and a non-finite loss is not a result."""
    begin(database, ada, kind="random", pruner="hyperband", space=LRS, runs=3, at_once=1)
    climb(database, 1, [math.nan] * 20)
    sweep_submission.submit_due(database)
    assert rows_of(database, 1, "reports") == [[]]
    with database.writing() as session:
        run_control.cancel(session, 1, ada)
        queue.end(session, 1, 1, Status.CANCELLED)
    sweep_submission.submit_due(database)
    assert members(database, 1)[0][2] == "failed"
    climb(database, 2, [0.5] * 20)
    with database.writing() as session:
        assert run_control.prune(session, 2, "why")
        assert not run_control.prune(session, 2, "again")
        session.get_one(Trial, (1, 2)).pruned_step = 20
        queue.end(session, 2, 1, Status.FINISHED)
    sweep_submission.submit_due(database)
    assert members(database, 1)[1][2:] == ("complete", 0.5)


def more(database: Database, run_id: int, losses: list[float]) -> None:
    with database.reading() as session:
        run = runs.get(session, run_id)
    record(database, run, make_steps(losses, first=run.step + 1))


def rows_of(database: Database, sweep_id: int, column: str) -> list[Any]:
    with database.reading() as session:
        query = select(Trial).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
        return [getattr(row, column) for row in session.scalars(query)]


@pytest.mark.slow
def test_a_hyperband_sweep_of_an_earlier_version_continues(
    database: Database, ada: User, offered: None
) -> None:
    """A Hyperband sweep of an earlier version becomes one with a pruner: its reports stay, and a
    run that falls behind is pruned.
    """
    with database.writing() as session:
        devices = [{**CPU, "index": index} for index in range(10)]
        session.get_one(Worker, 1).devices = devices
    space = {"training.max_grad_norm": "loguniform(1e-4, 1e4)"}
    begin(database, ada, kind="random", pruner="hyperband", space=space, runs=20, at_once=10)
    begin(database, ada, kind="tpe", space=space, runs=3)
    for run_id in range(1, 11):
        climb(database, run_id, [float(run_id)] * 15)
    sweep_submission.submit_due(database)
    reports = rows_of(database, 1, "reports")
    pruner = the_sweep(database)[0].pruner
    command.downgrade(database.migrations(), "0054")
    with database.engine.connect() as connection:
        kinds = connection.execute(sql("SELECT kind FROM sweeps ORDER BY id")).scalars().all()
        assert kinds == ["hyperband", "tpe"]
    command.upgrade(database.migrations(), "head")
    assert (the_sweep(database)[0].kind, the_sweep(database)[0].pruner) == ("random", pruner)
    assert the_sweep(database, 2)[0].pruner is None
    assert rows_of(database, 1, "reports") == reports
    for run_id in range(1, 11):
        more(database, run_id, [float(run_id)] * 35)
    sweep_submission.submit_due(database)
    with database.reading() as session:
        stopping = [run.id for run in session.scalars(select(Run)) if run.desired_state == "cancel"]
    assert stopping
    assert 1 not in stopping


def test_failed_points_are_run_again(database: Database, ada: User, offered: None) -> None:
    """Failed points are run again as new runs, a few at once, before untried points."""
    begin(database, ada, space={"training.steps": [1, 2, 3, 4]}, at_once=2)
    for run_id in (1, 2):
        finish(database, run_id, status=Status.FAILED)
    sweep_submission.submit_due(database)
    with database.writing() as session:
        sweep_submission.retry(session, 1, session.get_one(User, ada.id))
    states = [each[2] for each in members(database, 1)]
    assert states == ["waiting", "waiting", "open", "open"]
    finish(database, 3)
    sweep_submission.submit_due(database)
    assert [each[2] for each in members(database, 1)] == ["open", "waiting", "complete", "open"]
    assert the_sweep(database)[1] == "running"
    for run_id in (4, 5, 6):
        finish(database, run_id, 0.5)
        sweep_submission.submit_due(database)
    assert [each[1:3] for each in members(database, 1)] == [
        ({"training.steps": steps}, "complete") for steps in (1, 2, 3, 4)
    ]
    assert the_sweep(database)[1] == "finished"
    with database.writing() as session:
        sweeps.get(session, 1, lock=True).status = "failed"
    with database.writing() as session, pytest.raises(Conflict):
        sweep_submission.retry(session, 1, session.get_one(User, ada.id))


def test_a_sweep_is_paused_resumed_extended_and_cancelled(
    database: Database, ada: User, offered: None
) -> None:
    """A paused sweep submits nothing, added values add points, and cancelling it ends open runs."""
    begin(database, ada)
    with database.writing() as session:
        sweeps.pause(session, 1)
    finish(database, 1)
    sweep_submission.submit_due(database)
    assert [each[2] for each in members(database, 1)] == ["complete"]
    with database.writing() as session:
        sweeps.resume(sweeps.get(session, 1, lock=True))
        sweep_submission.continue_sweep(session, 1)
        space = {"training.max_grad_norm": "0.1, 5"}
        assert sweep_submission.extend(session, 1, ada, space=space).runs_total == 4
    for run_id in (2, 3):
        finish(database, run_id)
        sweep_submission.submit_due(database)
    assert [each[1]["training.max_grad_norm"] for each in members(database, 1)] == [0.1, 1, None, 5]
    with database.writing() as session:
        sweeps.cancel(session, 1, ada)
        assert sweeps.cancel(session, 1, ada).status == "cancelled"
    assert runs_of(database, 4) == (Status.CANCELLED, "cancelled by ada")
    sweep_submission.submit_due(database)
    assert [each[2] for each in members(database, 1)] == ["complete"] * 3 + ["failed"]
    with database.writing() as session, pytest.raises(Conflict):
        sweep_submission.extend(session, 1, ada, space=space)


def runs_of(database: Database, run_id: int) -> tuple[Status, str | None]:
    with database.reading() as session:
        run = runs.get(session, run_id)
        return run.status, run.stop_reason


def test_a_random_search_takes_more_runs(database: Database, ada: User, offered: None) -> None:
    """A finished random search continues with more runs; neither it nor a grid exceeds the
    limit.
    """
    begin(database, ada, kind="random", runs=1)
    finish(database, 1)
    sweep_submission.submit_due(database)
    assert the_sweep(database)[1] == "finished"
    with database.writing() as session:
        sweep_submission.extend(session, 1, ada, runs=2)
    assert the_sweep(database)[1] == "running"
    assert len(members(database, 1)) == 2
    begin(database, ada, runs=2)
    for sweep_id, more, text in (
        (1, 1000, "1000 in all"),
        (2, 2, "3 in all"),
        (2, 0, "allowed: either"),
    ):
        with database.writing() as session, pytest.raises(Invalid, match=text):
            sweep_submission.extend(session, sweep_id, ada, runs=more)


@looped("changes, field, text", [
        ({"space": {}}, "space", "0 settings"),
        ({"space": {"training.lrr": "1, 2"}}, "training.lrr", "no such setting"),
        ({"space": {"training.batch_size": "16, 9999"}}, "training.batch_size", "9999 is not"),
        ({"space": {"training.batch_size": "16, 16"}}, "training.batch_size", "16 twice"),
        ({"space": {"training.batch_size": "1..9 step 0"}}, "training.batch_size", "step S"),
        ({"space": {"training.steps": "1..9999"}}, "training.steps", "1,000 values"),
        ({"space": {"training.steps": "1e400..1e999 step 1e-9"}}, "training.steps", "1,000 values"),
        ({"space": {"training.batch_size": "integers(1, 9)"}}, "training.batch_size", "in a grid"),
        ({"space": {"training.max_grad_norm": "0.1, x"}}, "training.max_grad_norm", "x is not"),
        ({"space": {"training.max_grad_norm": ""}}, "training.max_grad_norm", "it is empty"),
        ({"space": {"training.fused": "true, maybe"}}, "training.fused", "maybe"),
        ({"space": {"modules.fp32": "a, b"}}, "modules.fp32", "as JSON"),
        ({"space": {"precision": "fp16, fp8"}}, "precision", "allowed: one of fp16"),
        ({"kind": "random", "space": {"training.max_grad_norm": "loguniform(0, 1)"}},
         "training.max_grad_norm", "0 is not valid"),
        ({"kind": "random", "space": {"training.max_grad_norm": "uniform(1, 0)"}},
         "training.max_grad_norm",
         "uniform(1, 0): the first bound is greater than the second; allowed: two numbers"),
        ({"kind": "random", "space": {"training.max_grad_norm": "uniform(1, 1)"}},
         "training.max_grad_norm", "lower one first"),
        ({"kind": "random", "space": {"training.max_grad_norm": "normal(1, -2)"}},
         "training.max_grad_norm", "a standard deviation greater than 0"),
        ({"kind": "random", "space": {"training.max_grad_norm": "beta(1, 2)"}},
         "training.max_grad_norm", "beta(…) is not valid"),
        ({"kind": "random", "space": {"training.max_grad_norm": "uniform(1, 2) step -1"}},
         "training.max_grad_norm", "step is -1"),
        ({"space": {"training.max_grad_norm": "1, 2 when precision = fp16"}},
         "training.max_grad_norm", "not searched"),
        ({"space": {"training.max_grad_norm": "1, 2 when precision = fp32",
                    "precision": "fp16, bf16"}},
         "training.max_grad_norm", "is never true"),
        ({"space": {"training.max_grad_norm": {"values": [1, 2], "probabilities": [1]}}},
         "training.max_grad_norm", "one number for each value"),
        ({"pruner": "median", "runs": 301, "kind": "random"}, "runs", "from 1 to 300"),
        ({"kind": "random", "space": {"training.batch_size": "uniform(1, 2)"}},
         "training.batch_size", "integers(a, b)"),
        ({"kind": "random", "space": {"training.max_grad_norm": [math.inf]}},
         "training.max_grad_norm", "inf"),
        ({"kind": "annealing"}, "kind", "grid, random, tpe"),
        ({"metric": "val/thing", "goal": ""}, "goal", "unknown whether a lower"),
        ({"goal": "best"}, "goal", "minimize or maximize"),
        ({"at_once": 0}, "at_once", "from 1 to 100"),
        ({"runs": 1001}, "runs", "from 1 to 1000"),
        ({"seed": -1}, "seed", "from 0"),
        ({"space": {"training.steps": "1..100", "training.batch_size": "1..11"}},
         "space", "1,100 points"),
        ({"config": {"training": {"batch_size": 0}}}, "training.batch_size", "from 1 to"),
        ({"config": {"lab": {"task": "precision_plan"}}}, "lab.task", "precision_plan is not"),
        ({"space": {"lab.task": "train, precision_plan"}}, "lab.task", "searched"),
        ({"recipe": "none"}, "recipe", "none"),
        ({"priority": 999}, "priority", "-100 to 100"),
    ])  # fmt: skip
@pytest.mark.only_on("sqlite")
def test_errors_are_named(
    database: Database, ada: User, offered: None, changes: dict[str, Any], field: str, text: str
) -> None:
    """An invalid sweep is refused with the field, its value and the allowed values."""
    with pytest.raises(Invalid) as raised:
        begin(database, ada, **changes)
    assert text in raised.value.errors[field]
    with database.reading() as session:
        assert session.scalars(select(Sweep)).all() == []
