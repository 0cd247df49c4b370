"""Pages of a watched run."""

import math
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from app.live import run_updates
from db.clock import now
from db.database import Database
from db.queue import claims, pending_reasons, queue
from db.runs import runs
from db.settings import Settings
from db.tables import Run, User
from db.telemetry.series import Cursor
from halfstep.telemetry.flags import UNKNOWN_LOSS
from tests.app.conftest import CONFIG, submit
from tests.app.uploading import Uploader, write_token
from tests.db.telemetry.telemetry_made import make_metric, make_skip, make_steps, record
from tests.spool_made import event_of

PARTS = ("findings", "series", "events", "metrics", "artifacts", "export/steps.csv")
FILE = {
    "path": "checkpoints/step-00000002/last.ckpt",
    "size_bytes": 5,
    "sha256": "0" * 64,
}


@pytest.fixture
def watched(stranger: TestClient, database: Database, ada: User, tmp_path: Path) -> Uploader:
    """A watched run that began and has sent nothing yet."""
    uploader = Uploader(stranger, write_token(database, ada), tmp_path / "spool")
    uploader.begin()
    return uploader


def tell(uploader: Uploader) -> None:
    """Send steps, a skip, a metric, and events of a checkpoint and an image without the files."""
    with uploader.spool() as spool:
        spool.event(event_of(make_skip(2, "head.weight")))
        spool.steps(make_steps([1.0] * 3, skipped=[2]))
        spool.event(event_of(make_metric(3, 0.5)))
        files = [{"kind": "checkpoint", **FILE}]
        spool.event(
            event_of({"event": "checkpoint", "step": 2, "reason": "request", "files": files})
        )
        picture = FILE | {"path": "artifacts/step-00000002/x.png"}
        spool.event(event_of({"event": "artifact", "step": 2, "name": "x.png", **picture}))
    assert uploader.send().status_code == 200


def silent_for(database: Database, seconds: float) -> None:
    with database.writing() as session:
        session.execute(update(Run).values(last_report_at=now() - seconds))


def test_the_page_of_a_run_without_telemetry(watched: Uploader, browser: TestClient) -> None:
    """A watched run has a page for any configuration, also without precision, length and steps."""
    page = browser.get("/runs/1").text
    assert "watched on gpu-7 · digits<span data-precision hidden>" in page
    assert "<code>precision</code>" in page
    assert " data-scaled" in page  # it may turn out to have a scaler
    assert "NaN" not in browser.get("/runs").text


def test_an_ended_run_without_steps_waits_for_none(watched: Uploader, browser: TestClient) -> None:
    """An ended run that made no step is not shown as waiting for one."""
    assert "<b>Waiting.</b>" in browser.get("/runs/1").text
    assert watched.end(status="finished", step=0).status_code == 200
    page = browser.get("/runs/1").text
    assert "<b>Waiting.</b>" not in page
    assert "Training loss" not in page


def test_a_script_that_logs_only_numbers_has_no_empty_charts(
    watched: Uploader, browser: TestClient
) -> None:
    """For a script that only logs, the panels of loss and loss scale are left out."""
    assert 'data-row="loss"' in browser.get("/runs/1").text  # either may come
    with watched.spool() as spool:
        spool.event(event_of(make_metric(1, 0.5, "reward")))
    assert watched.send().status_code == 200
    page = browser.get("/runs/1").text
    assert "data-only-metrics" in page
    assert 'data-row="loss"' not in page
    assert 'data-row="scale"' not in page
    assert "scaler-card" not in page


def test_the_page_of_a_watched_run_has_all_its_telemetry(
    watched: Uploader, browser: TestClient
) -> None:
    """A watched run's page has all its telemetry, and no button that needs a worker."""
    tell(watched)
    page = browser.get("/runs/1").text
    for text in (
        "<b>fp16</b>",
        'data-fact="skipped">1<',
        "head.weight",
        "val/accuracy",
        "on the training machine at <code>checkpoints/step-00000002/last.ckpt</code>",
        "on the training machine at <code>artifacts/step-00000002/x.png</code>",
        'action="/runs/1/cancellation"',
        "The script continues: Halfstep did not start it and does not end it.",
    ):
        assert text in page
    for text in (
        "/runs/1/pause",
        "/runs/1/checkpoints",
        "/runs/1/kill",
        "/runs/1/scale",
        "/runs/1/comparison",
        "Clone",
        "Fork from this checkpoint",
        ">Replay</button>",
        "Download<",
        "artifacts/1/download",
    ):
        assert text not in page
    assert "watched · fp16" in browser.get("/runs").text


@pytest.mark.parametrize("config", [None, {}, {"scaler": 1, "training": [2], "diagnosis": "x"}])
def test_any_configuration_has_a_page(
    watched: Uploader, browser: TestClient, script: TestClient, config: Any
) -> None:
    """Any configuration of a watched run is shown unchanged, without interpretation."""
    watched.begin(id="f" * 32, config=config)
    tell(watched)
    for path in ("runs/2", "runs", *(f"api/v1/runs/2/{part}" for part in PARTS)):
        assert browser.get(f"/{path}").status_code == 200, path
    assert script.get("/api/v1/runs/2/config").json() == (config or {})


def test_impossible_requests_are_rejected(
    watched: Uploader, script: TestClient, browser: TestClient, offered: None
) -> None:
    """Requests that only a worker could fulfil are answered by 409, from the API and from forms."""
    tell(watched)
    for path, content in (
        ("pause", None),
        ("kill", None),
        ("checkpoints", None),
        ("scale", {"scale": 2.0}),
        ("replays", {"step": 2}),
        ("precision-diffs", None),
        ("comparison", None),
        ("resumption", None),
    ):
        answer = script.post(f"/api/v1/runs/1/{path}", json=content)
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict"), path
        if path != "resumption":
            assert "Run 1 is watched" in answer.json()["detail"]
    assert browser.get("/runs/new", params={"from": 1}).status_code == 409
    fork = {"recipe": "digits", "config": CONFIG, "parent_id": 1, "parent_step": 2}
    assert script.post("/api/v1/runs", json=fork).status_code == 409


def test_silence_is_reported_without_a_cause(
    watched: Uploader, database: Database, browser: TestClient, script: TestClient
) -> None:
    """A silent run is shown as running when it last reported, without a guess at the cause."""
    assert "No contact" not in browser.get("/runs/1").text
    silent_for(database, 43)
    for path in ("/runs/1", "/runs"):
        assert "No contact for 40 s" in browser.get(path).text
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["silent_seconds"]) == ("running", 40)
    watched.put(b"")
    assert script.get("/api/v1/runs/1").json()["silent_seconds"] == 0
    silent_for(database, 10_000)
    watched.headers, kept = {"Authorization": "Bearer wrong"}, watched.headers
    watched.put(b"")
    assert "No contact for 2 h" in browser.get("/runs/1").text
    watched.headers = kept
    watched.end()
    assert "No contact" not in browser.get("/runs/1").text


@pytest.mark.slow
def test_viewers_are_notified_of_silence(
    watched: Uploader, database: Database, settings: Settings
) -> None:
    """The streams of page and list report when a run falls silent and when it reports again."""
    look, of_list = (
        run_updates.of_run(database, settings, 1),
        run_updates.of_list(database, settings),
    )
    first, listed = look(str(Cursor())), of_list("0.down")
    assert first is not None
    assert listed is not None
    assert (look(first.cursor), of_list(listed.cursor)) == (None, None)
    silent_for(database, 43)
    silent, silent_list = look(first.cursor), of_list(listed.cursor)
    assert silent is not None
    assert silent_list is not None
    assert "No contact for 40 s" in silent.data
    assert "No contact for 40 s" in silent_list.data
    watched.put(b"")
    received = look(silent.cursor)
    assert received is not None
    assert "No contact for" not in received.data


def test_the_queue_passes_a_watched_run_by(
    watched: Uploader, database: Database, ada: User, offered: None
) -> None:
    """Workers ignore a watched run in the queue, and claim queued runs."""
    watched.begin(id="e" * 32, config={"training": {"device_memory_gib": "much"}})
    queued = submit(database, ada)
    with database.writing() as session:
        what: dict[str, Any] = {"recipes": ["digits"], "precisions": ["fp16"]}
        run = claims.claim(session, 1, **what, free_devices=[0], lease_seconds=60.0)
        assert run is not None
        assert run.id == queued.id
        assert queue.mark_unreachable(session, {1, 2}) == set()
        assert pending_reasons.Queue.read(session).usage.by_worker[1] == 1
        assert runs.get(session, 1).status == "running"


def test_an_unknown_loss_is_not_called_nan(
    database: Database, running: Run, browser: TestClient, script: TestClient
) -> None:
    """The loss of a loop with unobserved backward passes is unknown, also if all its
    steps were skipped.
    """
    steps = make_steps([math.nan] * 12, skipped=range(1, 13))
    steps["flags"] |= UNKNOWN_LOSS
    record(database, running, steps)
    for address in ("/runs", "/runs/1"):
        assert "NaN" not in browser.get(address).text
    assert script.get("/api/v1/runs/1").json()["is_loss_nonfinite"] is False
    record(database, running, make_steps([math.nan], first=13))
    for address in ("/runs", "/runs/1"):
        assert "NaN</" in browser.get(address).text
    assert script.get("/api/v1/runs/1").json()["is_loss_nonfinite"] is True


@pytest.mark.parametrize(
    ("event", "is_first"),
    [
        ({"event": "precision", "step": 1, "dtype": "bfloat16"}, False),
        (
            {
                "event": "fp16_gradients",
                "step": 3,
                "count": 1,
                "parameters": ["head.weight"],
                "error": "Attempting to unscale FP16 gradients.",
            },
            True,
        ),
    ],
)
def test_only_a_cause_of_a_failure_is_its_diagnosis(
    watched: Uploader, browser: TestClient, event: dict[str, Any], is_first: bool
) -> None:
    """A failed script's error comes first; advice that does not explain it is folded."""
    with watched.spool() as spool:
        spool.event(event_of(event))
        spool.steps(make_steps([1.0] * 100))
    assert watched.send().status_code == 200
    assert watched.end("failed", 100, "RuntimeError: out of data").status_code == 200
    [finding] = browser.get("/api/v1/runs/1/findings").json()["findings"]
    page = browser.get("/runs/1").text
    is_below = not is_first
    assert page.count(finding["title"]) == 1 + is_below  # its button has it, too
    assert ('aria-label="Diagnosis"' in page) == is_first
    assert "out of data" in page.partition('aria-label="Diagnosis"')[0]
