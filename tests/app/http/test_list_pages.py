"""Pagination of the API's lists."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from db.access import accounts
from db.database import Database
from db.files import artifacts, checkpoints
from db.queue import workers
from db.tables import Run, User
from db.telemetry import telemetry
from db.telemetry.telemetry import LogRow
from tests.app.conftest import submit
from tests.db.files.checkpoints_made import make_saved
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_replay,
    make_steps,
    record,
)
from tests.marks import looped
from tests.spool_made import artifact_of, checkpoint_of

pytestmark = pytest.mark.sql_sample

STEPS = [1, 2, 4, 8, 9]


@pytest.fixture
def recorded(database: Database, running: Run, ada: User) -> Run:
    """A run with five elements in each of its lists."""
    steps = make_steps([1.0] * 9, skipped=STEPS)
    metrics = [make_metric(step, 0.5) for step in STEPS]
    replays = [{**make_replay(step), "event": "replay"} for step in STEPS]
    record(database, running, steps, events=[*make_events(STEPS)[::2], *metrics, *replays])
    lines = [
        {"number": n, "attempt": 1, "time": 1.0, "stream": "stdout", "text": f"line {n}"}
        for n in range(1, 6)
    ]
    with database.writing() as session:
        telemetry.record(
            session, 1, 1, telemetry.Flush(log_lines=[LogRow(**each) for each in lines])
        )
        for step in STEPS:
            checkpoints.publish(session, 1, 1, checkpoint_of(make_saved(step)), [f"key-{step}"])
            artifact = {"step": step, "name": "a.png", "size_bytes": 1, "sha256": "aa"}
            artifacts.publish(session, 1, 1, artifact_of(artifact), f"artifact-{step}")
            accounts.make_api_token(session, ada, f"token {step}")
            offer: dict[str, Any] = {"devices": [], "recipes": [], "versions": {}}
            workers.register(session, name=f"more {step}", host="host", pid=1, **offer)
    return running


@looped(
    "address, name, cursor",
    [
        ("runs/1/events", "events", "after"),
        ("runs/1/metrics", "metrics", "after"),
        ("runs/1/replays", "replays", "after"),
        ("runs/1/checkpoints", "checkpoints", "after"),
        ("runs/1/artifacts", "artifacts", "after"),
        ("runs/1/flagged", "step", "after"),
        ("runs/1/log", "log", "before"),
        ("tokens", "tokens", "after"),
        ("workers", "workers", "after"),
    ],
)
def test_pages_of_a_list_hold_all_of_it_once(
    recorded: Run, script: TestClient, address: str, name: str, cursor: str
) -> None:
    """Each page of a list has the requested length, the total and a link to the next; together they
    hold each element once.
    """
    script.get(f"/api/v1/{address}")  # a token's first use is noted, after the answer
    whole = script.get(f"/api/v1/{address}").json()
    assert len(whole[name]) == whole["total"] >= 5
    pages, query = [], {"limit": 2}
    while True:
        page = script.get(f"/api/v1/{address}", params=query).json()
        assert page["total"] == whole["total"]
        assert len(page[name]) <= 2
        pages.append(page[name])
        if page["next"] is None:
            break
        query[cursor] = page["next"]
    if cursor == "before":
        pages.reverse()
    assert [each for page in pages for each in page] == whole[name]


def test_an_unknown_cursor_is_rejected(recorded: Run, script: TestClient) -> None:
    """The error for an unknown cursor names the allowed values."""
    for cursor in ("1", "1-2-3", "x-1", f"1-{'9' * 30}", f"1-{2**63}"):
        answer = script.get("/api/v1/runs/1/events", params={"after": cursor})
        assert answer.status_code == 422
        assert "allowed: the next of a page" in answer.json()["errors"]["after"]


@pytest.mark.slow
def test_runs_are_sorted_as_requested(database: Database, ada: User, script: TestClient) -> None:
    """Runs are sorted in either direction, equal ones by id, those without a loss last."""
    losses = (("b", 0, 2.0), ("a", 5, None), ("c", 0, 1.0), ("a", 1, None))
    for name, priority, _loss in losses:
        submit(database, ada, name=name, priority=priority)
    with database.writing() as session:
        for run_id, (*_, loss) in enumerate(losses, 1):
            session.get_one(Run, run_id).loss = loss

    def ids(sort: str) -> list[int]:
        whole = script.get("/api/v1/runs", params={"sort": sort}).json()["runs"]
        found, query = [], {"sort": sort, "limit": 1}
        while True:
            page = script.get("/api/v1/runs", params=query).json()
            found += page["runs"]
            if page["next"] is None:
                break
            query["before"] = page["next"]
        assert [run["id"] for run in found] == [run["id"] for run in whole]
        return [run["id"] for run in found]

    assert ids("name") == [2, 4, 1, 3]
    assert ids("-name") == [3, 1, 4, 2]
    assert ids("-priority") == [2, 4, 3, 1]
    assert ids("loss") == [3, 1, 2, 4]
    assert ids("-loss") == [1, 3, 4, 2]
    assert ids("id") == [1, 2, 3, 4]
    found = script.get("/api/v1/runs", params={"sort": "colour"}).json()
    assert found["notes"] == ["there is no setting or metric colour"]
