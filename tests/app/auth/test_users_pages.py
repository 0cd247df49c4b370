"""Accounts, projects, limited tokens, and the audit log."""

import json
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import delete, select, update
from sqlalchemy.exc import DatabaseError
from starlette.testclient import TestClient

from db.access import accounts, people, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.errors import Conflict, Invalid
from db.settings import Settings
from db.tables import ApiToken, AuditEvent, User
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import submit
from tests.db.conftest import make_watched
from tests.marks import looped
from tests.site import type_command


def script_of(app: FastAPI, database: Database, user: User, **of: Any) -> TestClient:
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, user, "script", **of)
    headers = {"Authorization": f"Bearer {token}"}
    return TestClient(app, base_url="http://localhost", headers=headers)


def test_an_admin_invites_and_removes_users(
    app: FastAPI, database: Database, browser: TestClient, stranger: TestClient
) -> None:
    """An invitation link is shown once and signs in; sessions, tokens and links of a deactivated
    account end at once, and only a new link restores access.
    """
    page = browser.post("/people", data={"name": "Bob", "role": "viewer"})
    assert "Send Bob this link" in page.text
    token = page.text.partition("token=")[2].partition('"')[0].partition("<")[0]
    assert "token=" not in browser.get("/people").text
    refused = browser.post("/people", data={"name": "bob", "role": "viewer"}).text
    assert 'value="bob"' in refused
    assert "<option selected>viewer</option>" in refused
    assert stranger.post("/", data={"token": token}).headers["location"] == "/runs"
    assert stranger.get("/runs").status_code == 200
    assert stranger.get("/people").status_code == 403
    assert "You are <b>viewer</b> of Default project." in stranger.get("/account").text
    with database.reading() as session:
        bob = people.named(session, "BOB")
        assert projects.memberships(session, bob) == {"": "viewer"}
    script = script_of(app, database, bob)
    link = browser.post(f"/people/{bob.id}/reset").text.partition("token=")[2].partition('"')[0]
    assert stranger.get("/runs").status_code == 303
    assert script.get("/api/v1/runs").status_code == 401
    script = script_of(app, database, bob)
    assert browser.post(f"/people/{bob.id}/deactivate").status_code == 303
    assert script.get("/api/v1/runs").status_code == 401
    assert stranger.post("/", data={"token": link}).headers["location"].startswith("/sign-in")
    browser.post(f"/people/{bob.id}/activate")
    assert script.get("/api/v1/runs").status_code == 401
    assert "deactivated" not in browser.get("/people").text
    assert browser.post(f"/people/{bob.id}/remove").status_code == 303
    assert "Bob" not in browser.get("/people").text


def test_the_last_admin_stays(database: Database, ada: User, browser: TestClient) -> None:
    """The last admin can neither be removed nor lose the role."""
    for change in ("no-admin", "deactivate", "remove"):
        answer = browser.post(f"/people/{ada.id}/{change}")
        assert answer.status_code == 422
        assert "the last admin" in answer.text
    with database.writing() as session, pytest.raises(Conflict):
        accounts.set_admin(session, people.named(session, "ada"), is_admin=False)


@looped("name", ["", "x" * 65, "a\x1bb", "al\u200bice", "\u202eevil"])
def test_a_name_is_what_it_looks(database: Database, ada: User, name: str) -> None:
    """A user name has no invisible characters, and two names that look alike are refused."""
    with database.writing() as session:
        with pytest.raises(Invalid, match="name"):
            accounts.make_user(session, name)
        for same in ("Ada", "ADA", " ada ", "\uff41da"):
            with pytest.raises(Invalid, match="there is a user 'ada' already"):
                accounts.make_user(session, same)
            assert accounts.user_named(session, same).id == ada.id


def test_maintainers_give_roles_in_their_projects(
    app: FastAPI, database: Database, ada: User, browser: TestClient
) -> None:
    """Maintainers grant roles in their own projects only; members and viewers grant none."""
    for name in ("vision", "speech"):
        assert browser.post("/projects", data={"name": name}).status_code == 303
    twice = browser.post("/projects", data={"name": "vision"})
    assert (twice.status_code, "already exists" in twice.text) == (422, True)
    with database.writing() as session:
        carol = accounts.make_user(session, "carol")
        dave = accounts.make_user(session, "dave")
        projects.set_role(session, carol, "vision", MAINTAINER)
    script = browser_of(app, database, carol)
    given = {"project": "vision", "user": "dave", "role": "viewer"}
    assert script.put("/api/v1/projects/roles", json=given).status_code == 204
    result = script.get("/api/v1/projects/roles", params={"project": "vision"}).json()
    assert {each["user"]: each["role"] for each in result} == {"carol": MAINTAINER, "dave": VIEWER}
    wrongs: tuple[tuple[dict[str, str], int], ...] = (
        ({"project": "speech"}, 404),
        ({"role": "king"}, 422),
        ({"user": "x"}, 404),
    )
    for wrong, status in wrongs:
        assert script.put("/api/v1/projects/roles", json=given | wrong).status_code == status
    assert browser_of(app, database, dave).post("/projects/roles", data=given).status_code == 403
    assert "speech" not in script.get("/projects").text
    assert script.post("/projects/roles", data=given | {"role": MEMBER}).status_code == 303
    assert script.post("/projects/roles", data=given | {"user": "nobody"}).status_code == 422
    with database.reading() as session:
        assert projects.memberships(session, dave) == {"vision": MEMBER}
    answer = script.post("/projects/roles/deletion", data=given)
    assert answer.status_code == 303
    changes = {"name": "vision", "viewers_download": False}
    assert changes.items() <= script.patch("/api/v1/projects", json=changes).json().items()
    assert script.put("/api/v1/projects/quota", json={"name": "vision"}).status_code == 403
    with database.reading() as session:
        assert projects.memberships(session, dave) == {}


@pytest.mark.slow
def test_a_token_may_no_more_than_it_says(
    app: FastAPI, database: Database, ada: User, offered: None
) -> None:
    """A token is limited by its kind, project and expiry, even if an admin owns it."""
    with database.writing() as session:
        projects.make(session, "vision")
    run = submit(database, ada)
    inside = submit(database, ada, project="vision")
    wanted = {"recipe": "digits"}
    for kind, allowed in (("read", 0), ("submit", 1), ("control", 2)):
        script = script_of(app, database, ada, kind=kind)
        assert script.get(f"/api/v1/runs/{run.id}").status_code == 200
        audit_events = (
            script.post("/api/v1/runs", json=wanted),
            script.post(f"/api/v1/runs/{run.id}/pause"),
            script.put("/api/v1/secrets/A", json={"value": "12345678"}),
        )
        for i, answer in enumerate(audit_events):
            assert (answer.status_code == 403) == (i >= allowed), (kind, i, answer.text)
        assert script.post("/api/v1/ingest", json={}).status_code == 403
        assert script.get("/api/v1/users").status_code == 403
        if allowed:
            answer = script.post("/api/v1/runs", json={"command": {"line": "python it.py"}})
            assert "this token cannot queue command lines" in answer.json()["errors"]["command"]
    full = script_of(app, database, ada)
    answer = full.post("/api/v1/runs", json={"command": {"line": "python it.py"}})
    assert answer.status_code == 201, answer.text
    script = script_of(app, database, ada, kind="submit", project="vision")
    assert [each["id"] for each in script.get("/api/v1/runs").json()["runs"]] == [inside.id]
    assert script.get(f"/api/v1/runs/{run.id}").status_code == 404
    assert script.post("/api/v1/runs", json=wanted | {"project": ""}).status_code == 422
    assert script.post("/api/v1/runs", json=wanted).json()["project"] == "vision"
    with database.writing() as session:
        session.execute(update(ApiToken).values(expires_at=1.0))
    assert script.get("/api/v1/runs").status_code == 401


def test_tokens_are_created_with_limits(browser: TestClient) -> None:
    """A token expires after ninety days by default; invalid limits are rejected by name."""
    made = browser.post("/api/v1/tokens", json={"name": "a"}).json()
    assert round(made["expires_at"] - made["created_at"]) == accounts.TOKEN_DAYS * 86_400
    assert (
        browser.post("/api/v1/tokens", json={"name": "a", "days": None}).json()["expires_at"]
        is None
    )
    for wrong in ({"days": 0}, {"days": 9999}, {"project": "nowhere"}, {"kind": "king"}):
        answer = browser.post("/api/v1/tokens", json={"name": "a"} | wrong)
        assert answer.status_code == 422, wrong
    page = browser.post("/account/tokens", data={"name": "b", "kind": "read", "days": "-1"})
    assert "is not valid" in page.text
    page = browser.post("/account/tokens", data={"name": "b", "kind": "read", "days": "7"})
    assert 'data-called="scope">read' in page.text
    for n in range(accounts.MOST_TOKENS - 3):
        assert browser.post("/api/v1/tokens", json={"name": f"n{n}"}).status_code == 201
    assert "revoke some" in browser.post("/api/v1/tokens", json={"name": "one more"}).text


def test_actions_are_recorded_with_their_users(
    app: FastAPI, database: Database, ada: User, browser: TestClient, offered: None
) -> None:
    """Account changes are audited with their user in the same transaction; rejected requests and
    contents are not, and rows cannot be changed.
    """
    run = submit(database, ada)
    script = script_of(app, database, ada)
    assert script.post(f"/api/v1/runs/{run.id}/checkpoints").status_code == 409
    assert script.put(f"/api/v1/runs/{run.id}/priority", json={"priority": 3}).status_code == 200
    browser.post("/views", data={"name": "hush-hush", "filter": "", "sort": "", "columns": ""})
    result = browser.get("/api/v1/audit").json()
    newest, before = result["audit_events"][:2]
    assert (newest["user"], newest["token"], newest["action"]) == ("ada", None, "POST /views")
    assert (before["token"], before["run_id"]) == ("script", run.id)
    assert before["action"] == f"PUT /api/v1/runs/{run.id}/priority"
    assert result["total"] == 2
    assert "hush" not in browser.get("/audit").text
    lines = browser.get("/api/v1/audit/export").text.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [before["id"], newest["id"]]
    assert browser.get(f"/audit?run={run.id}").text.count('"quiet">PUT') == 1
    history = script.get(f"/api/v1/runs/{run.id}").json()["statuses"]
    assert history[-1]["reason"] == "priority 3, by ada"
    for change in (update(AuditEvent).values(action="x"), delete(AuditEvent)):
        with database.writing() as session, pytest.raises(DatabaseError, match="deeds are kept"):
            session.execute(change)


def test_other_browsers_are_signed_out(
    app: FastAPI, database: Database, ada: User, browser: TestClient
) -> None:
    """ "Sign out other browsers" ends all other sessions of the user."""
    other = browser_of(app, database, ada)
    assert browser.get("/account").text.count("this browser</span>") == 1
    assert browser.post("/account/sign-ins/deletion").status_code == 303
    assert other.get("/runs").status_code == 303
    assert browser.get("/runs").status_code == 200


@pytest.mark.slow
def test_accounts_are_kept_from_a_terminal(
    database: Database,
    settings: Settings,
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A terminal can create accounts with a link, grant roles and deactivate users; an impossible
    action prints an error.
    """
    monkeypatch.setenv("HALFSTEP_DATA", str(settings.data))
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", settings.database_url)
    with database.writing() as session:
        sent = make_watched(session, ada)
    for words in (
        ["add", "carol", "--role", "viewer"],
        ["role", "carol", "maintainer"],
        ["role", "ada", "viewer"],
        ["role", "ada", "none"],
        ["change", "carol", "commands"],
        ["change", "carol", "deactivate"],
        ["token", str(sent.run_id), "--json"],
        ["list"],
    ):
        assert type_command("user", *words) == 0, words
    result = capsys.readouterr().out
    assert "/?token=" in result
    token = json.loads(next(line for line in result.splitlines() if line.startswith("{")))["token"]
    with database.reading() as session:
        known = accounts.find_api_token(session, token)
    assert known is not None
    assert (known.user.name, known.kind, known.run_id) == ("ada", "run", sent.run_id)
    assert "ada: admin\n" in result
    assert "carol: maintainer of Default project, may run commands, deactivated\n" in result
    with database.reading() as session:
        audit_events = session.scalars(select(AuditEvent).order_by(AuditEvent.id)).all()
    assert {(each.address, each.user_id) for each in audit_events} == {("terminal", None)}
    assert [(each.action, each.detail) for each in audit_events][:2] == [
        ("halfstep user add", "carol viewer"),
        ("halfstep user role", "carol maintainer"),
    ]
    for words, message in (
        (["add", "CAROL"], "there is a user 'carol' already; allowed: a name that differs"),
        (["role", "nobody", "viewer"], "no account"),
        (["role", "ada", "king"], "'king' is not valid"),
        (["change", "ada", "dance"], "'dance' is not valid"),
        (["change", "ada", "remove"], "last admin"),
        (["token", "99"], "no run 99"),
    ):
        assert message in str(type_command("user", *words))


def test_commands_need_a_right_of_their_own(
    app: FastAPI, database: Database, ada: User, browser: TestClient, offered: None
) -> None:
    """A member needs a permission, granted by an admin, to submit commands."""
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
    script = script_of(app, database, bob)
    wanted = {"command": {"line": "python train.py"}}
    assert "separate permission" in script.post("/api/v1/runs", json=wanted).text
    assert script.get("/api/v1/secrets").status_code == 403
    assert browser.patch(f"/api/v1/users/{bob.id}", json={"change": "commands"}).status_code == 200
    assert "separate permission" not in script.post("/api/v1/runs", json=wanted).text
    assert script.get("/api/v1/secrets").status_code == 200
