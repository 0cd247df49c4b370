"""Presets of the new-run form: saving, choosing, replacing and deleting, and who may."""

import re

from fastapi import FastAPI
from starlette.testclient import TestClient

from db.access import accounts, projects
from db.database import Database
from db.runs import presets
from tests.app.auth.permissions_made import script_of

FORM = {
    "recipe": "digits",
    "precision": "bf16",
    "training.steps": "7",
    "training.batch_size": "64",
    "training.max_grad_norm": "",
    "training.fused": "true",
    "scaler.enabled": "true",
    "scaler.init_scale": "16777216",
    "name": "not kept",
    "tags": "a, b",
    "priority": "3",
    "nodes": "1",
    "devices_per_node": "1",
    "project": "",
    "preset": "quick <i>",
}


def test_what_the_form_holds_is_saved_and_fills_it_again(
    database: Database, offered: None, browser: TestClient
) -> None:
    """A preset stores only values that differ from the defaults, so that defaults may change; it
    fills the form except for the name.
    """
    saved = browser.post("/presets", data=FORM)
    assert saved.headers["location"] == "/runs/new?preset=1"
    with database.reading() as session:
        found = presets.get(session, 1)
        assert found.config == {
            "precision": "bf16", "training": {"steps": 7, "max_grad_norm": None},
        }  # fmt: skip
        assert found.place == {"tags": "a, b", "priority": 3, "nodes": 1, "devices_per_node": 1}
    page = browser.get("/runs/new?preset=1").text
    assert re.search(r'name="training.steps"[^>]* value="7"', page)
    assert 'value="bf16" checked' in page
    assert 'value="a, b"' in page
    assert "not kept" not in page
    assert "quick &lt;i&gt;</a>" in browser.get("/runs/new").text
    assert browser.get("/api/v1/runs").json()["runs"] == []
    again = browser.post("/presets", data=FORM | {"training.steps": "9"})
    assert again.headers["location"] == "/runs/new?preset=1"
    with database.reading() as session:
        assert presets.get(session, 1).config["training"]["steps"] == 9
    assert browser.post("/presets/1/deletion").status_code == 303
    assert "quick" not in browser.get("/runs/new").text
    assert browser.get("/runs/new?preset=1").status_code == 404


def test_invalid_presets_are_not_saved(offered: None, browser: TestClient) -> None:
    """Errors of a preset are at their fields with the input preserved; a missing name and too many
    presets are errors too.
    """
    wrong = browser.post("/presets", data=FORM | {"training.steps": "0", "priority": "x"})
    assert wrong.status_code == 422
    assert "0 is not valid; allowed: a whole number of at least 1" in wrong.text
    assert "x is not valid; allowed: a whole number" in wrong.text
    nameless = browser.post("/presets", data=FORM | {"preset": " "})
    assert nameless.status_code == 422
    assert 'id="preset-error"' in nameless.text
    for number in range(presets.MOST):
        browser.post("/presets", data=FORM | {"preset": str(number)})
    assert "has 50 presets" in browser.post("/presets", data=FORM | {"preset": "50"}).text


def test_presets_are_of_who_may_submit_to_their_project(
    app: FastAPI, database: Database, browser: TestClient, offered: None
) -> None:
    """Viewers can neither save nor choose presets; presets of a hidden project are not found."""
    with database.writing() as session:
        projects.make(session, "vision")
        people = {name: accounts.make_user(session, name) for name in ("member", "viewer", "other")}
        for role in ("member", "viewer"):
            projects.set_role(session, people[role], "vision", role)
        projects.set_role(session, people["other"], projects.DEFAULT, "member")
    scripts = {name: script_of(app, database, user) for name, user in people.items()}
    wanted = FORM | {"project": "vision", "priority": "0"}
    assert scripts["member"].post("/presets", data=wanted).status_code == 303
    assert scripts["viewer"].post("/presets", data=wanted).status_code == 403
    assert scripts["other"].post("/presets", data=wanted).status_code == 404
    for name, status in {"member": 200, "viewer": 403, "other": 404}.items():
        assert scripts[name].get("/runs/new?preset=1").status_code == status
        assert ("quick" in scripts[name].get("/runs/new").text) == (name == "member")
    assert scripts["viewer"].post("/presets/1/deletion").status_code == 403
    assert scripts["member"].post("/presets/1/deletion").status_code == 303
