"""Runs that may be preempted: submitted by API, command, forms, presets and sweeps."""

import re

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from app.compare import comparison
from db.database import Database
from db.queue import preemption, queue
from db.tables import Run, Status, User
from tests.app.conftest import start_run, submit
from tests.app.submission.new_run_pages_made import FORM
from tests.site import type_command

RUN = {"recipe": "digits", "preemptible": True}
CHECKED = re.compile(r'<input[^>]*name="preemptible"[^>]* checked>')


def preemptible(database: Database) -> list[bool]:
    """Return whether each run may be preempted."""
    with database.reading() as session:
        return list(session.scalars(select(Run.preemptible).order_by(Run.id)))


def test_it_is_off_by_default_and_kept_by_what_repeats_a_run(
    database: Database, ada: User, offered: None, script: TestClient, browser: TestClient
) -> None:
    """Preemption is off by default; API, form, clone, preset, comparison and sweep keep it, and the
    run's page shows it.
    """
    for body in ({"recipe": "digits"}, RUN):
        run = script.post("/api/v1/runs", json=body).json()
        assert run["preemptible"] == body.get("preemptible", False)
        assert (" preemptible" in browser.get(f"/runs/{run['id']}").text) == run["preemptible"]
        form = browser.get(f"/runs/new?from={run['id']}").text
        assert bool(CHECKED.search(form)) == run["preemptible"]
    browser.post("/runs", data=FORM)
    browser.post("/runs", data=FORM | {"preemptible": "true"})
    assert preemptible(database) == [False, True] * 2
    preset = {"preset": "urgent", "preemptible": "true", "project": ""}
    browser.post("/presets", data=FORM | preset)
    script.post("/api/v1/presets", json=RUN | {"name": "other"})
    listed = script.get("/api/v1/presets").json()
    assert [row["preemptible"] for row in listed] == [True, True]
    assert CHECKED.search(browser.get(f"/runs/new?preset={listed[0]['id']}").text)
    with database.writing() as session:
        [twin, *_others] = comparison.queue(session, ada, session.get_one(Run, 2))
        assert twin.preemptible
    script.post("/api/v1/sweeps", json=RUN | {"space": {"training.max_grad_norm": [1.0]}})
    assert set(preemptible(database)[4:]) == {True}
    form = browser.post("/sweeps/new", data=FORM | {"preemptible": "true"}).text
    assert CHECKED.search(form)


@pytest.mark.parametrize("kind", ["command", "lab"])
def test_only_trainings_may_be_preempted(offered: None, script: TestClient, kind: str) -> None:
    """Commands and measurements cannot be preempted, since they would start from the beginning."""
    body = {
        "command": {"command": {"line": "true"}},
        "lab": {"recipe": "digits", "config": {"lab": {"task": "precision_plan"}}},
    }[kind]
    answer = script.post("/api/v1/runs", json=body | {"preemptible": True})
    assert "allowed: for trainings" in answer.json()["errors"]["preemptible"]


def test_a_preempted_run_says_so_wherever_it_is_shown(
    database: Database, ada: User, script: TestClient, browser: TestClient, offered: None
) -> None:
    """History, list and page show that a run is being preempted, and why it is queued again."""
    low = start_run(database, ada, preemptible=True)
    high = submit(database, ada, priority=1)
    preemption.preempt_due(database, runs_per_user=0, devices_per_user=0)
    text = f"preempted by run {high.id}"
    stopping = script.get(f"/api/v1/runs/{low.id}").json()
    assert (stopping["status"], stopping["statuses"][-1]["reason"]) == ("pausing", text)
    with database.writing() as session:
        queue.end(session, low.id, 1, Status.QUEUED)
    waiting = script.get(f"/api/v1/runs/{low.id}").json()
    assert waiting["waiting"].endswith(f"; {text}")
    for path in ("/runs", f"/runs/{low.id}"):
        assert text in browser.get(path).text


def test_commands_have_it(
    database: Database, token: str, address: str, offered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, presets and sweeps can be submitted with --preemptible by the command line."""
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)
    for line in (
        "run submit digits",
        "run submit digits --preemptible",
        "preset save urgent digits --preemptible",
        "run submit --preset urgent",
        "sweep begin digits --search training.max_grad_norm=0.5 --preemptible",
    ):
        assert type_command(*line.split()) == 0
    assert preemptible(database) == [False, True, True, True]
