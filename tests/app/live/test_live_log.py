"""The downloadable log of a running run."""

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.live import run_updates
from app.live.live_log import live_parts
from db.database import Database
from db.files import artifacts
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status
from db.telemetry.telemetry import Flush, LogRow, record
from halfstep.sidecar.log_file import LogFile, compress, forget_part


def publish(settings: Settings, database: Database, run: Run, log: LogFile) -> None:
    """Publish the complete parts as a recorder does."""
    folder = settings.run_folder(run.id)
    for part in log.complete_parts():
        event = compress(part, folder)
        key = (folder / event.path).relative_to(settings.data).as_posix()
        with database.writing() as session:
            artifacts.publish(session, run.id, run.attempt, artifacts.log_artifact(event), key)
        log.take(part)
        forget_part(event.path, folder)


@pytest.fixture
def log(settings: Settings, running: Run) -> Iterator[LogFile]:
    """The log of a run on this machine."""
    folder = settings.run_folder(running.id)
    folder.mkdir(parents=True)
    log = LogFile(folder, 1)
    yield log
    log.close()


def test_a_log_is_downloaded_while_it_is_written(
    settings: Settings,
    database: Database,
    running: Run,
    log: LogFile,
    script: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Complete parts of a log and the growing one are sent in order, each once."""
    address = f"/runs/{running.id}/log/download"
    assert script.get(address).status_code == 404
    for number in range(1, 4):
        log.write(f"line {number}\n".encode())
        log.flush()
        printed = "".join(f"line {each}\n" for each in range(1, number + 1))
        assert gzip.decompress(script.get(address).content).decode() == printed
        if number == 2:
            monkeypatch.setattr("halfstep.sidecar.log_file.PART_SECONDS", 0.0)
            publish(settings, database, running, log)
            monkeypatch.undo()
            assert gzip.decompress(script.get(address).content).decode() == printed
    log.close()
    publish(settings, database, running, log)
    answer = script.get(address)
    assert gzip.decompress(answer.content).decode() == "line 1\nline 2\nline 3\n"
    assert len(answer.content) == int(answer.headers["content-length"])


def test_a_part_that_grows_while_it_is_sent_is_sent_as_it_was(
    settings: Settings, running: Run, log: LogFile
) -> None:
    """A growing log part is sent up to its length at the time of the request."""
    log.write(b"before\n")
    log.flush()
    [part] = live_parts(settings, running.id)
    log.write(b"after\n")
    log.flush()
    assert gzip.decompress(b"".join(part.compress())) == b"before\n"


@pytest.mark.parametrize("place", ["part", "folder", "run", "node", "pipe"])
def test_a_log_that_is_a_link_is_not_followed(
    settings: Settings, running: Run, tmp_path: Path, script: TestClient, place: str
) -> None:
    """A run can write to its own folder; links in it are not followed."""
    name = "attempt-0001-000001.txt"
    secret = tmp_path / "secret" / "log" / name
    secret.parent.mkdir(parents=True)
    secret.write_text("of somebody else")
    folder = settings.run_folder(running.id)
    if place == "run":
        folder.parent.mkdir(parents=True)
        folder.symlink_to(secret.parent.parent)
    elif place == "node":
        folder.mkdir(parents=True)
        (folder / "node-1").symlink_to(secret.parent.parent)
    elif place == "folder":
        folder.mkdir(parents=True)
        (folder / "log").symlink_to(secret.parent)
    else:
        (folder / "log").mkdir(parents=True)
        path = folder / "log" / name
        path.symlink_to(secret) if place == "part" else os.mkfifo(path)
    assert live_parts(settings, running.id) == []
    assert script.get(f"/runs/{running.id}/log/download").status_code == 404


def test_nodes_have_parts_of_their_own(settings: Settings, running: Run) -> None:
    """Each node's log parts are in the folder of the node."""
    logs = []
    for node in (0, 2):
        folder = settings.run_folder(running.id, node)
        folder.mkdir(parents=True, exist_ok=True)
        log = LogFile(folder, 1, node)
        logs.append(log)
        log.write(f"of node {node}\n".encode())
        log.flush()
    parts = live_parts(settings, running.id)
    result = [gzip.decompress(b"".join(part.compress())).decode() for part in parts]
    for log in logs:
        log.close()
    assert sorted(result) == ["of node 0\n", "of node 2\n"]


def test_a_link_in_a_log_is_not_published(settings: Settings, running: Run, tmp_path: Path) -> None:
    """The worker publishes no file outside the run's folder, even if the run links to it."""
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    part = settings.run_folder(running.id) / "log" / "attempt-0001-000001.txt"
    part.parent.mkdir(parents=True)
    part.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        compress(part, part.parent.parent)


def test_the_link_to_the_log_comes_with_its_first_line_and_its_parts(
    settings: Settings,
    database: Database,
    running: Run,
    log: LogFile,
    browser: TestClient,
) -> None:
    """An open page gets the link to the log with the first line or part, by the live stream."""
    link = f'href="/runs/{running.id}/log/download"'
    assert link not in browser.get(f"/runs/{running.id}").text
    look = run_updates.of_run(database, settings, running.id)
    first = look("")
    assert first is not None
    assert "log_link" not in json.loads(first.data)["fragments"]
    line = {"number": 1, "attempt": 1, "time": 0.0, "stream": "stdout", "text": "line 1"}
    with database.writing() as session:
        record(session, running.id, 1, Flush(log_lines=[LogRow(**line)]))
    second = look(first.cursor)
    assert second is not None
    assert link in json.loads(second.data)["fragments"]["log_link"]
    log.write(b"line 1\n")
    log.close()
    publish(settings, database, running, log)
    third = look(second.cursor)
    assert third is not None
    link = json.loads(third.data)["fragments"]["log_link"]
    assert re.search(r"\(\d+ B so far\)", link), link
    assert link in browser.get(f"/runs/{running.id}").text
    with database.writing() as session:
        runs.set_status(session, runs.get(session, running.id, lock=True), Status.FINISHED)
    last = look(third.cursor)
    assert last is not None
    link = json.loads(last.data)["fragments"]["log_link"]
    assert "so far" not in link
    assert link in browser.get(f"/runs/{running.id}").text
