"""Long requests end when their authorization ends, and are limited per user."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, event
from starlette.requests import Request
from starlette.testclient import TestClient

from app import dependencies
from app.http import active_requests
from app.http.active_requests import DOWNLOAD, STREAM
from app.http.credentials import cookie_name
from db.access import accounts, projects
from db.access.permissions import MEMBER, PERMISSIONS_OF, Grants
from db.database import Database
from db.settings import Settings
from db.tables import ApiToken, Run, User
from tests.app.conftest import start_run, submit
from tests.e2e.test_artifacts import publish
from tests.site import until

pytestmark = pytest.mark.sql

PROJECT = "vision"
BIG = 32 << 20  # more than sockets hold


def _user(database: Database, name: str) -> tuple[User, dict[str, str], ApiToken]:
    """Make a user with a role in a project, and a token."""
    with database.writing() as session:
        user = accounts.make_user(session, name)
        projects.set_role(session, user, PROJECT, MEMBER)
        token, row = accounts.make_api_token(session, user, "script")
    return user, {"Authorization": f"Bearer {token}"}, row


def _ends(answer: httpx2.Response) -> bool:
    """Return whether a response is cut off before its end."""
    try:
        for _piece in answer.iter_raw():
            pass
    except httpx2.RemoteProtocolError:
        return True
    except httpx2.ReadError:
        return True
    return False


@contextmanager
def _statements(engine: Engine) -> Iterator[list[str]]:
    """Count the statements of this thread, without those of the server's threads."""
    said: list[str] = []
    ours = threading.get_ident()

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if threading.get_ident() == ours:
            said.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield said
    event.remove(engine, "before_cursor_execute", note)


@pytest.mark.one_database
@pytest.mark.slow
def test_long_requests_end_with_their_authorization(
    settings: Settings, database: Database, ada: User, offered: None, address: str
) -> None:
    """Removal, deactivation, revocation, a new password, sign-out or loss of the role ends the
    user's open streams and downloads and rejects a running upload, with two queries. Those of
    others continue.
    """
    with database.writing() as session:
        projects.make(session, PROJECT)
    run = start_run(database, ada, project=PROJECT)
    publish(settings, database, run, "big.bin", bytes(BIG))
    changes: dict[str, Callable[[Any, User, ApiToken], object]] = {
        "removed": lambda session, user, _token: accounts.remove(session, user),
        "deactivated": lambda session, user, _token: accounts.deactivate(session, user),
        "revoked": lambda session, user, token: accounts.delete_api_token(session, user, token.id),
        "renewed": lambda session, user, _token: accounts.set_password(session, user, "p" * 8),
        "roleless": lambda session, user, _token: projects.take_role(session, user, PROJECT),
    }
    known = {name: _user(database, name) for name in changes}
    hashes = [row.token_hash for _user, _headers, row in known.values()]
    with database.reading() as session, _statements(database.engine) as said:
        assert set(accounts.all_grants(session, hashes)) == set(hashes)
    assert sum("FROM" in each for each in said) == 2
    with database.writing() as session:
        secret, _row = accounts.start_session(session, ada)
        token, _row2 = accounts.make_api_token(session, ada, "stays")
    cookie = {"Cookie": f"{cookie_name(settings)}={secret}"}
    paths = (f"/api/v1/runs/{run.id}/live", f"/runs/{run.id}/artifacts/1/download")
    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=address, timeout=60))

        def open_stream(path: str, headers: dict[str, str]) -> httpx2.Response:
            answer = stack.enter_context(client.stream("GET", path, headers=headers))
            assert answer.status_code == 200
            return answer

        everybodys = [headers for _user, headers, _row in known.values()]
        lasting = [
            open_stream(path, headers) for headers in (*everybodys, cookie) for path in paths
        ]
        staying = open_stream("/api/v1/runs/live", {"Authorization": f"Bearer {token}"})
        host, _, port = address.removeprefix("http://").partition(":")
        upload = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        authorization = known["removed"][1]["Authorization"]
        head = f"PUT /api/v1/uploads/w.pt HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BIG}\r\n"
        upload.sendall(f"{head}Authorization: {authorization}\r\n\r\n".encode() + bytes(100))
        incoming = settings.data / "uploads" / "incoming"
        upload.sendall(bytes(5 << 20))
        until(lambda: incoming.exists() and list(incoming.iterdir()) != [])
        with database.writing() as session:
            for name, (user, _headers, token_row) in known.items():
                changes[name](session, session.merge(user), token_row)
        client.post("/sign-out", headers=cookie | {"X-CSRF-Token": _row.csrf_token})
        assert all(map(_ends, lasting))

        def is_refused() -> bool:
            upload.sendall(b"x")
            upload.settimeout(0.1)
            try:
                return b"401" in upload.recv(100)
            except TimeoutError:
                return False

        until(is_refused)
        until(lambda: list(incoming.iterdir()) == [])
        submit(database, ada, project=PROJECT)
        assert any("event" in line or "data" in line for line in staying.iter_lines())


def test_open_requests_of_a_user_are_limited(
    database: Database,
    running: Run,
    script: TestClient,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream above the limit gets 429 and a time to retry, until another one ends; each user
    has a separate limit.
    """
    monkeypatch.setattr(active_requests, "MOST_OF_USER", {"stream": 2})
    path = f"/api/v1/runs/{running.id}/live"
    own = {"Authorization": script.headers["authorization"]}
    with httpx2.Client(base_url=address, headers=own, timeout=60) as client, ExitStack() as stack:
        streams = [stack.enter_context(client.stream("GET", path)) for _ in range(2)]
        assert [each.status_code for each in streams] == [200, 200]
        refused = client.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["code"] == "too_many_at_once"
        streams[0].close()

        def is_let_in() -> bool:
            with client.stream("GET", path) as answer:
                return answer.status_code == 200

        until(is_let_in)


def test_turns_have_a_queue_with_an_end() -> None:
    """Only a number of passwords are verified and of requests wait at once; more are rejected."""

    async def play() -> None:
        queue, gate, inside = active_requests.Queue(2, 4, "passwords"), asyncio.Event(), []

        async def take(number: int) -> None:
            async with queue.turn():
                inside.append(number)
                await gate.wait()

        async with asyncio.timeout(60):
            tasks = [asyncio.ensure_future(take(number)) for number in range(4)]
            while len(inside) < 2 or queue._count < 4:
                await asyncio.sleep(0)
            with pytest.raises(active_requests.TooManyAtOnce, match="Too many passwords"):
                await take(4)
            assert inside == [0, 1]
            gate.set()
            await asyncio.gather(*tasks)
            await take(5)
        assert inside == [0, 1, 2, 3, 5]

    asyncio.run(play())


def test_requests_that_wait_are_counted_by_what_they_came_with(app: FastAPI) -> None:
    """One token cannot fill the queue of waiting requests for all others."""
    flights = app.state.active_requests
    for _ in range(active_requests.MOST_REQUESTS):
        flights.queue("a")
    with pytest.raises(active_requests.TooManyAtOnce):
        flights.queue("a")
    flights.queue("b")
    flights.unqueue("a")
    flights.queue("a")


def test_one_client_has_one_count_whatever_it_sends(
    app: FastAPI, database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """A client's valid tokens and sessions in any spelling count once; others by address."""
    token = script.headers["authorization"].split()[1]
    session = browser.cookies[cookie_name(app.state.settings)]
    spellings = [
        {"authorization": f"{scheme}{spaces}{token}{end}"}
        for scheme in ("Bearer", "bearer", "BEARER")
        for spaces in (" ", "   ")
        for end in ("", " ")
    ]
    cookies = [
        {"cookie": f"{more}{cookie_name(app.state.settings)}={session}"}
        for more in ("", "a=1; ", "b=2; c=3; ")
    ]
    invented = [
        {"authorization": "Bearer hs_1"},
        {"authorization": "Bearer hs_2"},
        {"authorization": "Basic YQ=="},
        {"cookie": "a=1"},
        {"cookie": f"{cookie_name(app.state.settings)}=x"},
        {},
    ]
    assert {script.get("/api/v1/runs").status_code, browser.get("/runs").status_code} == {200}
    clients = [
        {_client_of(app, headers) for headers in each} for each in (spellings, cookies, invented)
    ]
    assert [len(each) for each in clients] == [1, 1, 1]
    assert len(set().union(*clients)) == 3
    assert _client_of(app, {}, "2001:db8::1") == _client_of(app, {}, "2001:db8::2")


def _client_of(app: FastAPI, headers: dict[str, str], address: str = "192.0.2.1") -> str:
    """Return the key under which a request is counted while it waits."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": raw, "app": app}
    request = Request({**scope, "client": (address, 1), "scheme": "http", "query_string": b""})
    counted = app.state.active_requests._turns

    async def wait() -> str:
        turn = dependencies._turn(request)
        await anext(turn)
        [client] = counted
        await turn.aclose()
        return str(client)

    return asyncio.run(wait())


@pytest.mark.one_database
def test_a_stream_begins_again_when_its_user_sees_another_project() -> None:
    """Granting a user another project ends open streams, so that browsers reconnect."""
    before, now = (
        Grants(1, False, dict.fromkeys(names, PERMISSIONS_OF[MEMBER]))
        for names in ((PROJECT,), (PROJECT, "speech"))
    )
    for kind, is_allowed in ((STREAM, False), (DOWNLOAD, True)):
        request = active_requests.ActiveRequest(grants=before, kind=kind)
        assert request.is_allowed(before, PROJECT)
        assert request.is_allowed(now, PROJECT) is is_allowed
