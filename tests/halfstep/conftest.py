"""A real server for the client, by the fixtures of the server's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.access import accounts
from db.database import Database
from db.tables import User
from halfstep import Client
from tests.app.conftest import address, offered, running, settings

__all__ = ["address", "offered", "running", "settings"]


@pytest.fixture(autouse=True)
def stranger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the servers of the user who runs the tests; return the folder of `halfstep login`."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    for name in ("HALFSTEP_URL", "HALFSTEP_TOKEN", "HALFSTEP_MODE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def client(address: str, token: str, offered: None) -> Iterator[Client]:
    """A client of a real server with a worker for digits."""
    with Client(address, token) as client:
        yield client


@pytest.fixture
def server(address: str, database: Database, ada: User) -> dict[str, str]:
    """A real server, and a token that may only write."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "writer", kind="write")
    return {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
