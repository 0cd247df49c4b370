"""`halfstep check --upload`, against a real server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from db.access import projects
from db.database import Database
from halfstep import Client
from halfstep.check import report as reports
from halfstep.check.report import MOST_BYTES, MOST_LINES, as_content
from halfstep.check.upload import sources_of
from tests import warm
from tests.app.checks.checks_made import report, row
from tests.halfstep.check.test_check import LINE, SECONDS, SMALL_EPS, folder

__all__ = ["folder"]

STARTED = "step 1"  # what the script prints first


def upload(
    folder: Path, *words: str, server: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `halfstep check --upload` in a folder."""
    command = [sys.executable, "-m", "halfstep.cli.main", "check", "--upload", *words]
    return warm.run(command, cwd=folder, timeout=SECONDS, env={**os.environ, **(server or {})})


@pytest.fixture
def server(server: dict[str, str], database: Database) -> dict[str, str]:
    """A real server with the project vision, and a token that may only upload."""
    with database.writing() as session:
        projects.make(session, "vision")
    return server


def test_a_report_is_uploaded_with_the_sources_that_it_names(
    folder: Path, server: dict[str, str], client: Client
) -> None:
    """The server receives what --json prints, with the named sources; stderr has the address."""
    ended = upload(folder, "--json", "--project", "vision", "train.py", server=server)
    assert ended.returncode == 1
    [check] = client.checks(project="vision")
    assert f"Report: {client.url_of('/checks/')}{check['id']}\n" in ended.stderr
    content = client.check(check["id"])
    assert content["report"] == json.loads(ended.stdout)
    assert content["sources"] == {"train.py": SMALL_EPS}
    assert (content["script"], content["steps"], content["faults"]) == ("train.py", 20, 1)
    assert LINE in [row["line"] for row in content["report"]["rows"]]
    client.delete_check(check["id"])
    assert client.checks() == []


def test_a_healthy_script_is_uploaded_without_sources(
    folder: Path, server: dict[str, str], client: Client
) -> None:
    """A healthy script's report is uploaded without sources, and ends with the address."""
    url, token = server.values()
    words = ("--server", url, "healthy.py")
    ended = upload(folder, *words, server={"HALFSTEP_TOKEN": token})
    assert ended.returncode == 0
    [check] = client.checks()
    assert ended.stdout.endswith(f"\nReport: {url}/checks/{check['id']}\n")
    assert client.check(check["id"])["sources"] == {}


@pytest.mark.parametrize(
    ("words", "server", "what"),
    [
        ((), {}, "no server or no token"),
        ((), {"HALFSTEP_URL": "http://127.0.0.1:9", "HALFSTEP_TOKEN": "t"}, "does not answer"),
        (("--server", "localhost"), {"HALFSTEP_TOKEN": "t"}, "allowed: http://"),
    ],
    ids=["no token", "no server", "no address"],
)
def test_a_missing_server_is_reported_before_the_script_runs(
    folder: Path, words: tuple[str, ...], server: dict[str, str], what: str
) -> None:
    ended = upload(folder, *words, "train.py", server=server)
    assert ended.returncode == 2
    assert what in " ".join(re.sub("[│╭─╮╰╯]", "", ended.stderr).split())
    assert STARTED not in ended.stdout + ended.stderr


def test_a_missing_project_is_reported_before_the_script_runs(
    folder: Path, server: dict[str, str]
) -> None:
    ended = upload(folder, "--project", "speech", "train.py", server=server)
    assert ended.returncode == 2
    assert "speech" in ended.stderr
    assert STARTED not in ended.stdout


def test_project_and_server_are_of_an_upload(folder: Path) -> None:
    words = ("check", "--project", "vision", "train.py")
    command = [sys.executable, "-m", "halfstep.cli.main", *words]
    ended = warm.run(command, cwd=folder, timeout=SECONDS)
    assert ended.returncode == 2
    assert "--upload" in ended.stderr


def test_a_report_that_the_server_does_not_take_is_in_a_file(
    folder: Path, server: dict[str, str], client: Client
) -> None:
    """A report that cannot be uploaded is written to a file, and the exit code is 1."""
    script = folder / "healthy.py"
    break_client = "halfstep.client.Client.upload_check = None"
    script.write_text(f"import halfstep.client\n{break_client}\n{script.read_text()}")
    ended = upload(folder, "healthy.py", server=server)
    assert ended.returncode == 1
    assert "the report is not uploaded" in ended.stderr
    [path] = folder.glob("halfstep-check-*.json")
    assert str(path) in ended.stderr
    assert reports.read(path).steps == 20
    assert client.checks() == []


def test_files_beyond_the_limits_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source files that fit are uploaded in any order, without generated and installed ones."""
    monkeypatch.chdir(tmp_path)
    texts = {"wide.py": "x" * MOST_BYTES, "small.py": "a\0\n", "long.py": "\n" * MOST_LINES}
    texts |= {"last.py": "b"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = (*texts, "<string>", "missing.py", pytest.__file__)
    made = report(*(row("overflow", 1, file=file) for file in files))
    sources, left_out = sources_of(made)
    assert sources == {"small.py": "a\\x00\n", "last.py": "b"}
    assert left_out == ["wide.py", "long.py"]


def test_an_upload_of_the_largest_size_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    """A report of the client's maximum size is accepted by the server."""
    monkeypatch.chdir(tmp_path)
    made = report(*(row("overflow", 1, file=file) for file in ("a.py", "b.py")))
    line = '"\\é' * 20 + "\n"
    whole = len(json.dumps(line).encode()) + 100
    (tmp_path / "a.py").write_text(line * (MOST_BYTES // whole))
    (tmp_path / "b.py").write_text("b")
    sources, left_out = sources_of(made)
    assert (list(sources), left_out) == (["a.py", "b.py"], [])
    client.upload_check(as_content(made), sources)
