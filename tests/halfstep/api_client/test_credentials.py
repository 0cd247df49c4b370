"""Server and token: arguments, environment and stored login, in this order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep import Client
from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials, Unreadable
from tests.marks import looped

pytestmark = pytest.mark.slow

STORED = Credentials("http://stored", "stored-token")


def login(token: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `halfstep login` with a token as standard input."""
    command = [sys.executable, "-m", "halfstep.cli.main", "login", *words]
    return subprocess.run(command, input=token, capture_output=True, text=True, check=False)


def test_arguments_go_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arguments override the environment, and that the login file, separately for URL and token."""
    assert credentials.find() is None
    credentials.store(STORED)
    place = str(credentials.place())
    assert credentials.find() == STORED._replace(origin=place)
    monkeypatch.setenv("HALFSTEP_TOKEN", "environment's")
    assert credentials.find() == ("http://stored", "environment's", "HALFSTEP_TOKEN")
    monkeypatch.setenv("HALFSTEP_URL", "http://environment/")
    assert credentials.find() == ("http://environment", "environment's", "HALFSTEP_TOKEN")
    assert credentials.find("http://told", "told") == ("http://told", "told", "")
    monkeypatch.delenv("HALFSTEP_TOKEN")
    assert credentials.find("http://stored") == ("http://stored", "stored-token", place)


def test_a_stored_token_is_shown_to_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored token is sent only to its own server, however the URL is spelled."""
    place = credentials.store(STORED)
    assert credentials.find("http://other") is None
    assert credentials.find("http://stored/") == STORED._replace(origin=str(place))
    monkeypatch.setenv("HALFSTEP_URL", "http://other")
    assert credentials.find(otherwise="http://stored") is None


@pytest.mark.slow
def test_login_stores_the_token_privately(stranger: Path) -> None:
    """The login file has mode 0600 and a token read from stdin, which is never printed."""
    done = login("secret-token\n", "http://there/")
    path = stranger / "halfstep" / "login.json"
    assert done.stdout == f"The token for http://there/ is stored in {path}\n"
    result = "halfstep: the token was not checked: the server does not answer at http://there: "
    assert done.stderr.startswith(result)
    assert path.stat().st_mode & 0o777 == 0o600
    assert credentials.find() == ("http://there", "secret-token", str(path))
    assert login("another", "http://there").returncode == 1  # it does not answer
    assert credentials.find() == ("http://there", "secret-token", str(path))
    assert login("another", "http://there", "--force").returncode == 0
    assert credentials.find() == ("http://there", "another", str(path))
    with Client() as client:
        assert client._http.headers["Authorization"] == "Bearer another"
        assert str(client._http.base_url) == "http://there"


def test_a_file_left_by_a_killed_process_of_this_number_is_replaced(tmp_path: Path) -> None:
    """A temporary file of a killed process with the same PID is replaced, since PIDs are reused."""
    path = tmp_path / "login.json"
    left = tmp_path / f".login.json.{os.getpid()}"
    left.write_text("half")
    left.chmod(0o644)
    assert credentials.write_private(path, {"token": "new"}) == path
    assert json.loads(path.read_text()) == {"token": "new"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_place_that_cannot_be_written_or_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an unusable or impossible login file one line with the reason is printed."""
    for base, named in (("/proc/zz", "/proc/zz"), ("/dev/null", "/dev/null/halfstep")):
        monkeypatch.setenv("XDG_CONFIG_HOME", base)
        done = login("token", "http://127.0.0.1:9")
        assert done.stderr.splitlines()[-1].startswith(f"halfstep: {named}")
        assert "Traceback" not in done.stderr
        assert done.returncode == 1
        assert credentials.find() is None


def test_a_login_that_is_a_folder_is_named(stranger: Path) -> None:
    """A login path that is a folder is reported like an unreadable file."""
    (stranger / "halfstep" / "login.json").mkdir(parents=True)
    with pytest.raises(Unreadable, match=r"login\.json cannot be read: Is a directory"):
        credentials.find()


def test_login_names_the_allowed_values() -> None:
    """`login` rejects a URL without a scheme, and a missing token, with the allowed values."""
    assert "url is 'there'; allowed: http://" in login("token", "there").stderr
    assert "no token given: type it" in login("", "http://there").stderr


def test_invalid_credentials_are_named_with_their_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A URL without a host, or an invalid token, is named by its source; the token is not
    printed.
    """
    monkeypatch.setenv("HALFSTEP_TOKEN", "hs_é")
    with pytest.raises(Unreadable, match="HALFSTEP_TOKEN: the token has the character 'é'"):
        Client("http://there")
    with pytest.raises(Unreadable, match=r"^token: the token has the character ' '"):
        Client("http://there", "a b")
    wrong = ["nonsense", "http://", "http://[", "http://there:x"]
    for address in (*wrong, "http://a\nb", "http://a b", "http://a..b", "http://\udcff"):
        monkeypatch.setenv("HALFSTEP_URL", address)
        with pytest.raises(Unreadable, match="HALFSTEP_URL is '"):
            credentials.find(token="token")
    monkeypatch.delenv("HALFSTEP_URL")
    monkeypatch.delenv("HALFSTEP_TOKEN")
    place = credentials.store(STORED._replace(token="hs_é"))
    with pytest.raises(Unreadable, match=f"{place}: the token has"):
        credentials.find()
    assert "the token has the character 'é'" in login("hs_é", "http://there").stderr


def test_a_damaged_file_is_named(stranger: Path) -> None:
    """The error for a damaged login file names the command that replaces it."""
    path = credentials.store(STORED)
    for text in ("{", "[]", '{"url": 5, "token": 6}', '{"url": "http://there", "token": null}'):
        path.write_text(text)
        with pytest.raises(Unreadable, match=r"login\.json is damaged; `halfstep login`"):
            credentials.find()


@looped(
    "url, expected",
    [
        ("http://localhost:8000", True),
        ("http://127.8.9.1", True),
        ("http://[::1]:8000", True),
        ("http://127.org", False),
        ("http://10.0.0.1", False),
    ],
)
def test_only_this_machines_addresses_are_reached_without_a_proxy(url: str, expected: bool) -> None:
    assert credentials.is_local(url) == expected
