"""Fixtures: the server as browsers and scripts use it, with rows that the database layer wrote."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.http.credentials import cookie_name
from app.main import create_app
from app.serve import Server
from db.access import accounts
from db.database import Database
from db.queue import claims, queue, workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, User

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "precision": {
            "title": "Precision",
            "description": "How to compute.",
            "enum": ["fp16", "bf16", "fp32"],
            "type": "string",
            "default": "fp16",
        },
        "training": {
            "title": "Training",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "steps": {"title": "Steps", "type": "integer", "minimum": 1, "default": 400},
                "batch_size": {
                    "title": "Batch size",
                    "description": "Examples a step.",
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 1437,
                    "default": 64,
                },
                "max_grad_norm": {
                    "title": "Largest norm",
                    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                    "default": 1.0,
                },
                "fused": {"title": "Fused", "type": "boolean", "default": True},
                "tf32": {"title": "TF32", "type": "boolean", "default": False},
            },
        },
        "modules": {
            "title": "Modules",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "fp32": {
                    "title": "In fp32",
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 40},
                    "maxItems": 3,
                    "default": [],
                },
            },
        },
        "scaler": {
            "title": "Loss scaler",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "enabled": {"title": "Enabled", "type": "boolean", "default": True},
                "init_scale": {
                    "title": "Initial scale",
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "default": 16777216.0,
                },
            },
        },
    },
}
CPU = {
    "kind": "cpu",
    "index": 0,
    "name": "CPU",
    "memory_bytes": 8_000_000_000,
    "compute_capability": None,
    "fp16": True,
    "bf16": True,
    "tf32": False,
}
DIGITS = {"name": "digits", "title": "Digits", "description": "Digits.", "schema": SCHEMA}
CONFIG = {
    "precision": "fp16",
    "training": {
        "steps": 400,
        "batch_size": 64,
        "max_grad_norm": 1.0,
        "fused": True,
        "tf32": False,
    },
    "modules": {"fp32": []},
    "scaler": {"enabled": True, "init_scale": 16777216.0},
}
#: FastAPI's description of the routes, once it was made: it takes a second, and all apps have it.
DESCRIPTIONS: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def one_event_loop() -> Iterator[None]:
    """Share one event loop among clients without `with`; each request would start its own."""
    with start_blocking_portal() as portal:
        TestClient.portal = portal
        yield
        TestClient.portal = None


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings of this test's own database and folder."""
    return Settings(data=tmp_path / "data", database_url=database_url)


@pytest.fixture
def app(settings: Settings, database: Database) -> FastAPI:
    """The server without its background tasks."""
    app = create_app(settings, database)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            if not DESCRIPTIONS:
                DESCRIPTIONS.append(json.dumps(describe()))
            app.openapi_schema = json.loads(DESCRIPTIONS[0])
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


@pytest.fixture
def stranger(app: FastAPI) -> Iterator[TestClient]:
    """A browser that is not signed in; it sends the origin of forms, as browsers do."""
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as client:
        client.headers["origin"] = "http://localhost"
        yield client


@pytest.fixture
def browser(app: FastAPI, database: Database, ada: User) -> Iterator[TestClient]:
    """Ada's browser, as if signed in by a link; it sends the CSRF token as pages' scripts do."""
    with database.writing() as session:
        secret, row = accounts.start_session(session, ada, by_link=True)
        token = row.csrf_token
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as client:
        client.cookies.set(cookie_name(app.state.settings), secret, domain="localhost.local")
        client.headers["x-csrf-token"] = token
        yield client


@pytest.fixture
def script(app: FastAPI, database: Database, ada: User) -> Iterator[TestClient]:
    """A script of Ada's, with an API token."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    headers = {"Authorization": f"Bearer {token}"}
    with TestClient(app, base_url="http://localhost", headers=headers) as client:
        yield client


@pytest.fixture
def offered(database: Database) -> None:
    """A worker that is up and offers digits."""
    offer_digits(database)


@pytest.fixture
def running(database: Database, ada: User, offered: None) -> Run:
    """A run in its first attempt."""
    return start_run(database, ada)


@pytest.fixture
def address(settings: Settings, database: Database) -> Iterator[str]:
    """The address of a real server, with real connections."""
    with serving(settings, database) as (_server, address):
        yield address


class serving:  # noqa: N801 - used as a function
    """Run a real server in a thread; leaving waits until it has stopped."""

    def __init__(self, settings: Settings, database: Database, port: int = 0) -> None:
        self.server = Server(settings, database)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> tuple[Server, str]:
        self.thread.start()
        return self.server, f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_error: object) -> None:
        self.server.should_exit = True
        self.thread.join()


def find_confirmation(page: str) -> str:
    """Return the value with which the form of a preview confirms it."""
    return page.partition('name="confirmed" value="')[2].partition('"')[0]


def client_of(app: FastAPI, database: Database, user: User, **token: Any) -> TestClient:
    """Return a client with a new token of a user. token: its kind, project and others."""
    with database.writing() as session:
        secret, _row = accounts.make_api_token(session, user, "script", **token)
    headers = {"Authorization": f"Bearer {secret}"}
    return TestClient(app, base_url="http://localhost", headers=headers, follow_redirects=False)


def csrf_token(client: TestClient) -> str:
    """Read the CSRF token from a page."""
    page = client.get("/account").text
    return page.partition('name="csrf-token" content="')[2].partition('"')[0]


def offer_digits(database: Database) -> int:
    """Register a worker."""
    with database.writing() as session:
        offer: dict[str, Any] = {"devices": [CPU], "recipes": [DIGITS], "versions": {"torch": "2"}}
        return workers.register(session, name="w1", host="host", pid=1, **offer).id


def submit(database: Database, owner: User, **changes: Any) -> Run:
    """Queue a run."""
    with database.writing() as session:
        values: dict[str, Any] = {"recipe": "digits", "config": CONFIG}
        return runs.submit(session, owner, Run(**(values | changes)))


def start_run(database: Database, owner: User, **changes: Any) -> Run:
    """Queue a run and let the worker start it."""
    submit(database, owner, **changes)
    with database.writing() as session:
        run = claims.claim(
            session,
            1,
            recipes=["digits"],
            precisions=["fp16"],
            free_devices=range(64),
            lease_seconds=60.0,
        )
        assert run is not None
        queue.seconds_since_start(session, run)
        queue.start(session, run.id, run.attempt)
        return run
