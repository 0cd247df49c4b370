"""Sign-in by link and by password, and sign-out."""

from types import SimpleNamespace

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from db.access import accounts
from db.access.login_attempts import FREE_ATTEMPTS
from db.database import Database
from db.tables import User


def test_link_signs_in_once_and_leaves_the_address(
    database: Database, ada: User, stranger: TestClient
) -> None:
    """The page of a sign-in link says whom it signs in. The token is spent by its first use and
    is not in the address that the browser ends at.
    """
    with database.writing() as session:
        token = accounts.make_link_token(session, ada)
    seen = stranger.get("/", params={"token": token})  # as a chat's preview does
    assert (seen.status_code, stranger.get("/runs").status_code) == (200, 303)
    assert "signs you in as <b>ada</b>" in seen.text
    assert "signs you in, once" in stranger.get("/", params={"token": "spent"}).text
    abroad = {"origin": "https://evil.example"}
    assert stranger.post("/", data={"token": token}, headers=abroad).status_code == 403
    first = stranger.post("/", data={"token": token})
    assert (first.status_code, first.headers["location"]) == (303, "/runs")
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert stranger.get("/runs").status_code == 200
    stranger.cookies.clear()
    second = stranger.post("/", data={"token": token})
    assert second.headers["location"].endswith("/sign-in?problem=link")
    assert stranger.get("/runs").status_code == 303


def test_password_signs_in_and_leads_back(
    database: Database, ada: User, stranger: TestClient
) -> None:
    """After a sign-in the requested page opens."""
    with database.writing() as session:
        accounts.set_password(session, session.get_one(User, ada.id), "a long secret")
    form = {"name": "ada", "password": "a long secret", "next": "/workers"}
    answer = stranger.post("/sign-in", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/workers")
    assert stranger.get("/workers").status_code == 200


def test_wrong_password_keeps_the_name(stranger: TestClient) -> None:
    """After a wrong password the form names the problem, and keeps the name only."""
    answer = stranger.post("/sign-in", data={"name": "eve", "password": "guessing!"})
    assert answer.status_code == 401
    assert 'value="eve"' in answer.text
    assert "guessing!" not in answer.text


def test_another_site_cannot_sign_a_browser_in(stranger: TestClient) -> None:
    """A form that another site sends is refused, whatever the password."""
    for said in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://localhost:9999"},
        {"origin": "null"},
        {"origin": ""},
    ):
        answer = stranger.post("/sign-in", data={"name": "ada"}, headers=said)
        assert answer.status_code == 403
    del stranger.headers["origin"]
    assert stranger.post("/sign-in", data={"name": "ada"}).status_code == 403


def test_sign_out_ends_the_session(browser: TestClient) -> None:
    """The cookie of a session that was ended opens nothing."""
    cookies = dict(browser.cookies)
    assert browser.post("/sign-out").headers["location"] == "/sign-in"
    browser.cookies.update(cookies)
    assert browser.get("/runs").status_code == 303


def test_verifying_a_password_holds_no_lock(
    database: Database, ada: User, stranger: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other writers continue while a password is verified by Argon2."""
    verify = accounts.check_password

    def verify_while_another_writes(session: Session, name: str, password: str) -> User:
        with database.writing() as other:
            accounts.user_named(other, "written meanwhile")
        return verify(session, name, password)

    monkeypatch.setattr(accounts, "check_password", verify_while_another_writes)
    assert stranger.post("/sign-in", data={"name": "ada", "password": "wrong"}).status_code == 401
    with database.reading() as session:
        assert session.scalar(select(User).where(User.name == "written meanwhile"))


def test_sign_in_attempts_are_throttled(
    ada: User, monkeypatch: pytest.MonkeyPatch, stranger: TestClient
) -> None:
    """After too many failed sign-ins even the right password gets a waiting time."""
    standing = SimpleNamespace(current=lambda _session: 0.0)  # however long they take here
    monkeypatch.setattr("db.access.login_attempts.clock", standing)
    form = {"name": "ada", "password": "wrong"}
    for _ in range(FREE_ATTEMPTS["name"]):
        assert stranger.post("/sign-in", data=form).status_code == 401
    answer = stranger.post("/sign-in", data=form)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "Try again in 1 second." in answer.text


def test_sign_in_page_says_nothing_that_an_address_makes_up(stranger: TestClient) -> None:
    """The URL selects one of the server's own messages, and cannot contain a text to show."""
    assert "locked" not in stranger.get("/sign-in?problem=You+are+locked+out").text
    assert accounts.LINK_REFUSED in stranger.get("/sign-in?problem=link").text
