"""Watched runs as their uploaders send them, on both databases."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.tables import User
from tests.app.uploading import Uploader, described, write_token
from tests.db.telemetry_made import make_events, make_metric, make_steps


@pytest.fixture
def uploader(stranger: TestClient, database: Database, ada: User, tmp_path: Path) -> Uploader:
    """An uploader of Ada's with a token that writes."""
    return Uploader(stranger, write_token(database, ada), tmp_path / "spool")


def test_a_run_is_made_once(uploader: Uploader, script: TestClient) -> None:
    """The first call makes it, a repeated one finds it, and says where its spool goes on."""
    answer = uploader.begin()
    place = {"run": 1, "attempt": 1, "sequence": 0, "offset": 0, "page": "/runs/1"}
    assert (answer.status_code, answer.json()) == (200, place)
    assert uploader.begin().json() == place
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["source"], run["name"]) == ("running", "watch", "baseline")
    assert (run["project"], run["tags"]) == ("digits", ["fp16", "a b"])
    assert run["config"] == described()["config"]
    assert [each["status"] for each in run["statuses"]] == ["running"]


def test_a_spool_becomes_rows(uploader: Uploader, script: TestClient) -> None:
    """Steps, events and metrics are recorded as a worker's are; the precision is found out."""
    uploader.begin()
    with uploader.spool() as spool:
        for event in (*make_events([2]), make_metric(3, 0.5)):
            spool.event(event)
        spool.steps(make_steps([3.0, 2.0, 1.0], skipped=[2]))
    answer = uploader.send()
    size = len(uploader.content())
    assert (answer.status_code, answer.json()) == (200, {"sequence": 0, "offset": size})
    run = script.get("/api/v1/runs/1").json()
    assert (run["step"], run["skipped"], run["loss"], run["precision"]) == (3, 1, 1.0, "fp16")
    assert run["verdict"]["word"] == "calibrating"
    assert script.get("/api/v1/runs/1/events").json()["total"] == 2
    assert script.get("/api/v1/runs/1/metrics").json()["total"] == 1
