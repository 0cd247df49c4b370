"""A real server for the client, as the server's own tests have it."""

import sys
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


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests had torch.compile do in this process is forgotten."""
    if frames := sys.modules.get("torch._dynamo.convert_frame"):
        monkeypatch.setattr(frames, "FRAME_COUNTER", 0)
