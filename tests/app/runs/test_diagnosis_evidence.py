"""Evidence of a diagnosis on the page of an ended run."""

import re

from starlette.testclient import TestClient

from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.tables import Run, Status
from halfstep.telemetry.flags import NONFINITE_LOSS
from tests.db.telemetry.telemetry_made import make_events, make_steps, record
from tests.spool_made import checkpoint_of


def _evidence(page: str) -> dict[str, str]:
    table = page.partition('<dl class="evidence">')[2].partition("</dl>")[0]
    rows = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", table)
    return {label: re.sub("<[^>]+>", "", text) for label, text in rows}


def _timeline(page: str) -> list[tuple[str, str]]:
    part = page.partition('<ol class="timeline"')[2].partition("</ol>")[0]
    return re.findall(r"<b>(.*?)</b><span>(.*?)</span>", part)


def test_records_of_a_collapse_are_evidence(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The last loss, the skips to the end and the last checkpoint before them, in order."""
    losses = [1.5] * 5 + [float("nan")] * 55
    skipped = [2, *range(6, 61)]
    steps = make_steps(losses, skipped=skipped)
    steps["flags"][5:] |= NONFINITE_LOSS
    record(database, running, steps, events=make_events(skipped))
    file = {"kind": "checkpoint", "path": "4.pt", "size_bytes": 1, "sha256": "0"}
    saved = {"step": 4, "reason": "schedule", "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(saved), ["4.pt"])
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    page = browser.get("/runs/1").text
    evidence = _evidence(page)
    assert evidence["Loss"] == "1.5 at step 5, not finite at step 6"
    assert evidence["Skipped"].startswith("56 of 60 steps, each from step 6 on")
    assert _timeline(page)[0] == ("4", "checkpoint")
    assert _timeline(page)[-1] == ("60", "end")
    assert ("6", "loss not finite") in _timeline(page)


def test_unknown_values_are_left_out(database: Database, running: Run, browser: TestClient) -> None:
    """A run that failed in its first step has neither table nor timeline."""
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FAILED, error="ValueError: no")
    page = browser.get("/runs/1").text
    assert _evidence(page) == {}
    assert _timeline(page) == []
