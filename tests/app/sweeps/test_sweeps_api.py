"""Sweeps by the API, the pages and the form."""

import re
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from app.live import sweep_updates
from app.sweeps import sweep_submission
from db.database import Database
from db.sweeps import sweeps
from db.tables import Run, Status, User
from tests.app.compare.seeds_made import offer_seeds
from tests.app.conftest import find_confirmation, submit
from tests.app.sweeps.sweep_submission_made import begin, finish

SWEEP: dict[str, Any] = {
    "recipe": "digits",
    "space": {"training.max_grad_norm": "0.1, 1, off"},
    "goal": "minimise",
}
FORM = {
    "recipe": "digits",
    "precision": "fp16",
    "training.steps": "5",
    "training.batch_size": "16, 32",
    "training.max_grad_norm": "off",
    "training.fused": ["true", "false"],
    "training.tf32": "false",
    "modules.fp32": "a, b",
    "scaler.enabled": "true",
    "scaler.init_scale": "2^16",
    "kind": "grid",
    "runs": "",
    "at_once": "1",
    "metric": "loss",
    "goal": "",
    "seed": "0",
    "priority": "0",
    "devices_per_node": "1",
}


def test_goal_has_one_spelling(database: Database, offered: None, script: TestClient) -> None:
    """Goals are spelled "minimize" and "maximize", also those sent or stored in British
    spelling.
    """
    assert script.post("/api/v1/sweeps", json=SWEEP).json()["goal"] == "minimize"
    with database.writing() as session:
        session.execute(text("UPDATE sweeps SET goal = 'maximise'"))
    assert script.get("/api/v1/sweeps/1").json()["goal"] == "maximize"
    assert "maximize <b>loss</b>" in script.get("/sweeps/1").text


def test_a_script_begins_a_sweep_and_reads_it(
    database: Database, offered: None, script: TestClient
) -> None:
    """A sweep request repeated with its key creates no second sweep; its trials have their
    values.
    """
    headers = {"Idempotency-Key": "k"}
    begun = script.post("/api/v1/sweeps", json=SWEEP, headers=headers)
    assert begun.status_code == 201
    assert script.post("/api/v1/sweeps", json=SWEEP, headers=headers).json() == begun.json()
    finish(database, 1, 0.5)
    sweep_submission.submit_due(database)
    found = script.get("/api/v1/sweeps/1").json()
    assert found["status"] == "running"
    assert (found["runs_total"], found["submitted"], found["complete"]) == (3, 2, 1)
    assert found["space"] == {"training.max_grad_norm": "0.1, 1, off"}
    assert found["best"] == 0.5
    assert found["best_trial"]["params"] == {"training.max_grad_norm": 0.1}
    trials = script.get("/api/v1/sweeps/1/trials").json()
    assert [(each["number"], each["name"], each["state"]) for each in trials["trials"]] == [
        (2, "max_grad_norm=1", "open"),
        (1, "max_grad_norm=0.1", "complete"),
    ]
    page = script.get("/api/v1/sweeps/1/trials?sort=value&limit=1").json()
    assert (page["trials"][0]["number"], page["next"]) == (1, 1)
    [listed] = script.get("/api/v1/sweeps").json()["sweeps"]
    assert listed["best"] == 0.5
    assert script.get("/api/v1/runs/1").json()["sweep_id"] == 1


@pytest.mark.sql
def test_time_left_is_that_of_the_ended_runs(
    database: Database, offered: None, browser: TestClient
) -> None:
    """The time left is the ended runs' mean times the remaining rounds, or unknown before."""
    browser.post("/api/v1/sweeps", json=SWEEP)
    assert 'Time left</dt><dd class="value" data-time>–<' in browser.get("/sweeps/1").text
    finish(database, 1, 0.5)
    with database.writing() as session:
        run = session.get_one(Run, 1)
        run.started_at, run.ended_at = 1000.0, 1090.0
    sweep_submission.submit_due(database)
    page = browser.get("/sweeps/1").text
    assert 'Time left</dt><dd class="value" data-time>3 min 0 s<' in page
    assert ">From 1 run<" in page
    browser.post("/api/v1/sweeps/1/cancellation")
    assert (
        'Time per run</dt><dd class="value" data-time>1 min 30 s<' in browser.get("/sweeps/1").text
    )


@pytest.mark.slow
def test_a_sweep_is_steered_by_a_script(
    database: Database, offered: None, script: TestClient
) -> None:
    """A script can pause, resume, extend and cancel a sweep; impossible actions are conflicts."""
    script.post("/api/v1/sweeps", json=SWEEP)

    def post(word: str, **body: Any) -> tuple[int, str]:
        answer = script.post(f"/api/v1/sweeps/1/{word}", json=body)
        return answer.status_code, answer.json().get("status", "")

    assert post("resumption")[0] == 409
    assert post("pause") == (200, "paused")
    finish(database, 1)
    assert post("resumption") == (200, "running")
    assert script.get("/api/v1/runs/2").json()["status"] == "queued"
    assert post("extension", space={"training.max_grad_norm": [7.5]}) == (200, "running")
    assert script.get("/api/v1/sweeps/1").json()["runs_total"] == 4
    assert post("extension", runs=9)[0] == 422
    assert post("extension", runs=True, other=1)[0] == 422
    assert post("cancellation") == (200, "cancelled")
    assert script.get("/api/v1/runs/2").json()["status"] == "cancelled"
    assert post("pause")[0] == 409
    assert script.get("/api/v1/sweeps/9").status_code == 404
    wrong = script.post("/api/v1/sweeps", json=SWEEP | {"kind": "x", "at_once": 0}).json()
    assert set(wrong["errors"]) == {"kind", "at_once"}


def test_the_form_counts_before_it_queues(
    database: Database, offered: None, browser: TestClient
) -> None:
    """Lists in the form's fields are searched, other values are fixed; the count is confirmed
    before runs are queued, any change is previewed again, and a repeated request creates one sweep.
    """
    page = browser.get("/sweeps/new?recipe=digits").text
    key = re.findall(r'name="key" value="(\w+)"', page)[0]
    counted = browser.post("/sweeps", data=FORM | {"key": key}).text
    assert "This queues <b>4 runs</b>, 1 at once" in counted
    assert 'value="16, 32"' in counted
    confirmed = {"confirmed": find_confirmation(counted), "key": key}
    for change, runs in (({"training.batch_size": "16"}, 2), ({"metric": "val/acc"}, 4)):
        page = browser.post("/sweeps", data=FORM | confirmed | change).text
        assert f"This queues <b>{runs} runs</b>" in page
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []
    for _ in range(2):
        begun = browser.post("/sweeps", data=FORM | confirmed)
        assert begun.headers["location"] == "/sweeps/1"
    sweep = browser.get("/api/v1/sweeps/1").json()
    assert sweep["space"] == {"training.batch_size": "16, 32", "training.fused": "true, false"}
    config = browser.get("/api/v1/runs/1/config").json()
    assert config["modules"]["fp32"] == ["a", "b"]
    assert config["training"] == {
        "steps": 5, "batch_size": 16, "max_grad_norm": None, "fused": True, "tf32": False,
    }  # fmt: skip


def test_the_form_shows_errors_and_preserves_input(offered: None, browser: TestClient) -> None:
    """The form keeps its input and shows errors at fields, for invalid numbers, for distributions
    in a grid and if nothing is searched.
    """
    typed = FORM | {"training.steps": "uniform(1, 5)", "at_once": "<b>", "training.fused": "true"}
    page = browser.post("/sweeps", data=typed)
    assert page.status_code == 422
    assert "&lt;b&gt; is not valid; allowed: a whole number" in page.text
    page = browser.post("/sweeps", data=typed | {"at_once": "1"})
    assert (
        "uniform(…) is not valid; allowed: integers(a, b), or comma-separated values" in page.text
    )
    assert 'value="uniform(1, 5)"' in page.text
    for typed_text in ("0.1; 0.01", "loguniform(1e-4", "0,001"):
        page = browser.post("/sweeps", data=FORM | {"training.max_grad_norm": typed_text})
        assert "to try several: 0.1, 0.01 with a comma in between, or loguniform" in page.text
        assert "settings are searched" not in page.text
    nothing = {"training.batch_size": "16", "training.fused": "true"}
    assert "allowed: 1 to 20" in browser.post("/sweeps", data=FORM | nothing).text
    assert browser.post("/sweeps", data=FORM | {"recipe": "none"}).status_code == 422
    typed |= {"at_once": "1", "training.fused": []}
    assert "it is empty; allowed: true or false" in browser.post("/sweeps", data=typed).text


def test_a_runs_form_becomes_a_sweeps(offered: None, browser: TestClient) -> None:
    """A run's form becomes a sweep's with the entered values; an unchecked box is false."""
    assert 'href="/sweeps/new?recipe=digits" data-to-sweep' in browser.get("/runs/new").text
    typed = {"recipe": "digits", "precision": "bf16", "training.batch_size": "7", "tags": "t"}
    page = browser.post("/sweeps/new", data=typed).text
    assert 'name="training.batch_size" value="7"' in page
    assert 'value="bf16" checked' in page
    assert 'name="training.fused" value="false" checked' in page
    assert browser.post("/sweeps/new", data={"recipe": "none"}).status_code == 200


def test_a_sweep_over_seeds_leads_to_their_parity(
    database: Database, ada: User, browser: TestClient
) -> None:
    """A sweep over seeds and other settings links to the parity of all its runs."""
    offer_seeds(database)
    seeds = {"training.seed": "0, 1"}
    begin(database, ada, at_once=4, space={"precision": "fp16, fp32", **seeds})
    finish(database, 3, 1.0, Status.FAILED)
    begin(database, ada, at_once=4, space=seeds)
    begin(database, ada, at_once=4)
    address = "/compare?runs=1,2,3,4&amp;metric=loss#parity"
    assert f'<a href="{address}">Parity over seeds</a>' in browser.get("/sweeps/1").text
    assert "run 3 (failed)" in browser.get(address.replace("&amp;", "&")).text
    for sweep_id in (2, 3):
        assert "Parity over seeds" not in browser.get(f"/sweeps/{sweep_id}").text


def test_a_grid_over_seeds_leads_to_a_parity_in_each_combination(
    database: Database, ada: User, browser: TestClient
) -> None:
    """A grid over seeds has a parity for each combination of its other settings."""
    offer_seeds(database)
    space = {"precision": "fp16, fp32", "training.batch_size": "8, 16", "training.seed": "0, 1"}
    begin(database, ada, at_once=8, space=space)
    (address,) = re.findall(r'href="([^"]*)">Parity over seeds', browser.get("/sweeps/1").text)
    page = browser.get(address.replace("&amp;", "&")).text
    assert "within each combination of <code>training.batch_size</code>" in page
    assert "Unknown for fp16 at training.batch_size 8: not finished" in page


def test_pages_of_sweeps(database: Database, ada: User, offered: None, browser: TestClient) -> None:
    """The list of sweeps and the page of each show search space, progress, runs and the best run; a
    run links to its sweep.
    """
    assert "Try many settings at once" in browser.get("/sweeps").text
    begin(database, ada, at_once=3, name="<i>norms</i>")
    for run_id, loss in ((1, 0.5), (2, 0.25)):
        finish(database, run_id, loss)
    finish(database, 3, 1.0, Status.FAILED)
    sweep_submission.submit_due(database)
    page = browser.get("/sweeps/1?sort=value").text
    assert "&lt;i&gt;norms&lt;/i&gt;" in page
    assert ">0.1, 1, off</dd>" in page
    assert 'href="/compare?runs=2,1"' in page
    assert '<dd class="value lost-loss">1</dd>' in page
    assert re.findall(r'<tr data-key="(\d)"', page) == ["2", "1", "3"]
    assert "Cancel sweep" not in page
    assert 'href="/sweeps/1">sweep 1</a>' in browser.get("/runs/2").text
    assert "sweep 1" not in browser.get(f"/runs/{submit(database, ada).id}").text
    assert "<b>0.25</b>" in browser.get("/sweeps").text
    assert "No older sweeps" in browser.get("/sweeps?before=1").text
    assert browser.get("/sweeps/2").status_code == 404
    assert browser.get("/sweeps/1?after=50").status_code == 200


def test_buttons_of_a_sweep(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Buttons to pause, resume, extend and cancel a sweep redirect back, and errors are shown."""
    begin(database, ada)
    assert browser.post("/sweeps/1/pause").headers["location"] == "/sweeps/1"
    assert "Resume" in browser.get("/sweeps/1").text
    browser.post("/sweeps/1/resumption")
    more = {"setting": "training.max_grad_norm", "more": "x"}
    wrong = browser.post("/sweeps/1/extension", data=more)
    assert wrong.status_code == 422
    assert "x is not valid; allowed: a number greater than 0" in wrong.text
    more["more"] = "3, 4"
    assert browser.post("/sweeps/1/extension", data=more).status_code == 303
    wrong = browser.post("/sweeps/1/extension", data={"more": "-1"})
    assert "allowed: a whole number of runs" in wrong.text
    page = browser.get("/sweeps/1").text
    assert "1 run is queued or training" in page
    assert "4 runs are never submitted" in page
    browser.post("/sweeps/1/cancellation")
    assert "Add runs" not in browser.get("/sweeps/1").text
    with database.reading() as session:
        assert sweeps.get(session, 1).runs_total == 5


def test_a_poll_reports_changes(database: Database, ada: User, offered: None) -> None:
    """A poll reports changes of the sweep and its active runs, and otherwise nothing."""
    begin(database, ada)
    look = sweep_updates.of_sweep(database, 1)
    news = look("")
    assert news is not None
    assert look(news.cursor) is None
    finish(database, 1)
    ended = look(news.cursor)
    assert ended is not None
    sweep_submission.submit_due(database)
    settled = look(ended.cursor)
    assert settled is not None
