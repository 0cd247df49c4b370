"""Cost of requests for a run or the list, with long runs and many runs."""

import itertools

import pytest
from sqlalchemy import insert
from starlette.testclient import TestClient

from app.live import run_updates
from app.runs.summary import summarise_all
from db.database import Database
from db.runs import history, runs
from db.settings import Settings
from db.tables import Diagnosis, Membership, Project, Run, ScalerEvent, Status, User
from db.telemetry import series, telemetry
from tests.app.conftest import CONFIG, submit
from tests.app.looks_made import collect_queries, count_instructions
from tests.db.telemetry.telemetry_made import (
    make_metric,
    make_replay,
    make_skip,
    make_steps,
    record,
)
from tests.marks import extended

pytestmark = [pytest.mark.slow, pytest.mark.sql]


def fill(database: Database, run: Run, rows: int) -> None:
    """Give a run a long history of metrics, events and replays."""
    mine = {"run_id": run.id, "step": 0}
    scaler = {"kind": "growth", "scale_before": 1.0, "scale_after": 2.0, "culprits": []}
    kinds = (
        (ScalerEvent, scaler),
        (Diagnosis, {"kind": "replay", "content": make_replay(1)}),
    )
    points = [make_metric(step, 1.0, "val/loss") for step in range(10**6, 10**6 + rows)]
    record(database, run, events=points)
    with database.writing() as session:
        for table, values in kinds:
            many = [{**mine, **values, "step": -1000 - step} for step in range(rows)]
            session.execute(insert(table), many)


@pytest.mark.only_on("sqlite")
def test_an_update_costs_as_much_as_is_new(
    database: Database, running: Run, settings: Settings
) -> None:
    """A run with 3,000 points, events and replays needs no more reads than a new one."""
    look = run_updates.of_run(database, settings, running.id)
    costs = []
    for steps in itertools.count(1):
        record(database, running, make_steps([1.0], first=2 * steps - 1))
        with database.reading() as session:
            cursor = str(history.cursor_now(session, runs.get(session, running.id)))
        assert look(cursor) is None
        events = [make_metric(2 * steps, 0.5), make_skip(2 * steps, "a.b")]
        record(
            database,
            running,
            make_steps([1.0], first=2 * steps, skipped=[2 * steps]),
            events=events,
        )
        with count_instructions(database) as hundreds:
            assert look(cursor) is not None
        costs.append(hundreds[0])
        if steps == 2:
            break
        fill(database, running, 3000)
    assert costs[1] < costs[0] + 30, costs


@pytest.mark.only_on("sqlite")
def test_forks_and_groups_are_found_by_an_index(
    database: Database, running: Run, ada: User
) -> None:
    """Runs of one parent or group are found by an index."""
    for _ in range(300):
        submit(database, ada)
    with count_instructions(database) as hundreds, database.reading() as session:
        assert runs.forks(session, running.id) == []
    assert hundreds[0] < 5


@pytest.mark.one_database
def test_a_list_of_many_takes_few_queries(
    database: Database, running: Run, ada: User, settings: Settings
) -> None:
    """Sixty runs, some of them queued behind others, take as many queries as two."""
    for n in range(60):
        submit(database, ada, after_id=running.id if n % 2 else None)
    flush = telemetry.Flush(steps=[make_steps([1.0] * 9, skipped=[2])])
    with database.writing() as session:
        telemetry.record(session, running.id, running.attempt, flush)
    with collect_queries(database) as statements, database.reading() as session:
        rows = runs.newest(session, limit=200)
        summaries = summarise_all(session, rows, settings)
        lines = series.sparklines(session, [run for run, _owner in rows])
    assert len(summaries) == 61
    assert summaries[-1].health is not None
    assert lines[running.id] == [1.0] * 9
    assert [run.waiting for run in summaries[:2]] == [
        f"it waits for the end of run {running.id} ({running.name})",
        "58 runs are ahead: 2 (digits-fp16), 3 (digits-fp16), 4 (digits-fp16) and 55 more",
    ]
    assert len(statements) <= 10, statements
    assert not any("workers.recipes" in statement for statement in statements)


@pytest.mark.one_database
def test_curves_of_many_runs_take_as_many_queries_as_those_of_two(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Curves of ten short runs with a metric take as many queries as those of two, also zoomed in,
    and each run is read once.
    """
    events = [make_metric(2, 0.5)]
    for _ in range(10):
        run = submit(database, ada)
        with database.writing() as session:
            run = session.get_one(Run, run.id)
            run.status, run.attempt = Status.RUNNING, 1
        record(database, run, make_steps([1.0] * 9, skipped=[2]), events=events)
    script.get("/api/v1/tokens")  # so that the token's use is noted by now

    def queries(address: str, **query: object) -> list[str]:
        with collect_queries(database) as statements:
            assert script.get(f"/api/v1/{address}", params=query).status_code == 200  # type: ignore[arg-type]
        return statements

    curves = {"series": ["loss", "val/accuracy"], "first": 3}
    of_two = queries("comparison/series", runs="1,2", **curves)
    of_ten = queries("comparison/series", runs="1,2,3,4,5,6,7,8,9,10", **curves)
    assert len(of_ten) == len(of_two) <= 9, of_ten
    assert len(queries("runs/1/series")) <= 12
    of_run = queries("runs/1")
    assert sum("FROM runs" in each and "runs.config" in each for each in of_run) == 1, of_run
    assert len(of_run) <= 10, of_run


@pytest.mark.parametrize("whose", ["a member's", *extended(["an admin's"])])
@pytest.mark.one_database
def test_a_page_of_200_runs_takes_eleven_queries(
    database: Database,
    ada: User,
    offered: None,
    browser: TestClient,
    script: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    whose: str,
) -> None:
    """A page of 200 runs takes eleven queries for sign-in, permissions, the trash and all that a
    row can show.
    """
    monkeypatch.setattr("app.runs.list_pages.PAGE_SIZE", 200)
    retrying = {**CONFIG, "scaler": {**CONFIG["scaler"], "retry_in_fp32": True}}
    for n in range(200):
        submit(database, ada, config=retrying, after_id=n or None)
    with database.writing() as session:
        for run_id in range(1, 200):
            run = session.get_one(Run, run_id)
            run.status, run.step, run.started_at = Status.PAUSED, 100, 1.0
            session.add(run)
        for project in ("", "vision"):
            session.merge(Project(name=project))
            session.merge(Membership(user_id=ada.id, project=project, role="maintainer"))
        session.get_one(User, ada.id).is_admin = whose == "an admin's"
    script.get("/api/v1/tokens")  # so that the token's use is noted by now
    for client, address in ((browser, "/runs"), (script, "/api/v1/runs?limit=200")):
        with collect_queries(database) as statements:
            assert client.get(address).text.count("digits-fp16") >= 200
        assert len(statements) <= 11, (address, statements)
