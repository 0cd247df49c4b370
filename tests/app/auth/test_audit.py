"""Audit log: the events of each action, and no others."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from app.auth.audit import DETAIL_CHARACTERS, get_audited_fields
from db.access import accounts, audit, projects
from db.database import Database
from db.tables import AuditEvent, User
from tests.app.auth.permissions_made import routes_of
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import submit
from tests.app.uploading import write_token

pytestmark = pytest.mark.sql_sample

#: Details that no audit event may contain, whatever their name.
SECRETS = {"password", "current", "token", "secret", "value", "note", "address", "config", "line"}
#: The header of a safetensors file without tensors.
EMPTY = (2).to_bytes(8, "little") + b"{}"


def list_recorded(database: Database) -> list[tuple[str | None, str, str, int | None]]:
    """Return user, action, detail and run of each event, oldest first."""
    query = select(User.name, AuditEvent.action, AuditEvent.detail, AuditEvent.run_id)
    query = (
        query.select_from(AuditEvent)
        .outerjoin(User, User.id == AuditEvent.user_id)
        .order_by(AuditEvent.id)
    )
    with database.reading() as session:
        return [(row[0], row[1], row[2], row[3]) for row in session.execute(query)]


def test_no_route_audits_a_secret_field(app: FastAPI) -> None:
    """The fields that routes name for the audit log hold no secrets."""
    fields = {field for *_, route in routes_of(app) for field in get_audited_fields(route)}
    assert {"role", "scale", "before_id"} <= fields
    assert not SECRETS & fields


def test_an_event_names_the_action_and_its_runs(
    database: Database, ada: User, browser: TestClient, script: TestClient, offered: None
) -> None:
    """An audit event names a role's user, a bulk request's runs, uploaded files and watched runs,
    each once; rejected forms are not recorded. A run's history names the user as well.
    """
    with database.writing() as session:
        accounts.make_user(session, "carol")
    given = {"user": "carol", "role": "viewer", "project": ""}
    assert browser.put("/api/v1/projects/roles", json=given).status_code == 204
    assert browser.post("/projects/roles", data=given | {"role": "king"}).status_code == 422
    first, second = submit(database, ada).id, submit(database, ada).id
    for path, body in (
        (f"/runs/{first}/pause", None),
        (f"/runs/{first}/priority", {"priority": 3}),
        (f"/runs/{first}", {"name": "mine", "note": "hush-hush"}),
        ("/runs/bulk", {"action": "cancel", "runs": [first, second, 99]}),
        ("/runs", {"recipe": "digits", "name": "n" * 100, "tags": "hush-hush"}),
        ("/tokens", {"name": "ci", "kind": "read", "days": 3}),
    ):
        method = {"priority": "PUT", str(first): "PATCH"}.get(path.rpartition("/")[2], "POST")
        answer = browser.request(method, f"/api/v1{path}", json=body)
        assert answer.status_code in (200, 201), (path, answer.text)
    assert browser.delete(f"/api/v1/tokens/{answer.json()['id']}").status_code == 204
    assert script.put("/api/v1/uploads/net.safetensors", content=EMPTY).status_code == 201
    watched: dict[str, Any] = {"id": "a" * 32, "attempt": 1, "name": "w"}
    watched["started"] = "2026-01-01T00:00:00Z"
    for _ in range(2):
        headers = {"Authorization": f"Bearer {write_token(database, ada)}"}
        answer = script.post("/api/v1/ingest", json=watched, headers=headers)
        assert answer.status_code == 200
    watched |= {"id": "b" * 32, "project": "mistyped"}
    assert script.post("/api/v1/ingest", json=watched, headers=headers).status_code == 200
    audit_events = list_recorded(database)
    assert [each[2:] for each in audit_events[:3]] == [
        ("user carol, role viewer", None),
        ("", first),
        ("priority 3", first),
    ]
    assert [(action, *more) for _who, action, *more in audit_events[4:6]] == [
        ("POST /api/v1/runs/bulk", "action cancel", first),
        ("POST /api/v1/runs/bulk", "action cancel", second),
    ]
    assert audit_events[6][2:] == (f"name {'n' * 100}, recipe digits", second + 1)
    assert [each[2] for each in audit_events[7:9]] == ["name ci, kind read, days 3", "name ci"]
    assert audit_events[9][2].endswith("/net.safetensors, 10 bytes")
    began = "a watched run began"
    assert audit_events[10:] == [
        ("ada", "POST /api/v1/ingest", began, second + 2),
        ("ada", "POST /api/v1/ingest", f"{began}, and created its project mistyped", second + 3),
    ]
    assert "hush" not in str(audit_events)
    page = browser.get(f"/runs/{first}").text.partition('id="history"')[2]
    for why in ("Paused by ada", "Priority 3, by ada", "Renamed by ada", "Cancelled by ada"):
        assert why in page


def test_the_page_says_what_each_request_did(
    database: Database, ada: User, browser: TestClient
) -> None:
    """The audit page describes a form's request like the API's where it has no text of its own, and
    shows a command as typed.
    """
    run_id = submit(database, ada).id
    with database.writing() as session:
        audit.note_typed(session, "link", "ada")
    for path in (f"/runs/{run_id}/pause", f"/api/v1/runs/{run_id}/resumption", "/reports"):
        assert browser.post(path, follow_redirects=False).status_code in (200, 303)
    page = browser.get("/audit").text
    for words, action in (
        ("Pause a run", f"POST /runs/{run_id}/pause"),
        ("Queue a paused run again", f"POST /api/v1/runs/{run_id}/resumption"),
        ("Create a report or add a panel to one", "POST /reports"),
    ):
        assert f'{words} <code class="quiet">{action}</code>' in page
    assert '<code class="quiet">halfstep link</code>' in page


def test_sign_ins_and_failed_attempts_are_recorded(
    app: FastAPI, database: Database, ada: User, browser: TestClient, stranger: TestClient
) -> None:
    """Sign-ins are audited with their method, and failed attempts once a minute per user and
    address, without unknown names, which may be passwords. Events are found by user, run and day.
    """
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        accounts.set_password(session, bob, "correct horse")
        link = accounts.make_link_token(session, bob)
    for name, password in (("bob", "wrong"), ("hunter2", "x"), ("BOB", "wrong"), ("hunter3", "x")):
        tried = stranger.post("/sign-in", data={"name": name, "password": password})
        assert tried.status_code == 401
    stranger.post("/sign-in", data={"name": "bob", "password": "correct horse"})
    stranger.post("/", data={"token": link})
    stranger.post("/", data={"token": link})
    assert browser_of(app, database, bob).post("/sign-out").status_code == 303
    assert [each[:3] for each in list_recorded(database)] == [
        ("bob", "POST /sign-in", "refused"),
        (None, "POST /sign-in", "refused"),
        ("bob", "POST /sign-in", "signed in by a password"),
        ("bob", "POST /", "signed in by a link"),
        (None, "POST /", "refused"),
        ("bob", "POST /sign-out", ""),
    ]
    today = datetime.now(UTC).date()

    def found(**asked: str | date) -> int:
        given = {name: str(value) for name, value in asked.items()}
        count = browser.get("/api/v1/audit", params=given).json()["total"]
        page = browser.get("/audit", params=given | {"run": ""}).text
        assert page.count('data-called="event">') == count
        return int(count)

    assert found() == len(browser.get("/api/v1/audit/export").text.splitlines()) == 6
    assert found(user="Bob", since=today - timedelta(days=1)) == 4
    assert found(since=today + timedelta(days=2)) == 0
    for wrong in ({"user": "nobody"}, {"since": "soon"}, {"run": "x"}):
        assert browser.get("/audit", params=wrong).status_code == 422
        assert browser.get("/api/v1/audit", params=wrong).status_code == 422


def test_a_detail_has_an_end(database: Database, ada: User, browser: TestClient) -> None:
    """A detail in the audit log is cut to a maximum length, for any kind of value."""
    with database.writing() as session:
        projects.make(session, "p" * 200)
    name = "\u202e" + "x" * 900
    for sent in ({"user": name, "role": name, "project": "p" * 200}, {"user": {"a": 1}}, [1]):
        browser.put("/api/v1/projects/roles", json=sent)
    given = {"user": "ada", "role": "viewer", "project": "p" * 200}
    assert browser.put("/api/v1/projects/roles", json=given).status_code == 204
    ((_who, _audit_event, detail, _run),) = list_recorded(database)
    assert detail == f"user ada, role viewer, project {'p' * 100}"
    assert len(detail) <= DETAIL_CHARACTERS
