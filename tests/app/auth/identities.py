"""Senders of requests: their secrets, and what they may see."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from httpx2 import Response
from sqlalchemy import update
from starlette.testclient import TestClient

from app.http.credentials import cookie_name
from db.access import accounts, shared_links
from db.database import Database
from db.tables import ApiToken, SharedLink, SignInSession, User
from tests.app.installation import OPEN, Installation


@dataclass
class Caller:
    """A sender of requests: user is the owner of the rows that it may change, sees whether it may
    see the hidden project's texts.
    """

    client: TestClient
    user: User | None = None
    sees: bool = False
    is_refused: bool = False
    _cookies: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cookies = list(self.client.cookies.jar)

    def request(self, method: str, address: str, **options: Any) -> Response:
        """Send a request with the identity's first cookies, which an earlier one may have
        replaced.
        """
        self.client.cookies.clear()
        for cookie in self._cookies:
            self.client.cookies.jar.set_cookie(cookie)
        return self.client.request(method, address, **options)


Identity = Callable[[FastAPI, Database, Installation], Caller]


def _client(app: FastAPI, **headers: str) -> TestClient:
    options: dict[str, Any] = {"base_url": "http://localhost", "follow_redirects": False}
    return TestClient(app, headers=headers, raise_server_exceptions=False, **options)


def by_token(name: str, *, sees: bool = False, **of: Any) -> Identity:
    def caller(app: FastAPI, database: Database, installed: Installation) -> Caller:
        user = installed.users[name]
        with database.writing() as session:
            token, _row = accounts.make_api_token(session, user, "attack", **of)
        return Caller(_client(app, Authorization=f"Bearer {token}"), user, sees)

    return caller


def by_session(name: str, *, sees: bool = False) -> Identity:
    def caller(app: FastAPI, database: Database, installed: Installation) -> Caller:
        user = installed.users[name]
        with database.writing() as session:
            secret, row = accounts.start_session(session, user)
            csrf = row.csrf_token
        client = _client(app, **{"x-csrf-token": csrf, "origin": "http://localhost"})
        client.cookies.set(cookie_name(app.state.settings), secret, domain="localhost.local")
        return Caller(client, user, sees)

    return caller


def _end(identity: Identity, *statements: Any) -> Identity:
    """Return an identity with an expired or revoked secret."""

    def caller(app: FastAPI, database: Database, installed: Installation) -> Caller:
        found = identity(app, database, installed)
        with database.writing() as session:
            for statement in statements:
                session.execute(statement)
        return Caller(found.client, is_refused=True)

    return caller


def _by_link(app: FastAPI, database: Database, installed: Installation) -> Caller:
    with database.writing() as session:
        secret, row = shared_links.make(
            session, installed.open.owner, installed.open.runs[:1], days=1
        )
        link_id = row.id
    client = _client(app, origin="http://localhost")
    answer = client.post("/shared", data={"secret": secret})
    assert answer.status_code == 303
    assert "agora run" in client.get(f"/shared/{link_id}").text
    name = f"{cookie_name(app.state.settings)}-link"
    client.cookies.set(name, secret, domain="localhost.local", path="/")
    return Caller(client, is_refused=True)


EXPIRED = update(ApiToken).where(ApiToken.name == "attack").values(expires_at=1.0)
IDENTITIES: dict[str, Identity] = {
    "anonymous": lambda app, _database, _installed: Caller(_client(app), is_refused=True),
    "unknown token": lambda app, _database, _installed: Caller(
        _client(app, Authorization="Bearer hs_unknown"), is_refused=True
    ),
    "expired token": _end(by_token("owner"), EXPIRED),
    "revoked token": _end(by_token("owner"), ApiToken.__table__.delete()),
    "expired session": _end(by_session("owner"), update(SignInSession).values(expires_at=1.0)),
    "ended session": _end(by_session("owner"), SignInSession.__table__.delete()),
    "deactivated": _end(by_token("owner"), update(User).values(deactivated_at=1.0)),
    "read-only link": _by_link,
    "ended link": _end(_by_link, update(SharedLink).values(expires_at=1.0)),
    "outsider": by_token("outsider"),
    "outsider's browser": by_session("outsider"),
    "left the project": by_token("left"),
    "limited token": by_token("both", project=OPEN),
    "limited token to read": by_token("both", kind="read", project=OPEN),
    "limited token to steer": by_token("both", kind="control", project=OPEN),
    "limited token of the operator": by_token("operator", project=OPEN),
    "outsider's token to send": by_token("outsider", kind="write"),
    "token to send": by_token("both", kind="write"),
    "viewer": by_token("viewer", sees=True),
    "viewer's browser": by_session("viewer", sees=True),
    "token to read": by_token("owner", kind="read", sees=True),
}
