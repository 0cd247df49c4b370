"""Sign-in through a real OpenID Connect provider."""

import asyncio
import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy import select
from starlette.testclient import TestClient

from app.auth.sign_in_pages import SSO_COOKIE
from app.main import create_app
from db.access import accounts, oidc_role_mapping, people, projects, secrets
from db.database import Database
from db.errors import Invalid
from db.settings import Settings
from db.tables import User
from tests.marks import looped
from tests.site import free_port, until

pytestmark = pytest.mark.slow

CAROL = {"sub": "1", "preferred_username": "Carol", "groups": ["ml", "leads"]}
ROLES = "ml=member, leads=maintainer@vision, *=viewer, admins=admin"


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    """Start the provider, where Carol may sign in; yield its address."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port)]
    users = [CAROL, {"sub": "2", "preferred_username": "ada"}, {"sub": "3", "email": "e@x.org"}]
    command += [word for each in users for word in ("--user-claims", json.dumps(each))]
    provider = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"

    def answers() -> bool:
        try:
            return httpx2.get(f"{address}/.well-known/openid-configuration").status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        until(answers)
        yield address
    finally:
        provider.kill()
        provider.wait()


@pytest.fixture
def settings(settings: Settings, issuer: str) -> Settings:
    """Settings of a server that uses this provider."""
    settings.data.mkdir(parents=True)
    return settings.model_copy(
        update={
            "oidc_issuer": issuer,
            "oidc_client_id": "halfstep",
            "oidc_client_secret": SecretStr("hush"),
            "oidc_roles": ROLES,
            "public_url": "http://localhost",
        }
    )


@contextmanager
def _client(settings: Settings, database: Database) -> Iterator[TestClient]:
    app = create_app(settings, database)
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as client:
        yield client


def _begin(client: TestClient, target: str = "/sweeps") -> str:
    answer = client.get("/sign-in/sso", params={"next": target})
    assert answer.status_code == 303
    return str(answer.headers["location"])


def _agree(address: str, subject: str) -> str:
    """Sign in at the provider; return the URL to which it redirects."""
    answer = httpx2.post(address, data={"sub": subject, "action": "authorize"})
    back = urlsplit(answer.headers["location"])
    return f"{back.path}?{back.query}"


def test_users_get_the_roles_of_their_groups(
    stranger: TestClient, database: Database, ada: User, settings: Settings
) -> None:
    """The first sign-in creates the account, and later ones reuse it; state and PKCE belong to the
    browser.
    """
    assert "your organisation" in stranger.get("/sign-in").text
    address = _begin(stranger)
    asked = {name: each[0] for name, each in parse_qs(urlsplit(address).query).items()}
    begun = json.loads(secrets.decrypt(settings.secrets_key, stranger.cookies[SSO_COOKIE]))
    digest = hashlib.sha256(begun["code_verifier"].encode()).digest()
    assert asked["code_challenge"] == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    assert (asked["state"], asked["nonce"]) == (begun["state"], begun["nonce"])
    assert begun["code_verifier"] not in address
    answer = stranger.get(_agree(address, "1"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/sweeps")
    assert stranger.get("/runs").status_code == 200
    assert stranger.get("/people").status_code == 403
    with database.writing() as session:
        carol = people.named(session, "carol")
        assert projects.memberships(session, carol) == {"": "member", "vision": "maintainer"}
        projects.set_role(session, carol, "vision", "viewer")
    stranger.cookies.clear()
    assert stranger.get(_agree(_begin(stranger), "1")).status_code == 303
    with database.writing() as session:
        assert projects.memberships(session, carol)["vision"] == "maintainer"
        assert len(session.scalars(select(User)).all()) == 2
        accounts.deactivate(session, people.named(session, "carol"))
    answer = stranger.get(_agree(_begin(stranger), "1"))
    assert (answer.status_code, "deactivated" in answer.text) == (401, True)
    assert stranger.get("/runs").status_code == 303


def test_a_slow_provider_delays_no_other_request(
    stranger: TestClient, app: FastAPI, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow provider holds no database turn, for which other requests would wait."""
    back = _agree(_begin(stranger), "1")
    finish, held = app.state.sso.finish, []

    def watch(*given: str) -> Any:
        held.append(app.state.turns.locked())
        return finish(*given)

    monkeypatch.setattr(app.state, "turns", asyncio.Semaphore(1))
    monkeypatch.setattr(app.state.sso, "finish", watch)
    assert stranger.get(back).status_code == 303
    assert held == [False]


def test_an_account_is_not_taken_over_by_its_name(
    stranger: TestClient, database: Database, ada: User, issuer: str
) -> None:
    """An account is linked to a provider's subject by `halfstep user subject`, not by its name."""
    answer = stranger.get(_agree(_begin(stranger), "2"))
    assert (answer.status_code, "halfstep user subject" in answer.text) == (401, True)
    with database.writing() as session:
        people.set_subject(session, people.named(session, "ada"), f"{issuer} 2")
    assert stranger.get(_agree(_begin(stranger), "2")).status_code == 303
    assert stranger.get("/people").status_code == 200  # the last operator stays one
    assert stranger.get(_agree(_begin(stranger), "3")).status_code == 303
    with database.writing() as session:
        assert projects.memberships(session, people.named(session, "e@x.org")) == {"": "viewer"}
        with pytest.raises(Invalid, match="'ada'"):
            people.set_subject(session, people.named(session, "e@x.org"), f"{issuer} 2")


def test_a_callback_of_another_browser_is_rejected(
    stranger: TestClient, settings: Settings, database: Database, ada: User
) -> None:
    """A sign-in callback with another browser's state or cookie, a missing or old one, a used
    code, or an error of the provider is rejected.
    """
    back = _agree(_begin(stranger), "1")
    with _client(settings, database) as other:
        assert other.get(back).status_code == 401
        _begin(other)
        assert "another browser" in other.get(back).text
    assert stranger.get(f"{back}x").status_code == 401
    _begin(stranger)
    old = json.loads(secrets.decrypt(settings.secrets_key, stranger.cookies[SSO_COOKIE]))
    cookie = secrets.encrypt(settings.secrets_key, json.dumps({**old, "time": 0.0}))
    stranger.cookies.clear()
    stranger.cookies.set(SSO_COOKIE, cookie, domain="localhost.local", path="/sign-in/sso")
    answer = stranger.get(f"/sign-in/sso/answer?code=x&state={old['state']}")
    assert "more than 10 minutes" in answer.text
    stranger.cookies.clear()
    begun = _agree(_begin(stranger), "1")
    state = parse_qs(urlsplit(begun).query)["state"][0]
    assert stranger.get(f"/sign-in/sso/answer?code=wrong&state={state}").status_code == 401
    answer = stranger.get("/sign-in/sso/answer?error=access_denied")
    assert "access_denied" in answer.text
    assert stranger.get("/runs").status_code == 303


def test_passwords_can_be_switched_off(settings: Settings, database: Database, ada: User) -> None:
    """With passwords disabled links and the provider remain; an unreachable one is reported."""
    away = {"password_login": False, "oidc_issuer": "http://localhost:9"}
    with _client(settings.model_copy(update=away), database) as client:
        assert "Password" not in client.get("/sign-in").text
        form = {"name": "ada", "password": "x"}
        assert client.post("/sign-in", data=form).status_code == 403
        assert client.get("/sign-in/sso").status_code == 502
    with _client(settings.model_copy(update={"oidc_issuer": ""}), database) as client:
        assert "organisation" not in client.get("/sign-in").text
        assert client.get("/sign-in/sso").status_code == 404


@looped("text", ["ml", "ml=king", "=viewer", "ml=member@a, x"])
def test_invalid_role_rules_are_rejected(settings: Settings, database: Database, text: str) -> None:
    """A server with invalid role rules does not start; the error names the allowed values."""
    with pytest.raises(Invalid, match=r"HALFSTEP_OIDC_ROLES: .* allowed: group=role"):
        create_app(settings.model_copy(update={"oidc_roles": text}), database)


def test_the_strongest_of_several_groups_counts(database: Database, ada: User) -> None:
    """A role that no group grants any more is removed, in projects with rules only."""
    rules = oidc_role_mapping.parse("a=viewer@p, b=maintainer@p, c=member@p, o=admin")
    cases: list[tuple[set[str], Any]] = [
        ({"a", "b", "c"}, "maintainer"),
        ({"a", "c"}, "member"),
        ({"x"}, None),
    ]
    with database.writing() as session:
        bob = accounts.make_user(session, "bob")
        projects.make(session, "other")
        projects.set_role(session, bob, "other", "viewer")
        for groups, role in cases:
            oidc_role_mapping.apply(session, bob, rules, groups)
            assert projects.memberships(session, bob).get("p") == role
            assert projects.memberships(session, bob)["other"] == "viewer"
        oidc_role_mapping.apply(session, bob, rules, {"o"})
        assert bob.is_admin
        oidc_role_mapping.apply(session, bob, rules, set())
        assert not bob.is_admin
