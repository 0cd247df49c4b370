"""Telemetry by the JSON API."""

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.files import checkpoints
from db.tables import Run, User
from db.telemetry import telemetry
from db.telemetry.telemetry import LogRow
from tests.app.conftest import start_run
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record
from tests.spool_made import checkpoint_of

pytestmark = pytest.mark.sql_sample


def test_few_steps_come_as_they_are(database: Database, running: Run, script: TestClient) -> None:
    """A short run has each step as a point; NaN is null, and infinities have names."""
    losses = [3.0, float("nan"), float("inf"), 2.0]
    record(database, running, make_steps(losses, skipped=[3]))
    page = script.get("/api/v1/runs/1/series").json()
    assert (page["first"], page["last"], page["total"], page["bucket"]) == (1, 4, 4, 1)
    assert page["x"] == [1, 2, 3, 4]
    assert all(line["x"] is None for line in page["series"].values())
    assert page["series"]["loss"]["y"] == [3.0, "NaN", "Infinity", 2.0]
    assert page["series"]["elapsed_ms"]["y"] == [5, 10, 15, 20]
    part = script.get("/api/v1/runs/1/series", params={"first": 2, "last": 3}).json()
    assert (part["total"], part["x"]) == (2, [2, 3])


def test_many_steps_keep_their_extremes(
    database: Database, running: Run, script: TestClient
) -> None:
    """A long run's series include the only spike among thousands of steps."""
    losses = [1.0] * 3000
    losses[1234] = 50.0
    record(database, running, make_steps(losses))
    page = script.get("/api/v1/runs/1/series", params={"points": 100}).json()
    assert page["total"] == 3000
    assert page["points"] <= 100
    assert page["bucket"] > 1
    assert 50.0 in page["series"]["loss"]["y"]
    for line in page["series"].values():  # each of its own steps, but for those that are the loss's
        assert len(line["x"] or page["x"]) == len(line["y"])
        assert line["x"] != page["x"]
        assert not line["mean_y"] or len(line["mean_x"] or page["mean_x"]) == len(line["mean_y"])


def test_run_without_steps_has_empty_series(running: Run, script: TestClient) -> None:
    """A run without steps has empty series and no error."""
    page = script.get("/api/v1/runs/1/series").json()
    assert (page["total"], page["x"], page["series"]["loss"]["y"]) == (0, [], [])


def test_steps_of_a_parent_are_told_apart(
    database: Database, ada: User, running: Run, script: TestClient
) -> None:
    """A fork's series say where its own steps begin, also before the first; others begin at 0."""
    assert script.get("/api/v1/runs/1/series").json()["parent_step"] == 0
    file = {"kind": "checkpoint", "size_bytes": 1, "sha256": "aa"}
    event = {"step": 50, "reason": "interval", "request": None, "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(event), ["key"])
    fork = start_run(database, ada, parent_id=1, parent_step=50)
    assert script.get("/api/v1/runs/2/series").json()["parent_step"] == 50
    record(database, fork, make_steps([1.0], first=51))
    assert script.get("/api/v1/runs/2/series").json()["parent_step"] == 50


def test_flagged_steps_and_events_are_never_sampled(
    database: Database, running: Run, script: TestClient
) -> None:
    """Every skip and every non-finite loss is returned in order, and never sampled."""
    losses = [1.0, float("nan"), 1.0, 1.0]
    record(database, running, make_steps(losses, skipped=[1, 4]), events=make_events([1, 4]))
    flagged = script.get("/api/v1/runs/1/flagged").json()
    assert flagged == {
        "step": [1, 2, 4],
        "flags": [1, 2, 1],
        "loss": [1.0, "NaN", 1.0],
        "total": 3,
        "next": None,
    }
    events = script.get("/api/v1/runs/1/events").json()["events"]
    assert [(event["step"], event["kind"]) for event in events] == [
        (1, "skip"),
        (1, "backoff"),
        (4, "skip"),
        (4, "backoff"),
    ]


def test_metrics_and_log(database: Database, running: Run, script: TestClient) -> None:
    """Metrics and log lines come in order, and the log can be paged backwards."""
    record(database, running, events=[make_metric(2, 0.5), make_metric(4, float("inf"))])
    lines = [
        {"number": n, "attempt": 1, "time": 1.0, "stream": "stdout", "text": f"line {n}"}
        for n in range(1, 6)
    ]
    with database.writing() as session:
        telemetry.record(
            session, 1, 1, telemetry.Flush(log_lines=[LogRow(**each) for each in lines])
        )
    metrics = script.get("/api/v1/runs/1/metrics").json()["metrics"]
    assert [metric["value"] for metric in metrics] == [0.5, "Infinity"]
    log = script.get("/api/v1/runs/1/log", params={"before": 5, "limit": 2}).json()
    assert [line["text"] for line in log["log"]] == ["line 3", "line 4"]
    assert (log["total"], log["next"]) == (5, 3)


def test_series_of_no_run(script: TestClient) -> None:
    """Every route of series answers 404 for an unknown run."""
    names = ("series", "flagged", "events", "metrics", "log", "checkpoints", "config")
    for name in names:
        assert script.get(f"/api/v1/runs/7/{name}").status_code == 404, name


def test_stream_of_an_unknown_run(script: TestClient) -> None:
    """A stream of an unknown run gets 404 instead of waiting."""
    answer = script.get("/api/v1/runs/9/live")
    assert (answer.status_code, answer.json()["detail"]) == (404, "There is no run 9.")


def test_a_stream_has_no_other_parts(running: Run, script: TestClient) -> None:
    """A request for an unknown part of a stream gets an error with the allowed parts."""
    answer = script.get("/api/v1/runs/1/live", params={"parts": "steps,colours"})
    assert answer.status_code == 422
    assert "unknown: colours; allowed: steps, events" in answer.json()["errors"]["parts"]


def test_a_metric_of_step_0_is_in_the_series(
    database: Database, running: Run, script: TestClient
) -> None:
    """A metric of step 0 is in the series of the whole run, and not in that of later steps."""
    metrics = [make_metric(step, 1.0, "val/loss") for step in (0, 2)]
    record(database, running, make_steps([1.0] * 3), events=metrics)
    whole = script.get("/api/v1/runs/1/series").json()
    assert whole["metrics"]["val/loss"]["x"] == [0, 2]
    part = script.get("/api/v1/runs/1/series", params={"first": 2}).json()
    assert part["metrics"]["val/loss"]["x"] == [2]
