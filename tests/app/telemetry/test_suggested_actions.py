"""Suggested actions for a problem, each of which fills in a form by one click."""

import math

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.queue import workers
from db.tables import User
from tests.app.conftest import CPU, start_run
from tests.app.telemetry.suggested_actions_made import fall, offer
from tests.db.telemetry.telemetry_made import make_steps, record


@pytest.mark.parametrize("bf16", [True, False])
def test_possible_actions_are_one_click_away(
    database: Database, ada: User, browser: TestClient, bf16: bool
) -> None:
    """A fork from before the overflow with a lower rate, and bf16 if supported, are suggested."""
    offer(database, bf16=bf16)
    fall(database, ada, rate=0.5)
    found = {
        each["title"]: each for each in browser.get("/api/v1/runs/1/findings").json()["findings"]
    }
    actions = [action for each in found.values() for action in each["actions"]]
    labels = [action["label"] for action in actions]
    assert "Fork from step 5 with training.learning_rate 0.05" in labels
    assert ("Start again with precision bf16" in labels) is bf16
    assert "The learning rate is far too large" not in found
    page = browser.get("/runs/1").text
    assert '<a href="#skipped">Skipped steps</a>' in page
    assert all(f">{label}</a>" in page for label in labels)
    for action in actions:
        form = browser.get(action["address"])
        assert form.status_code == 200
        for path, value in action["settings"].items():
            assert f'name="{path}"' in form.text
            assert f'value="{value if path == "precision" else f"{value:g}"}"' in form.text
    [lower, *_] = [each for each in actions if "training.learning_rate" in each["settings"]]
    form = browser.get(lower["address"]).text
    assert 'name="parent_step" value="5"' in form


def test_an_extreme_learning_rate_is_the_first_suggestion(
    database: Database, ada: User, browser: TestClient
) -> None:
    """For an extreme learning rate the only suggestion is the recipe's own rate."""
    offer(database, bf16=True)
    fall(database, ada, rate=40.0)
    found = {
        each["title"]: each for each in browser.get("/api/v1/runs/1/findings").json()["findings"]
    }
    labels = [action["label"] for each in found.values() for action in each["actions"]]
    assert labels == ["Start again with training.learning_rate 0.01"]
    assert "training.learning_rate is 40" in found["The learning rate is far too large"]["text"]


def test_impossible_actions_are_not_offered(
    database: Database, ada: User, browser: TestClient
) -> None:
    """Without a worker for the recipe no action is suggested; a changed setting is checked."""
    offer(database, bf16=True)
    fall(database, ada, rate=0.1)
    with database.writing() as session:
        workers.register(
            session, name="w1", host="host", pid=1, devices=[CPU], recipes=[], versions={}
        )
    found = browser.get("/api/v1/runs/1/findings").json()["findings"]
    assert found
    assert not any(each["actions"] for each in found)
    for change in ("scaler.floor=no", "a.b.c=1", "floor", "=1", "x" * 500 + "=1"):
        answer = browser.get("/runs/new", params={"from": 1, "set": change})
        assert answer.status_code == 422, change


def test_a_loss_that_is_nan_from_the_first_step_on_is_tried_in_fp32(
    database: Database, ada: User, browser: TestClient
) -> None:
    """For a loss that is NaN from the first step on, fp32 is the only suggestion, which shows
    whether precision is a cause.
    """
    offer(database, bf16=True)
    run = start_run(database, ada)
    record(database, run, make_steps([math.nan] * 20, skipped=range(1, 21)))
    [found] = browser.get("/api/v1/runs/1/findings").json()["findings"]
    [action] = found["actions"]
    assert action["label"] == "Start again with precision fp32"
    assert browser.get(action["address"]).status_code == 200
