"""Every request is authenticated."""

import re
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from sqlalchemy import select, update
from starlette.testclient import TestClient

from app.auth.authentication import local_path
from db.access import accounts
from db.database import Database
from db.tables import ApiToken, Project, Run, User
from tests.app.auth.authentication_made import PUBLIC
from tests.app.conftest import csrf_token
from tests.app.uploading import Uploader, write_token
from tests.db.telemetry.telemetry_made import make_steps
from tests.marks import looped
from tests.site import until


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    found = [
        (method, route.path or "")
        for route in iter_route_contexts(app.routes)
        for method in sorted(getattr(route.original_route, "methods", ()) or ())
    ]
    assert len(found) > 30
    return found


@pytest.mark.slow
def test_every_route_but_the_public_ones_needs_a_sign_in(
    app: FastAPI, stranger: TestClient
) -> None:
    """Without a sign-in each route that is not public answers 401 or redirects to the sign-in."""
    for method, path in _routes(app):
        if path in PUBLIC:
            continue
        address = re.sub(r"\{[^}]+\}", "1", path)
        answer = stranger.request(method, address)
        led = answer.status_code == 303 and answer.headers["location"].startswith("/sign-in?next=")
        assert led or answer.status_code == 401, f"{method} {path}: {answer.status_code}"


@pytest.mark.slow
def test_every_change_by_a_cookie_needs_the_csrf_token(app: FastAPI, browser: TestClient) -> None:
    """A signed-in browser that another site directs gets 403 from each route that changes things,
    or 401 from routes that accept no cookie.
    """
    del browser.headers["x-csrf-token"]
    for method, path in _routes(app):
        if path in PUBLIC or method in ("GET", "HEAD"):
            continue
        refused = 401 if path.startswith("/api/v1/ingest") else 403
        assert browser.request(method, re.sub(r"\{[^}]+\}", "1", path)).status_code == refused, path
    for path in ("/account/tokens", "/api/v1/tokens"):
        assert browser.post(path, headers={"x-csrf-token": "wrong"}).status_code == 403


def test_csrf_token_may_be_a_form_field(browser: TestClient) -> None:
    """Forms without scripts can send the CSRF token as a field."""
    token = browser.headers.pop("x-csrf-token")
    answer = browser.post("/account/tokens", data={"name": "mine", "csrf_token": token})
    assert answer.status_code == 200
    assert "hs_" in answer.text


def test_scripts_need_no_csrf_token(script: TestClient) -> None:
    """Browsers never add a Bearer token by themselves, so it needs no CSRF token."""
    assert script.delete("/api/v1/tokens/99").status_code == 204


def test_a_token_makes_no_tokens(script: TestClient, browser: TestClient) -> None:
    """A token cannot create tokens, which would outlive its own revocation."""
    answer = script.post("/api/v1/tokens", json={"name": "another"})
    assert (answer.status_code, answer.json()["code"]) == (403, "not_for_scripts")
    assert browser.post("/api/v1/tokens", json={"name": "mine"}).status_code == 201


@pytest.mark.slow
def test_a_token_that_writes_opens_nothing_but_the_ingest(
    app: FastAPI, database: Database, ada: User, stranger: TestClient
) -> None:
    """A write token may use ingest and the artifacts that it may read; every other route
    answers 403.
    """
    writing = {"Authorization": f"Bearer {write_token(database, ada)}"}
    _check_it_only_sends(app, stranger, writing, (404, 422))


@pytest.mark.slow
def test_a_token_for_one_run_opens_nothing_but_its_ingest(
    app: FastAPI, database: Database, ada: User, stranger: TestClient, tmp_path: Path
) -> None:
    """A token of one run cannot use the ingest of another run, of its owner or of a missing one."""
    with database.writing() as session:
        full, _row = accounts.make_api_token(session, ada, "full")
    uploader = Uploader(stranger, full, tmp_path)
    uploader.begin(id="0" * 32)
    its_run = uploader.begin().json()["run"]
    with database.writing() as session:
        sending = accounts.make_api_token(session, ada, "its", "run", run_id=its_run)[0]
    uploader.headers = {"Authorization": f"Bearer {sending}"}
    assert its_run == 2
    _check_it_only_sends(app, stranger, uploader.headers, (403, 422), is_one_run=True)
    for other in ("0" * 32, "1" * 32):
        assert uploader.begin(id=other).json()["code"] == "not_for_sending"
    with uploader.spool() as spool:
        spool.steps(make_steps([1.0]))
    assert uploader.begin(project="made-by-it").json()["run"] == its_run
    assert (uploader.send().status_code, uploader.end(step=1).status_code) == (200, 200)
    with database.reading() as session:
        assert session.get_one(Run, its_run).step == 1
        assert session.get(Project, "made-by-it") is None


#: Routes for a script's token that uploads: of `watch.use`, checks, and a sweep's agents.
FOR_SCRIPTS = {
    ("POST", "/api/v1/checks"),
    ("GET", "/api/v1/artifacts/version"),
    ("GET", "/api/v1/artifact-versions/{version_id}/files/{path:path}"),
    ("HEAD", "/api/v1/artifact-versions/{version_id}/files/{path:path}"),
    ("POST", "/api/v1/sweeps/agents"),
    ("POST", "/api/v1/sweeps/{sweep_id}/claims"),
    ("PUT", "/api/v1/sweeps/{sweep_id}/claims/{number}"),
    ("POST", "/api/v1/sweeps/{sweep_id}/claims/{number}/end"),
    ("POST", "/api/v1/sweeps/{sweep_id}/claims/{number}/return"),
}


def _check_it_only_sends(
    app: FastAPI,
    client: TestClient,
    headers: dict[str, str],
    at_ingest: tuple[int, ...],
    *,
    is_one_run: bool = False,
) -> None:
    for method, path in _routes(app):
        if path in PUBLIC:
            continue
        answer = client.request(method, re.sub(r"\{[^}]+\}", "1", path), headers=headers)
        if path.startswith("/api/v1/ingest"):
            assert answer.status_code in at_ingest, f"{method} {path}: {answer.status_code}"
            continue
        if not is_one_run and (method, path) in FOR_SCRIPTS:
            assert answer.status_code in (200, 404, 422), f"{method} {path}: {answer.status_code}"
            continue
        if path.startswith("/shared/"):  # which no token opens
            assert answer.status_code == 401, f"{method} {path}: {answer.status_code}"
            continue
        assert answer.status_code == 403, f"{method} {path}: {answer.status_code}"
        if method != "HEAD":
            assert answer.json()["code"] == "write_only"
            assert "may only upload watched runs" in answer.json()["detail"]


def test_a_reader_with_a_token_waits_for_no_writer(
    database: Database, ada: User, address: str
) -> None:
    """The use of a token is recorded after the response, without waiting for the write lock."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    with database.writing() as session:
        session.execute(update(ApiToken).values(name="held"))  # SQLite's lock, PostgreSQL's row
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx2.get(f"{address}/api/v1/runs", headers=headers, timeout=None)
        assert answer.status_code == 200

    _until_noted(database)


def test_a_token_is_noted_after_a_request_that_found_nothing(
    database: Database, ada: User, address: str
) -> None:
    """A failed request does not record its token's use, and the next successful one does."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    headers = {"Authorization": f"Bearer {token}"}
    for path, status in (("runs/1234", 404), ("runs", 200)):
        answer = httpx2.get(f"{address}/api/v1/{path}", headers=headers, timeout=None)
        assert answer.status_code == status
    _until_noted(database)


def _until_noted(database: Database) -> None:
    def is_noted() -> bool:
        with database.reading() as session:
            return session.scalars(select(ApiToken.used_at)).one() is not None

    until(is_noted)


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer", "Basic YTpi"])
def test_wrong_authorization_is_rejected(stranger: TestClient, header: str) -> None:
    """An unknown, missing or wrong kind of token does not sign in."""
    assert stranger.get("/api/v1/runs", headers={"Authorization": header}).status_code == 401


def test_cookie_is_out_of_reach_of_scripts_and_other_sites(
    browser: TestClient, stranger: TestClient
) -> None:
    """The session's cookie is HttpOnly and SameSite, and its pages have another secret."""
    cookies = browser.cookies
    (name,) = cookies.keys()
    assert cookies[name] not in browser.get("/account").text
    assert csrf_token(browser) != cookies[name]


@looped(
    "address, target",
    [
        ("/runs/3?x=time", "/runs/3?x=time"),
        ("https://evil.example", "/"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/\t/evil.example", "/"),
        ("", "/"),
    ],
)
def test_redirects_stay_on_this_server(address: str, target: str) -> None:
    """Redirects lead only to paths of this server."""
    assert local_path(address) == target
