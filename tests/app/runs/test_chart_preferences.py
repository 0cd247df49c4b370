"""Chart preferences: one arrangement per user and recipe, within limits."""

import json
import re

import pytest
from fastapi import FastAPI
from sqlalchemy import update
from starlette.testclient import TestClient

from db.access import accounts, chart_preferences
from db.database import Database
from db.tables import ChartPreferences, User
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import start_run
from tests.db.telemetry.telemetry_made import make_steps, record

PANELS = {
    "recipe": "digits",
    "order": ["a/x"],
    "sizes": {"loss": {"width": "", "height": 300}},
    "ranges": {"loss": [0.5, 1.0]},
}


@pytest.mark.sql
def test_an_arrangement_is_kept_per_user_and_recipe(
    app: FastAPI,
    database: Database,
    ada: User,
    browser: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other users and recipes have their own arrangements; the oldest are deleted at a limit."""
    path = "/api/v1/preferences"
    assert browser.get(path).json() == {"panels": None, "toolbar": None}
    assert browser.put(f"{path}/panels", json=PANELS).status_code == 204
    assert browser.put(f"{path}/panels", json=PANELS | {"pinned": ["b"]}).status_code == 204
    toolbar = {"x": "time", "loss": "linear", "smooth": 0.5}
    assert browser.put(f"{path}/toolbar", json=toolbar).status_code == 204
    kept = browser.get(f"{path}?recipe=digits").json()
    assert kept["toolbar"] == toolbar
    assert (kept["panels"]["pinned"], kept["panels"]["order"]) == (["b"], ["a/x"])
    assert browser.get(f"{path}?recipe=gpt").json()["panels"] is None
    monkeypatch.setattr(chart_preferences, "MOST", 9)
    with database.writing() as session:
        other = accounts.make_user(session, "other")
        session.execute(update(ChartPreferences).values(changed_at=1.0))
        for number in range(chart_preferences.MOST):
            chart_preferences.write(session, ada, f"panels:{number}", {})
        assert chart_preferences.read(session, ada, "panels:digits") is None
        assert chart_preferences.read(session, ada, "panels:0") == {}
    empty = {"panels": None, "toolbar": None}
    assert browser_of(app, database, other).get(f"{path}?recipe=0").json() == empty
    with database.writing() as session:
        accounts.remove(session, session.merge(other))
        assert chart_preferences.read(session, other, "panels:0") is None


OLD_PANELS = {
    **{"pinned": ["b"], "collapsed": [], "order": [], "sizes": {}},
    **{"ranges": {"lr": [1.0, 2.0]}, "logs": ["lr"]},
}


def test_a_log_axis_of_the_loss_that_was_kept_for_all_runs_stays_until_a_recipe_is_arranged(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A log axis of the loss that an earlier version stored applies until the user arranges a
    recipe's panels.
    """
    with database.writing() as session:
        old = {"x": "time", "loss": "log", "smooth": 0.5}
        chart_preferences.write(session, ada, "toolbar", old)
        chart_preferences.write(session, ada, "panels:digits", OLD_PANELS)
    path = "/api/v1/preferences"

    def logs(recipe: str) -> list[str]:
        kept: list[str] = browser.get(f"{path}?recipe={recipe}").json()["panels"]["logs"]
        return kept

    assert (logs("digits"), logs("gpt")) == (["lr", "loss"], ["loss"])
    panels = browser.get(f"{path}?recipe=digits").json()["panels"]
    assert panels["ranges"] == {"lr": [1.0, 2.0]}
    linear = panels | {"recipe": "digits", "logs": ["lr"]}
    assert browser.put(f"{path}/panels", json=linear).status_code == 204
    assert (logs("digits"), logs("gpt")) == (["lr"], ["loss"])
    record(database, start_run(database, ada), make_steps([1.0] * 5))
    browser.put(f"{path}/toolbar", json={"loss": "log"})
    assert "data-static-chart" in browser.get("/runs/1").text  # of digits: a linear axis
    browser.put(f"{path}/panels", json=linear | {"logs": ["loss"]})
    assert "data-static-chart" not in browser.get("/runs/1").text


def test_an_arrangement_of_an_earlier_version_stays(
    database: Database, ada: User, browser: TestClient
) -> None:
    """An arrangement stored by an earlier version stays valid, without a log axis of the loss and
    without ignored outliers.
    """
    with database.writing() as session:
        chart_preferences.write(session, ada, "panels:digits", OLD_PANELS)
    panels = browser.get("/api/v1/preferences?recipe=digits").json()["panels"]
    assert panels == OLD_PANELS | {"trimmed": []}


REFUSED: list[dict[str, object]] = [
    {"sizes": {"loss": {"width": "huge", "height": 300}}},
    {"sizes": {"loss": {"width": "", "height": 10_000}}},
    {"ranges": {"loss": [1.0, 0.5]}},
    {"ranges": {"loss": [0.0, "Infinity"]}},
    {"order": ["x"] * 201},
    {"pinned": ["x" * 201]},
    {"colour": "red"},
]


def test_an_arrangement_is_bounded(browser: TestClient) -> None:
    """Unknown or out-of-range values in an arrangement are rejected."""
    for wrong in REFUSED:
        assert browser.put("/api/v1/preferences/panels", json=PANELS | wrong).status_code == 422
    assert browser.get("/api/v1/preferences?recipe=digits").json()["panels"] is None


def test_a_page_comes_with_the_arrangement_of_who_reads_it(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The first response has the stored panel sizes; a chart by another axis is left to the
    script.
    """
    run = start_run(database, ada)
    record(database, run, make_steps([1.0] * 5))
    assert 'data-arrangement="null" data-toolbar="null"' in browser.get("/runs/1").text
    browser.put("/api/v1/preferences/panels", json=PANELS)
    page = browser.get("/runs/1").text
    assert 'data-row="loss" aria-label="Loss" style="--height: 300px"' in page
    found = re.search(r'data-arrangement="([^"]*)"', page)
    assert found is not None
    assert json.loads(found[1].replace("&#34;", '"'))["ranges"] == {"loss": [0.5, 1.0]}
    assert "data-static-chart" in page
    browser.put("/api/v1/preferences/toolbar", json={"x": "time"})
    assert "data-static-chart" not in browser.get("/runs/1").text
