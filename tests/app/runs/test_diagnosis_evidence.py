"""Evidence of a diagnosis on the page of an ended run."""

import re
from collections.abc import Sequence

import pytest
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
    """A collapse's evidence has the last loss, the final skips and the checkpoint before them."""
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
    assert evidence["Skipped"].startswith("56 of 60 steps, each from step 6 on and 1 earlier")
    assert _timeline(page)[:2] == [("2", "first skip"), ("4", "checkpoint")]
    assert _timeline(page)[-1] == ("60", "end")
    assert ("6", "loss not finite") in _timeline(page)


@pytest.mark.parametrize(
    ("skipped", "steps", "moments"),
    [
        # One step was applied between two series of skips.
        (
            [*range(1, 91), *range(92, 101)],
            100,
            [(1, "first skip"), (34, "scale below 1"), (92, "every step skipped"), (100, "end")],
        ),
        # More skips than are read.
        (range(1, 301), 300, [(1, "skips begin"), (34, "scale below 1"), (300, "end")]),
        # The last step was applied.
        (range(1, 91), 91, [(1, "first skip"), (34, "scale below 1"), (91, "end")]),
    ],
)
@pytest.mark.parametrize("optimizers", [1, 3])
def test_the_timeline_begins_with_the_first_skip(
    database: Database,
    running: Run,
    browser: TestClient,
    skipped: Sequence[int],
    steps: int,
    moments: list[tuple[int, str]],
    optimizers: int,
) -> None:
    """The timeline of a collapse begins with the first skip, and the scale falls below 1 later."""
    rows = make_steps([1.0] * steps, skipped=skipped)
    rows["scale"] = 0.5
    events = []
    for step in skipped:
        scales = {"scale_before": 2.0 ** (34 - step), "scale_after": 2.0 ** (33 - step)}
        event = {"event": "scaler", "step": step, "culprits": []} | scales
        events += [event | {"kind": "skip", "optimizer": f"SGD {i}"} for i in range(optimizers)]
        events += [event | {"kind": "backoff", "optimizer": None}]
    record(database, running, rows, events=events)
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FAILED, error="it diverged")
    assert _timeline(browser.get("/runs/1").text) == [(str(step), text) for step, text in moments]


def test_the_card_counts_the_same_skips_everywhere(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A gradient that is undefined at a finite loss is counted apart from skips with a non-finite
    loss, on card and evidence alike.
    """
    skipped = range(1, 26)
    rows = make_steps([1.0] * 3 + [float("nan")] * 22, skipped=skipped)
    rows["flags"][3:] |= NONFINITE_LOSS
    events = [
        {**event, "loss_nonfinite": event["step"] > 3, "optimizer": name}
        for event in make_events(skipped)
        if event["kind"] == "skip"
        for name in ("SGD", "Adam")
    ]
    origin = {"event": "origin", "step": 3, "scale": 1024.0, "direction": "backward"}
    origin |= {"kind": "singular", "operation": "SqrtBackward0", "dtype": "float32"}
    origin |= {"module": "head", "source": None}
    record(database, running, rows, events=[*events, origin])
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FAILED, error="it diverged")
    page = browser.get("/runs/1").text
    assert "At step 3 SqrtBackward0 of head had the first non-finite gradient, in float32." in page
    assert "At 22 of the last 25 skips the loss itself was not finite" in page
    assert _evidence(page)["Skipped"].endswith("the loss was not finite in 22 of the last 25 skips")


def test_unknown_values_are_left_out(database: Database, running: Run, browser: TestClient) -> None:
    """A run that failed in its first step has neither table nor timeline."""
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FAILED, error="ValueError: no")
    page = browser.get("/runs/1").text
    assert _evidence(page) == {}
    assert _timeline(page) == []
