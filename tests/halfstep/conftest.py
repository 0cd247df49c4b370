"""A real server for the client, as the server's own tests have it."""

from pathlib import Path

import pytest

from tests.app.conftest import address, offered, running, settings

__all__ = ["address", "offered", "running", "settings"]


@pytest.fixture(autouse=True)
def stranger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Know no server: nothing of whoever runs the tests. Where `halfstep login` keeps things."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    for name in ("HALFSTEP_URL", "HALFSTEP_TOKEN", "HALFSTEP_MODE"):
        monkeypatch.delenv(name, raising=False)
    return folder
