"""Initial weights, at submission and on pages."""

import os
from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.files import checkpoints, uploads
from db.queue import workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, User
from halfstep.config_groups import Weights
from tests.app.conftest import CPU, DIGITS, SCHEMA, start_run
from tests.db.files.checkpoints_made import make_saved_weights
from tests.db.health.findings_made import make_weights
from tests.db.telemetry.telemetry_made import record
from tests.marks import looped
from tests.spool_made import checkpoint_of

WEIGHTS = {"title": "Initial weights"} | Weights.model_json_schema()


@pytest.fixture
def saved(database: Database, ada: User) -> Run:
    """A run with weights at two steps, and a worker with a recipe that can start from them."""
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"weights": WEIGHTS}}
    recipes = [DIGITS | {"schema": schema}]
    with database.writing() as session:
        offer: dict[str, Any] = {"devices": [CPU], "recipes": recipes, "versions": {"torch": "2"}}
        workers.register(session, name="w1", host="host", pid=1, **offer)
    run = start_run(database, ada)
    with database.writing() as session:
        for step in (10, 20):
            checkpoints.publish(
                session, run.id, 1, checkpoint_of(make_saved_weights(step)), list("abc")
            )
    return run


def submit(script: TestClient, **weights: Any) -> Any:
    return script.post("/api/v1/runs", json={"recipe": "digits", "config": {"weights": weights}})


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        ({"run": 1, "step": 10}, (1, 10)),
        ({"run": 1}, (1, 20)),
        ({"path": "/data/a.pt"}, (None,) * 2),
    ],
)
def test_weights_are_named_by_run_and_step_or_by_path(
    database: Database, saved: Run, script: TestClient, weights: dict[str, Any], kept: Any
) -> None:
    """Weights are named by run and step or by path; without a step the newest step is stored, so
    later ones do not change it.
    """
    answer = submit(script, **weights)
    assert answer.status_code == 201, answer.text
    with database.reading() as session:
        found = runs.get(session, answer.json()["id"]).config["weights"]
    assert (found["run"], found["step"]) == kept


@looped(
    "weights, field, message",
    [
        ({"run": 1, "step": 11}, "weights.run", "run 1 has saved no weights at step 11"),
        ({"run": 77}, "weights.run", "run 77 has saved no weights"),
        ({"run": 0}, "weights.run", "0 is not valid; allowed: a whole number of at least 1"),
        ({"step": 3}, "weights.step", "3 has no effect without run"),
        ({"run": 1, "path": "a.pt"}, "weights.path", "path a.pt and run 1; allowed: one of"),
        ({"path": "a" * 1001}, "weights.path", "allowed: text of at most 1000 characters"),
    ],
)
def test_errors_are_at_their_fields(
    saved: Run, script: TestClient, weights: dict[str, Any], field: str, message: str
) -> None:
    """Invalid initial weights are reported at submission, not when the run starts."""
    answer = submit(script, **weights)
    assert answer.status_code == 422
    assert message in str(answer.json())
    assert field in str(answer.json())


def test_an_expired_upload_is_reported_before_a_run_waits_for_it(
    settings: Settings, saved: Run, script: TestClient, browser: TestClient
) -> None:
    """API, form and sweep report an expired upload; a new run extends an upload by a day."""
    upload = f"{'0' * 64}/net.pt"
    place = settings.data / uploads.key(upload)
    place.parent.mkdir(parents=True)
    place.touch()
    os.utime(place, (1, 1))
    assert submit(script, upload=upload).status_code == 201
    assert place.stat().st_mtime > 1
    place.unlink()
    typed = {"recipe": "digits", "weights.upload": upload}
    sweep = {"recipe": "digits", "config": {"weights": {"upload": upload}}}
    sweep["space"] = {"training.seed": [1, 2]}
    for answer in (
        submit(script, upload=upload),
        script.post("/api/v1/sweeps", json=sweep),
        browser.post("/runs", data=typed),
    ):
        assert answer.status_code == 422
        assert f"{upload} no longer exists" in answer.text
        assert "allowed: upload it again" in answer.text


def test_a_checkpoints_weights_fill_the_form(saved: Run, browser: TestClient) -> None:
    """The table of checkpoints links to a form with their weights filled in; a fork has its
    checkpoint's weights and names none.
    """
    address = "/runs/new?from=1&amp;weights_step=20"
    assert address in browser.get("/runs/1").text
    page = browser.get(address.replace("&amp;", "&")).text
    assert 'name="weights.run" value="1"' in page
    assert 'name="weights.step" value="20"' in page
    assert 'name="parent_id"' not in page
    form = {"recipe": "digits", "precision": "fp16", "priority": "0", "devices_per_node": "1"}
    form |= {"training.steps": "400", "training.batch_size": "64", "scaler.init_scale": "65536"}
    form |= {"weights.run": "1", "weights.step": "20", "weights.strict": "true"}
    assert browser.post("/runs", data=form).headers["location"] == "/runs/2"
    page = browser.get("/runs/new?from=2&step=20").text
    assert 'name="weights.run" value=""' in page


def test_the_page_lists_what_did_not_fit(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Weights that did not fit are listed with their state; if there are many, the rest is
    counted.
    """
    assert 'id="weights"' not in browser.get("/runs/1").text
    event = make_weights(missing=["model.head.bias"], unexpected=["<b>"]) | {"unexpected_count": 9}
    record(database, running, events=[event])
    section = browser.get("/runs/1").text.partition('<section id="weights"')[2]
    section = section.partition("</section>")[0]
    assert "12 of the recipe's 14 are those of <code>/data/models/net.safetensors</code>" in section
    assert "<td>model.head.bias</td><td>missing: as the recipe drew it</td>" in section
    assert "<td>&lt;b&gt;</td><td>unexpected: not used</td>" in section
    assert "<td>8 more</td>" in section
