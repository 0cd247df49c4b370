"""A server on this machine that its user's scripts find."""

import fcntl
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.api_client import local_server
from halfstep.api_client.errors import ApiError
from halfstep.client import Client
from halfstep.session.queued_run import FOLDER
from halfstep.session.run_upload import server_of
from tests import warm
from tests.journeys.installation import Installation, until_some
from tests.site import up

SCRIPT = """
import halfstep
with halfstep.watch(name="found", console=False, system=False) as watch:
    watch.log({"loss": 1.0}, step=1)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which servers are announced."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "halfstep" / "servers"


def test_a_server_is_found_while_it_runs(tmp_path: Path, state: Path) -> None:
    """A server is found only while it runs; its token can be reused, and its file is private."""
    assert local_server.running() is None
    with local_server.announce(tmp_path, "http://127.0.0.1:8000", "hs_a"):
        found = local_server.running()
        assert found is not None
        assert found[:2] == ("http://127.0.0.1:8000", "hs_a")
    assert local_server.running() is None
    assert local_server.token_of(tmp_path) == "hs_a"
    assert local_server.token_of(tmp_path / "another") is None
    [path] = state.glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_the_server_that_started_last_is_found(tmp_path: Path) -> None:
    """Of several servers on one machine, each with a data folder, the last one started is found."""
    with (
        local_server.announce(tmp_path / "1", "http://127.0.0.1:8001", "hs_1"),
        local_server.announce(tmp_path / "2", "http://127.0.0.1:8002", "hs_2"),
    ):
        found = local_server.running()
        assert found is not None
        assert found.token == "hs_2"


def test_a_script_that_looks_delays_a_server_only(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that searches for a server holds the file lock only while it reads."""
    with local_server.announce(tmp_path, "http://127.0.0.1:8000", "hs_a"):
        [path] = state.glob("*.lock")
    look = path.open()
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(local_server.time, "sleep", lambda _seconds: look.close())
    with local_server.announce(tmp_path, "http://127.0.0.1:8000", "hs_a"):
        assert look.closed
        assert local_server.running() is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps({"url": "http://127.0.0.1:1", "token": "hs_a", "machine": "another"}).encode(),
    ],
)
def test_what_cannot_be_read_is_no_server(tmp_path: Path, state: Path, content: bytes) -> None:
    """A damaged server file, or one of another machine with the same home folder, is ignored."""
    with local_server.announce(tmp_path, "http://127.0.0.1:8000", "hs_a"):
        [path] = state.glob("*.json")
        path.write_bytes(content)
        assert local_server.running() is None


def _watch(folder: Path) -> str:
    """Run a watched script; return its stderr."""
    (folder / "script.py").write_text(SCRIPT)
    ended = warm.run([sys.executable, "script.py"], cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_a_script_needs_no_token_for_halfstep_up(tmp_path: Path, database_url: str) -> None:
    """A script's run belongs to the user of `halfstep up`; later starts reuse the token."""
    installation = Installation(tmp_path / "data", database_url)
    for count in (1, 2):
        with installation.running() as admin:
            _watch(tmp_path)
            until_some(lambda: list(admin.client.runs("status:finished found"))[count - 1 :])  # noqa: B023
            assert admin.browser.get("/account").text.count("scripts on this machine") == 1
    assert "the run is in" in _watch(tmp_path)


@pytest.mark.slow
def test_scripts_do_not_find_a_server_that_forbids_it(tmp_path: Path, database_url: str) -> None:
    """HALFSTEP_LOCAL_SCRIPTS=no hides the server from scripts."""
    environment = Installation(tmp_path / "data", database_url).environment
    with up(**environment, HALFSTEP_LOCAL_SCRIPTS="no"):
        assert local_server.running() is None


def test_a_queued_run_uses_only_the_server_of_its_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued run ignores a server of the same user that does not own its worker."""
    monkeypatch.delenv("HALFSTEP_URL", raising=False)
    monkeypatch.delenv("HALFSTEP_TOKEN", raising=False)
    monkeypatch.setenv("HALFSTEP_ATTEMPT", "1")
    with local_server.announce(tmp_path / "own", "http://127.0.0.1:8001", "hs_1"):
        for data, url in (("own", "http://127.0.0.1:8001"), ("other", None)):
            monkeypatch.setenv(FOLDER, str(tmp_path / data / "runs" / "3"))
            found = server_of(None, None)
            assert (found and found.url) == url


def test_commands_without_a_login_name_the_server_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a login, error messages and `halfstep login` use the URL of the local server."""
    for name in ("HALFSTEP_URL", "HALFSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with local_server.announce(tmp_path, "http://127.0.0.1:9", "hs_a"):
        with pytest.raises(
            ApiError, match=r"at http://127.0.0.1:9/account, .* http://127.0.0.1:9`"
        ):
            Client()
        with Client(token="hs_b") as client:
            assert client.page_url(1) == "http://127.0.0.1:9/runs/1"
        command = [sys.executable, "-m", "halfstep.cli.main", "login"]
        ended = subprocess.run(command, input="hs_b", capture_output=True, text=True, check=False)
        assert "The token for http://127.0.0.1:9 is stored" in ended.stdout
    assert local_server.default_url() == local_server.URL
