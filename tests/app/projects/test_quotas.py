"""Limits of projects and users, set by admins and applied to submissions."""

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.sweeps import sweep_submission
from db.database import Database
from db.queue import queue, quotas
from db.settings import Settings
from db.sweeps import sweeps
from db.tables import Project, User
from tests.app.conftest import csrf_token, submit
from tests.app.submission.new_run_pages_made import FORM
from tests.app.sweeps.sweep_submission_made import begin, members

pytestmark = pytest.mark.sql_sample

RUN = {"recipe": "digits"}


@pytest.fixture
def full(database: Database, ada: User, offered: None) -> None:
    """Fill the queue of the Default project, which may have one run."""
    with database.writing() as session:
        quotas.set_limits(session.get_one(Project, ""), {"queued": 1})
    submit(database, ada)


def test_an_admin_sets_limits(script: TestClient, browser: TestClient) -> None:
    """The API and the page set limits; the page shows use and limit and preserves invalid input."""
    limits = {"devices": 8, "queued": None, "stored_gib": 0.5, "share": 2.0}
    result = script.put("/api/v1/projects/quota", json={"name": "", **limits}).json()
    use = {"devices_used": 0, "queued_used": 0, "stored_bytes": 0}
    assert result == {"name": "", "viewers_download": True, **limits, **use}
    assert script.get("/api/v1/projects").json() == [result]
    wrong = script.put("/api/v1/projects/quota", json={"name": "", "devices": 1.5})
    assert (wrong.status_code, list(wrong.json()["errors"])) == (422, ["devices"])
    typed = {"project": "", "devices": "few", "queued": "3", "share": "1"}
    typed["csrf_token"] = csrf_token(browser)
    refused = browser.post("/projects/quota", data=typed)
    assert refused.status_code == 422
    assert "&#39;few&#39; is not valid; allowed: a whole number from 0" in refused.text
    assert 'value="few"' in refused.text
    browser.post("/projects/quota", data=typed | {"devices": ""})
    page = browser.get("/projects").text
    assert "<b>0</b> devices, <b>0</b> of 3 queued runs" in page


def test_a_submission_beyond_a_quota_is_rejected(
    full: None, script: TestClient, browser: TestClient, database: Database
) -> None:
    """A submission beyond a quota is rejected with the field by API, form and comparison."""
    answer = script.post("/api/v1/runs", json=RUN)
    assert (answer.status_code, answer.json()["code"]) == (409, "over_quota")
    said = "Default project has 1 run in the queue, its limit"
    assert answer.json()["errors"]["project"].startswith(said)
    form = browser.post("/runs", data=FORM)
    assert (form.status_code, said in form.text) == (422, True)
    with database.writing() as session:
        quotas.set_limits(session.get_one(Project, ""), {"queued": 2})
    assert script.post("/api/v1/runs/1/comparison").status_code == 409
    with database.reading() as session:
        assert queue.list_queued(session) == [1]


def test_a_user_has_so_many_queued(
    app: FastAPI, settings: Settings, script: TestClient, offered: None
) -> None:
    """A setting limits a user's queued runs over all projects."""
    app.state.settings = settings.model_copy(update={"queued_per_user": 1})
    assert script.post("/api/v1/runs", json=RUN).status_code == 201
    answer = script.post("/api/v1/runs", json=RUN)
    assert (answer.status_code, list(answer.json()["errors"])) == (409, ["owner"])


def test_a_sweep_waits_for_quota(
    full: None, database: Database, ada: User, browser: TestClient
) -> None:
    """A sweep without quota waits instead of failing, its page gives the reason, and it continues
    automatically.
    """
    begin(database, ada)
    assert members(database, 1) == []
    assert "It waits before it submits more: Default project has 1" in browser.get("/sweeps/1").text
    with database.writing() as session:
        queue.fail_unclaimable(session, 1, "over")
    sweep_submission.submit_due(database)
    assert len(members(database, 1)) == 1
    sweep_submission.submit_due(database, queued_per_user=1)
    assert len(members(database, 1)) == 1
    with database.reading() as session:
        assert sweeps.get(session, 1).status == sweeps.RUNNING
