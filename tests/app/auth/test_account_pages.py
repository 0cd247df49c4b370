"""Password and tokens."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from httpx2 import Response
from sqlalchemy import update
from starlette.testclient import TestClient

from db.access import accounts, projects
from db.database import Database
from db.tables import Run, SignInSession, User
from tests.app.conftest import csrf_token
from tests.app.uploading import Uploader, write_token


def test_password_is_set_and_other_browsers_are_signed_out(
    browser: TestClient, stranger: TestClient
) -> None:
    """A browser that sets a password stays signed in, and the password signs in from then on."""
    before = dict(browser.cookies)
    assert "Password changed" not in browser.get("/account").text
    changed = browser.post("/account/password", data={"password": "a long secret"})
    assert changed.status_code == 303
    assert "Password changed." in browser.get(changed.headers["location"]).text
    stranger.cookies.update(before)
    assert stranger.get("/account").status_code == 303
    form = {"name": "ada", "password": "a long secret"}
    assert stranger.post("/sign-in", data=form).headers["location"] == "/"


def test_a_new_password_ends_whatever_let_its_user_in_before(
    browser: TestClient, stranger: TestClient, script: TestClient, database: Database, ada: User
) -> None:
    """A new password revokes all tokens, links and sessions of its user, and none of other
    users.
    """
    with database.writing() as session:
        link = accounts.make_link_token(session, ada)
        bob = accounts.user_named(session, "bob")
        of_bob, _row = accounts.make_api_token(session, bob, "bob's")
    assert browser.post("/account/password", data={"password": "a long secret"}).status_code == 303
    assert script.get("/api/v1/runs").status_code == 401
    assert stranger.post("/", data={"token": link}).headers["location"].startswith("/sign-in")
    bearer = {"Authorization": f"Bearer {of_bob}"}
    assert stranger.get("/api/v1/runs", headers=bearer).status_code == 200


def set_password(browser: TestClient, **form: str) -> Response:
    browser.headers["x-csrf-token"] = csrf_token(browser)
    return browser.post("/account/password", data={"password": "another secret", **form})


def test_the_current_password_is_required(browser: TestClient, stranger: TestClient) -> None:
    """Without the current password neither an open browser nor a password session can change it."""
    assert "Current password" not in browser.get("/account").text  # a link has just let it in
    assert set_password(browser, password="a long secret").status_code == 303
    stranger.post("/sign-in", data={"name": "ada", "password": "a long secret"})
    for each in (browser, stranger):
        assert "Current password" in each.get("/account").text
        for wrong in ({}, {"current": "a long guess"}):
            answer = set_password(each, **wrong)
            assert answer.status_code == 422
            assert "It is not your current password" in answer.text
    assert set_password(browser, current="a long secret").status_code == 303
    form = {"name": "ada", "password": "another secret"}
    assert stranger.post("/sign-in", data=form).headers["location"] == "/"


def test_guesses_of_the_current_password_have_to_wait(
    monkeypatch: pytest.MonkeyPatch, browser: TestClient
) -> None:
    """Several wrong current passwords require a wait, as at the sign-in."""
    standing = SimpleNamespace(current=lambda _session: 0.0)  # however long they take here
    monkeypatch.setattr("db.access.login_attempts.clock", standing)
    set_password(browser)
    answers = [set_password(browser, current="a guess") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [422] * 5 + [429]
    assert "Try again in" in answers[-1].text


def test_a_link_is_fresh_for_ten_minutes(browser: TestClient, database: Database) -> None:
    """A sign-in by link is fresh for ten minutes; later a password is required, if there is one."""
    with database.writing() as session:
        aged = update(SignInSession).values(created_at=SignInSession.created_at - 601)
        session.execute(aged)
    page = browser.get("/account").text
    assert "Current password" not in page
    assert 'name="password"' in page
    assert set_password(browser).status_code == 303
    with database.writing() as session:
        session.execute(aged)
    assert "Current password" in browser.get("/account").text
    answer = set_password(browser)
    assert answer.status_code == 422
    assert "is not your current password" in answer.text


@pytest.mark.slow
def test_a_token_does_not_open_the_account(app: FastAPI, script: TestClient, ada: User) -> None:
    """No route of the account lets a token set a password or get a session."""
    found = [
        (method, route.path)
        for route in iter_route_contexts(app.routes)
        if (route.path or "").startswith("/account")
        for method in getattr(route.original_route, "methods", ())
    ]
    assert len(found) >= 4
    for method, path in found:
        address = str(path).replace("{token_id}", "1")
        answer = script.request(method, address, data={"password": "a long secret"})
        assert answer.status_code == 403
        assert "An API token gives no access to the account" in answer.text
        assert not answer.cookies
    assert script.get("/api/v1/runs").status_code == 200


def test_short_password_is_rejected(browser: TestClient) -> None:
    """A password that is too short is rejected with the required length."""
    answer = browser.post("/account/password", data={"password": "short"})
    assert answer.status_code == 422
    assert "has 5 characters; allowed: 8 to 200" in answer.text


def test_token_is_shown_once(browser: TestClient) -> None:
    """A new token is shown only by the page that created it, and revoking it unlists it."""
    page = browser.post("/account/tokens", data={"name": "ci"}).text
    token = page.partition('class="secret">')[2].partition("<")[0]
    assert token.startswith("hs_")
    later = browser.get("/account").text
    assert token not in later
    assert "<td><b>ci</b></td>" in later
    browser.post("/account/tokens/1/revocation")
    assert "<td><b>ci</b></td>" not in browser.get("/account").text


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/v1/tokens"), ("DELETE", "/api/v1/tokens/99")]
)
def test_account_shows_when_a_token_was_last_used(
    browser: TestClient, script: TestClient, method: str, path: str
) -> None:
    """The account page marks a token as unused until it has read or written something."""
    assert '"last used">never</td>' in browser.get("/account").text
    script.request(method, path)
    assert '"last used">never</td>' not in browser.get("/account").text


def test_a_token_that_writes_is_made_and_named_as_such(browser: TestClient) -> None:
    """The page offers a token that may only upload, shows each token's scope, and rejects unknown
    kinds.
    """
    made = browser.post("/account/tokens", data={"name": "gpu-7", "kind": "write"})
    assert '<b>gpu-7</b></td><td data-called="scope">upload watched runs</td>' in made.text
    wrong = browser.post("/account/tokens", data={"name": "x", "kind": "root"})
    assert wrong.status_code == 422
    assert (
        "&#39;root&#39; is not valid; allowed: full, read, submit, control, write, run"
        in wrong.text
    )


def test_a_token_for_one_run_names_a_watched_run_of_ones_own(
    browser: TestClient,
    stranger: TestClient,
    database: Database,
    ada: User,
    running: Run,
    tmp_path: Path,
) -> None:
    """Only a token of kind `run` names a run: a watched one of the user, not a missing one, a
    worker's or another user's. The form preserves the input, and ignores a run for other kinds.
    """
    uploader = Uploader(stranger, write_token(database, ada), tmp_path)
    mine = uploader.begin().json()["run"]
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        projects.set_role(session, bob, "digits", "member")
    uploader.headers = {"Authorization": f"Bearer {write_token(database, bob)}"}
    theirs = uploader.begin().json()["run"]
    for run_id in ("", running.id, theirs):
        form = {"name": "typed", "kind": "run", "run_id": str(run_id), "days": "7"}
        refused = browser.post("/account/tokens", data=form)
        assert refused.status_code == 422
        for text in ('value="typed"', '<option value="run" selected>', 'value="7"'):
            assert text in refused.text
    form = {"name": "x", "kind": "write", "run_id": str(mine)}
    assert browser.post("/account/tokens", data=form).status_code == 200
    refused = browser.post("/api/v1/tokens", json=form | {"run_id": mine})
    assert refused.json()["errors"]["run_id"].endswith("allowed: none with the kind write")
    for run_id in ("x", "0", str(2**63), "9" * 400):
        form = {"name": "x", "kind": "run", "run_id": run_id}
        assert browser.post("/account/tokens", data=form).status_code == 422
    made = browser.post("/account/tokens", data={"name": "its", "kind": "run", "run_id": str(mine)})
    assert f'upload one watched run: <a href="/runs/{mine}">' in made.text
    wanted = {"name": "its", "kind": "run", "run_id": mine}
    assert browser.post("/api/v1/tokens", json=wanted).json()["run_id"] == mine
