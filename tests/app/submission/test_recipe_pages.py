"""The pages of recipes."""

import html
from typing import Any

from sqlalchemy import update
from starlette.testclient import TestClient

from db.clock import now
from db.database import Database
from db.tables import CheckpointFile, User, Worker
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, submit
from tests.db.conftest import add_worker

FILE = "/home/me/mine.py"
CHECK = {
    "sha256": "ab",
    "findings": [
        {"severity": "error", "place": "mine.py:3", "text": "a <loss>", "precisions": ["fp16"]}
    ],
    "left_out": 2,
    "is_outdated": True,
}
MINE: dict[str, Any] = {
    **DIGITS,
    "name": "mine",
    "title": "My own",
    "reference": f"{FILE}:Mine",
    "file": FILE,
    "check": CHECK,
}
BROKEN = {
    "name": "/home/me/gan.py:GAN",
    "reference": "/home/me/gan.py:GAN",
    "file": "/home/me/gan.py",
    "error": "NameError: name 'nm' is not defined",
    "place": "gan.py:12",
}
SHIPPED = {**DIGITS, "reference": "digits", "package": "halfstep-service 0.1.0"}
LACKING = {"name": "images", "reference": "images", "package": "", "needs": "pillow: pip install x"}


def offer(database: Database) -> None:
    add_worker(database, "w1", [SHIPPED, MINE, BROKEN, LACKING], [CPU])


def test_each_recipe_is_listed_with_its_source(database: Database, browser: TestClient) -> None:
    """The list of recipes has title, name and check result, or the reason why one failed to
    load.
    """
    assert "No worker is up" in browser.get("/recipes").text
    offer(database)
    page = " ".join(html.unescape(browser.get("/recipes").text).split())
    for text in (
        'My own</a> <code class="quiet">mine</code>',
        f"<code>{FILE}</code> · available on w1",
        "Built in (0.1.0) · available on w1",
        'mine.py:3</code> a <loss> <span class="quiet">in fp16',
        "and 2 more, which the command below shows",
        "The file has changed since the check.",
        f"halfstep recipe check {FILE}:Mine",
        'gan.py:GAN <span class="tag bad">failed to load',
        "gan.py:12</code>: <b class=\"bad\">NameError: name 'nm' is not defined",
        "images</code> needs pillow: pip install x",
        'href="/runs/new?recipe=mine"',
    ):
        assert text in page, text
    assert page.index("failed to load") < page.index("Digits") < page.index("My own")


def test_a_recipes_own_page_has_its_settings(database: Database, browser: TestClient) -> None:
    """A recipe's page has the path, default and allowed values of each setting; recipes are also
    found by path, unknown ones are not.
    """
    offer(database)
    page = browser.get("/recipes/mine").text
    assert "<code>training.batch_size</code>" in page
    assert "a whole number from 1 to 1,437" in page
    assert "Examples a step." in page
    for kind in ("choice", "whole number", "number", "yes or no", "texts"):
        assert f">{kind}</td>" in page
    assert browser.get(f"/recipes/{FILE}:Mine").status_code == 200
    missing = browser.get("/recipes/yours")
    assert missing.status_code == 404
    assert "Workers offer: digits, mine" in html.unescape(missing.text)
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=now() - 60))
    assert browser.get("/recipes/mine").status_code == 404


def test_workers_with_other_versions_are_reported(database: Database, browser: TestClient) -> None:
    """Workers with other versions of a recipe are named in one entry, which says that they
    differ.
    """
    offer(database)
    add_worker(database, "w2", [{**MINE, "schema": {**SCHEMA, "title": "newer"}}], [CPU])
    page = browser.get("/recipes").text
    assert "on w1, w2" in page
    assert page.count("Workers have different versions; a run") == 1


def test_a_declared_name_replaces_the_path(
    database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """A run submitted by a recipe's path gets its name; a fork keeps its parent's path."""
    offer(database)
    body = {"recipe": f"{FILE}:Mine", "config": CONFIG}
    queued = script.post("/api/v1/runs", json=body).json()
    assert (queued["recipe"], queued["name"]) == ("mine", "mine-fp16")
    old = submit(database, ada, recipe=f"{FILE}:Mine", name="old")
    with database.writing() as session:
        file = {"kind": "checkpoint", "key": "k", "attempt": 1, "reason": "asked"}
        file |= {"size_bytes": 1, "sha256": "ab"}
        session.add(CheckpointFile(run_id=old.id, step=40, **file))
    page = browser.get("/runs/new", params={"from": old.id, "step": 40}).text
    assert 'name="recipe" value="mine"' in page
    fork = body | {"recipe": "mine", "parent_id": old.id, "parent_step": 40}
    queued = script.post("/api/v1/runs", json=fork).json()
    assert (queued["recipe"], queued["name"]) == (f"{FILE}:Mine", "old from step 40")
    assert 'value="old from step 40"' in page
    listed = browser.get("/runs").text
    assert "mine.py:Mine ·" in listed
    assert f"{FILE}:Mine ·" not in listed
