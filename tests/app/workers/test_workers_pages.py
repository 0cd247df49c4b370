"""The pages of workers: the grid of their devices, and actions on them."""

import html
import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import insert, update
from starlette.testclient import TestClient

from app.live.worker_updates import of_workers
from db.access import accounts, permissions, projects
from db.access.permissions import Grants
from db.database import Database
from db.queue import workers
from db.tables import Run, RunNode, SystemSample, User, Worker
from tests.app.auth.permissions_made import script_of
from tests.app.conftest import CPU, submit
from tests.app.looks_made import collect_queries
from tests.db.conftest import add_worker
from tests.site import type_command

GPU = {**CPU, "kind": "cuda", "name": "H200", "memory_bytes": 80 * 2**30}


def add_gpus(database: Database, name: str, count: int) -> Worker:
    return add_worker(database, name, [], [{**GPU, "index": index} for index in range(count)])


def test_a_worker_shows_devices_and_versions(offered: None, browser: TestClient) -> None:
    """A worker's page has its runs, devices and versions; a missing worker is reported."""
    page = browser.get("/workers/1").text
    assert "7.45 GiB" in page
    assert "forked from" not in page
    assert "torch 2" in page
    assert "There is no worker 9." in browser.get("/workers/9").text


def test_the_memory_of_a_warm_process_is_shown(
    database: Database, offered: None, browser: TestClient
) -> None:
    """The worker's page and the API have the memory of its warm process, from its last
    heartbeat.
    """
    for memory in (3 * 2**28, None):
        with database.single_write() as session:
            workers.heartbeat(session, 1, memory)
        [listed] = browser.get("/api/v1/workers").json()["workers"]
        assert listed["warm_memory_bytes"] == memory
        assert ("forked from: 768 MiB" in browser.get("/workers/1").text) == bool(memory)


def test_a_recipe_that_lacks_packages_is_not_offered_and_says_why(
    database: Database, offered: None, browser: TestClient
) -> None:
    """A recipe that lacks packages is not offered; the worker's page has the pip command."""
    needs = "torchvision: pip install 'halfstep-service[images]'"
    add_worker(database, "w2", [{"name": "images", "needs": needs}])
    assert f"images needs {needs}" in html.unescape(browser.get("/workers/2").text)
    form = browser.get("/runs/new").text
    assert "recipe=digits" in form
    assert "recipe=images" not in form


def test_the_grid_says_what_runs_where_and_follows_it(
    database: Database, ada: User, browser: TestClient, running: Run
) -> None:
    """The grid shows run, utilization and memory of each device, without names of runs in hidden
    projects.

    Updates have only changed rows.
    """
    two = add_gpus(database, "w2", 2)
    lease = {"run_id": running.id, "attempt": 2, "lease_expires_at": 2.0**33}
    with database.writing() as session:
        session.add(RunNode(node=0, worker_id=two.id, devices=[1], **lease))
        for device, used in ((-1, 0.1), (1, 0.934)):
            sample = {"run_id": 1, "elapsed_ms": 4000, "memory_bytes": 41 * 2**30}
            sample["temperature_celsius"] = None if device < 0 else 61.4
            session.add(SystemSample(device=device, utilization=used, **sample))
        seen = permissions.grants(session, session.merge(ada))
        unseen = Grants(user_id=99, is_admin=False, permissions={})
    page = browser.get("/workers").text
    assert page.count('<a href="/runs/1">run 1</a>') == 2
    assert "93 % · 41 GiB · 61 °C" in page
    assert page.count(" 0</b>: free<") == 1
    cursor = page.partition('data-cursor="')[2].partition('"')[0]
    look = of_workers(database, seen)
    assert look(cursor) is None
    with database.writing() as session:
        workers.drain(session, two.id)
    news = look(cursor)
    assert news is not None
    result = json.loads(news.data)
    assert result["keys"] == ["1", "2"]
    assert 'data-key="2"' in result["html"]
    assert "drained" in result["html"]
    assert 'data-key="1"' not in result["html"]
    others = of_workers(database, unseen)("")
    assert others is not None
    assert others.data.count("in use") == 2
    assert "run 1" not in others.data


def test_two_hundred_workers_cost_ten_queries(
    database: Database, ada: User, browser: TestClient, running: Run
) -> None:
    """The workers' page takes ten queries for any number of devices and runs."""
    devices = [{**GPU, "index": index} for index in range(8)]
    known: dict[str, Any] = {"host": "h", "pid": 1, "recipes": [], "versions": {}}
    with database.writing() as session:
        rows = [{"name": f"w{n:03}", "devices": devices, **known} for n in range(2, 201)]
        session.execute(insert(Worker), rows)
        session.execute(
            insert(RunNode),
            [
                {"run_id": 1, "attempt": n, "node": 0, "worker_id": n, "devices": [*range(8)]}
                for n in range(2, 201)
            ],
        )
    browser.get("/workers")
    with collect_queries(database) as statements:
        page = browser.get("/workers").text
    assert page.count("<li data-used") == 199 * 8 + 1
    assert len(statements) <= 10, statements


def test_the_queue_is_below_the_grid_in_order(
    app: FastAPI, database: Database, ada: User, browser: TestClient, running: Run
) -> None:
    """Queued runs are listed in order with reasons; runs of hidden projects have no name."""
    with database.writing() as session:
        projects.make(session, "hush")
        other = accounts.make_user(session, "other")
        projects.set_role(session, other, "", "viewer")
    submit(database, ada, name="<i>later</i>")
    submit(database, ada, name="sooner", priority=5, project="hush")
    page = browser.get("/workers").text
    queue = page.partition("data-queue")[2]
    assert re.findall(r'<tr data-key="(\d+)"', queue) == ["3", "2"]
    assert "&lt;i&gt;later&lt;/i&gt;" in queue
    used = f'<a href="/runs/1">1 ({running.name})</a>'
    assert f"it is next: the only device is used by run {used}" in queue
    assert '1 run is ahead: <a href="/runs/3">3 (sooner)</a>' in queue
    unseen = script_of(app, database, other).get("/workers").text.partition("data-queue")[2]
    assert "sooner" not in unseen
    assert re.findall(r'<td class="number">(\d)</td><td class="name">', unseen) == ["2"]
    assert "of 2 queued runs" in unseen
    assert "1 run is ahead</td>" in unseen


def test_operators_drain_a_worker_by_page_api_and_command(
    database: Database,
    offered: None,
    browser: TestClient,
    script: TestClient,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A drained worker can be made to claim again; page, list and audit log show it."""
    assert browser.post("/workers/1/drain", data={"stop": "true"}).status_code == 303
    assert "drained, stops" in browser.get("/workers").text
    assert "Undrain" in browser.get("/workers/1").text
    (state,) = script.get("/api/v1/workers").json()["workers"]
    assert (state["drained_at"] > 0, state["drain_stops"]) == (True, True)
    assert browser.post("/workers/1/undrain").status_code == 303
    monkeypatch.setenv("HALFSTEP_URL", address)
    token = script.headers["authorization"].removeprefix("Bearer ")
    monkeypatch.setenv("HALFSTEP_TOKEN", token)
    for words, said in (
        (["drain", "w1"], "up, drained"),
        ([], "up, drained"),
        (["list"], "up, drained"),
        (["undrain", "w1"], "up"),
    ):
        assert type_command("workers", *words) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert (line[:2], line.endswith(said)) == ("w1", True)
    assert type_command("workers", "drain", "w9") == 2
    assert "name is 'w9'; allowed: w1" in capsys.readouterr().err
    audit_events = [each["action"] for each in script.get("/api/v1/audit").json()["audit_events"]]
    assert [each for each in audit_events if "/drain" in each or "/undrain" in each] == [
        "POST /api/v1/workers/1/undrain",
        "POST /api/v1/workers/1/drain",
        "POST /workers/1/undrain",
        "POST /workers/1/drain",
    ]


def test_an_outdated_worker_is_marked_with_the_command_that_helps(
    database: Database, offered: None, browser: TestClient
) -> None:
    """An outdated worker is marked by both pages and the API with the command that updates it, and
    its recipes are not offered.
    """
    assert "outdated" not in browser.get("/workers").text + browser.get("/workers/1").text
    with database.writing() as session:
        session.execute(update(Worker).values(versions={"torch": "2.13.0", "protocol": "0"}))
    assert "outdated" in browser.get("/workers").text
    page = html.unescape(browser.get("/workers/1").text)
    assert "pip install --upgrade 'halfstep-service[worker]'" in page
    [listed] = browser.get("/api/v1/workers").json()["workers"]
    assert (listed["alive"], listed["outdated"]) == (True, True)
    for path in ("/recipes", "/runs/new", "/sweeps/new"):  # where its recipes would be
        page = browser.get(path).text
        assert "Worker w1 has an earlier version" in page
        assert "Digits" not in page
    assert browser.get("/recipes/digits").status_code == 404
    assert "recipe=digits" not in browser.get("/runs/new").text
