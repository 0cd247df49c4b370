"""Saved views of the list, each of which belongs to a user."""

import re

from starlette.testclient import TestClient

from db.access import accounts
from db.database import Database
from db.runs import views
from db.tables import User
from tests.app.conftest import submit


def test_a_view_is_saved_shown_and_deleted(browser: TestClient) -> None:
    """A saved view links to its filter, order and columns; deleting it redirects there, so that it
    can be saved again.
    """
    view = {"name": " slow ", "filter": "status:ended", "sort": "-duration", "columns": "name,lr"}
    saved = browser.post("/views", data=view)
    address = "/runs?filter=status%3Aended&sort=-duration&columns=name%2Clr"
    assert (saved.status_code, saved.headers["location"]) == (303, address)
    page = browser.get(address).text
    assert f'href="{address.replace("&", "&amp;")}" aria-current="page"' in page
    assert "Delete the view slow" in page
    [kept] = browser.get("/api/v1/views").json()
    assert kept == view | {"id": 1, "name": "slow", "group": ""}
    grouping = {"name": "rates", "group": "lr", "columns": "name,loss"}
    grouped = browser.post("/views", data=grouping).headers["location"]
    assert grouped == "/runs?columns=name%2Closs&group=lr"
    page = browser.get(grouped).text
    assert f'href="{grouped.replace("&", "&amp;")}" aria-current="page"' in page
    assert browser.post("/views/2/deletion").headers["location"] == grouped
    browser.post("/views", data=view | {"filter": ""})
    assert [each["filter"] for each in browser.get("/api/v1/views").json()] == [""]
    assert browser.post("/views/1/deletion").headers["location"] == address.replace(
        "filter=status%3Aended&", ""
    )
    assert browser.get("/api/v1/views").json() == []


def test_views_are_private_and_bounded(
    database: Database, browser: TestClient, script: TestClient, ada: User
) -> None:
    """A user's views are hidden from others; names, filters and their number are limited."""
    with database.writing() as session:
        grace = accounts.user_named(session, "grace")
        hers = views.save(session, grace, "hers", filter="", sort="-id", columns="")
        for number in range(views.MOST):
            views.save(session, ada, str(number), filter="", sort="-id", columns="")
    assert len(script.get("/api/v1/views").json()) == views.MOST
    assert "hers" not in browser.get("/runs").text
    assert script.delete(f"/api/v1/views/{hers.id}").status_code == 404
    assert browser.post(f"/views/{hers.id}/deletion").status_code == 404
    for body, field in (
        ({"name": "one more"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "n" * 61}, "name"),
        ({"name": "0", "filter": "a:b"}, "filter"),
        ({"name": "0", "sort": "s" * 500}, "sort"),
        ({"name": "0", "columns": "c," * 30 + ",".join("abcdefghijklmnopqrstuvwxyz")}, "columns"),
    ):
        answer = script.post("/api/v1/views", json=body)
        assert (answer.status_code, *answer.json()["errors"]) == (422, field)
        assert browser.post("/views", data=body).status_code == 422
    assert script.post("/api/v1/views", json={"name": "0", "filter": "x"}).status_code == 201
    assert script.delete("/api/v1/views/2").status_code == 204


def test_tabs_count_the_runs_of_views(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """There are tabs for all runs, for the user's own if others have some, and for each
    saved view.
    """
    submit(database, ada, tags="a")
    with database.writing() as session:
        other = accounts.make_user(session, "grace")
    submit(database, other)
    browser.post("/views", data={"name": "tagged", "filter": "tag:a"})
    page = browser.get("/runs").text
    tabs = re.findall(r'<span>([\w ]+)</span> <span class="tab-count">(\d+)<', page)
    assert tabs == [("All runs", "2"), ("Mine", "1"), ("tagged", "1")]
