"""Reasons why a run is queued: earlier runs that the user may see."""

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.live import run_updates
from db.access import accounts, people, permissions, projects
from db.database import Database
from db.settings import Settings
from db.tables import User
from tests.app.auth.permissions_made import script_of
from tests.app.conftest import offer_digits, start_run, submit

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def other(app: FastAPI, database: Database, ada: User) -> TestClient:
    """A user who can see only the Default project."""
    with database.writing() as session:
        projects.make(session, "hush")
        user = accounts.make_user(session, "other")
        projects.set_role(session, user, "", "viewer")
    return script_of(app, database, user)


def waiting(script: TestClient, run_id: int) -> str:
    """Return the pending reason of a queued run, after checking that it names its parts in
    order.
    """
    result = script.get(f"/api/v1/runs/{run_id}").json()
    text = rest = str(result["waiting"])
    for each in result["waiting_for"]:
        assert each["label"].startswith(str(each["id"]))
        before, label, rest = rest.partition(each["label"])
        assert label, (text, before)
    return text


def test_runs_ahead_are_named_to_who_sees_them(
    database: Database, ada: User, browser: TestClient, other: TestClient
) -> None:
    """At most three earlier runs are named, the next first, with links on the page; of hidden runs
    only the number is given.
    """
    offer_digits(database)
    submit(database, ada, name="hidden-one", project="hush")
    submit(database, ada, name="lr=0.1")
    submit(database, ada, name="<b>5 (x)")
    submit(database, ada, name="long" * 20)
    last = submit(database, ada)
    label = f"4 ({('long' * 20)[:39]}…)"
    assert waiting(browser, 2) == "1 run is ahead: 1 (hidden-one)"
    assert waiting(browser, 3) == "2 runs are ahead: 1 (hidden-one) and 2 (lr=0.1)"
    assert (
        waiting(browser, last.id)
        == "4 runs are ahead: 1 (hidden-one), 2 (lr=0.1), 3 (<b>5 (x)) and 1 more"
    )
    assert waiting(other, 2) == "1 run is ahead"
    assert waiting(other, 3) == "2 runs are ahead: 2 (lr=0.1) and 1 more"
    text = f"4 runs are ahead: 2 (lr=0.1), 3 (<b>5 (x)), {label} and 1 more"
    assert waiting(other, last.id) == text
    page = other.get(f"/runs/{last.id}").text
    assert '<a href="/runs/3">3 (&lt;b&gt;5 (x))</a>' in page
    for path in (f"/runs/{last.id}", "/runs", "/workers"):
        assert "hidden-one" not in other.get(path).text
        assert "hidden-one" in browser.get(path).text


def test_runs_with_the_devices_are_named_to_users_who_may_see_them(
    database: Database, settings: Settings, ada: User, browser: TestClient, other: TestClient
) -> None:
    """The runs that occupy the devices are named only to users who may see them, also when two
    users watch the same stream.
    """
    offer_digits(database)
    start_run(database, ada, name="hidden-one", project="hush")
    follower = submit(database, ada, after_id=1)
    assert waiting(browser, follower.id) == "it waits for the end of run 1 (hidden-one)"
    assert waiting(other, follower.id) == "it waits for the end of a run of another project"
    browser.post(f"/api/v1/runs/{follower.id}/cancellation")
    queued = submit(database, ada)
    with database.reading() as session:
        grants = permissions.grants(session, people.named(session, "other"))
    by = "it is next: the only device is used by run"
    result = {None: f"{by} 1 (hidden-one)", grants.user_id: f"{by} of another project"}
    for script, seen_by in ((browser, None), (other, grants)):
        text = result[seen_by and seen_by.user_id]
        assert waiting(script, queued.id) == text
        found = run_updates.of_run(database, settings, queued.id, grants=seen_by)("")
        assert found is not None
        assert json.loads(found.data)["run"]["waiting"] == text
        assert ("hidden-one" in found.data) == (seen_by is None)
