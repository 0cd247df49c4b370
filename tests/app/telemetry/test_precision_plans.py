"""Precision plans and diffs at checkpoints: requested, shown, and submitted."""

import json
import re
from itertools import product
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from app.telemetry import precision_plans
from db.database import Database
from db.files import checkpoints
from db.queue import claims, queue, workers
from db.runs import runs, trash
from db.tables import (
    AuditEvent,
    CheckpointFile,
    Diagnosis,
    LatestMetric,
    LogLine,
    Run,
    Status,
    User,
)
from halfstep.client import Client
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import config_model, config_schema
from halfstep.telemetry.plain_json import json_safe
from tests.app.conftest import csrf_token
from tests.db.conftest import CPU
from tests.db.telemetry.telemetry_made import make_plan_point, make_precision_plan, record
from tests.marks import looped, sampled
from tests.site import halfstep
from tests.spool_made import checkpoint_of


class Own:
    """A recipe with all common settings."""

    name = "own"
    Config = RecipeConfig
    defaults: dict[str, Any] = {}  # noqa: RUF012


FASTEST = "Fastest within the bounds on a GPU, as predicted: fp16 with model.head in fp32."
CONFIG = config_model(Own).model_validate({"training": {"steps": 300}}).model_dump(mode="json")


@pytest.fixture
def ended(database: Database, ada: User) -> Run:
    """A finished run of a recipe that a worker offers, with checkpoints at four steps."""
    recipe = {"name": "own", "title": "Own", "description": "", "schema": config_schema(Own)}
    with database.writing() as session:
        offer: dict[str, Any] = {"devices": [CPU], "recipes": [recipe], "versions": {"torch": "2"}}
        workers.register(session, name="w1", host="host", pid=1, **offer)
        runs.submit(session, ada, Run(recipe="own", config=CONFIG))
        run = start(session)
        for step in (50, 100, 200, 300):
            file = {"kind": "checkpoint", "path": None, "size_bytes": 9, "sha256": "0" * 64}
            fields = {"step": step, "reason": "interval", "request": None, "files": [file]}
            times = {"write_seconds": 1.0, "stall_seconds": 0.0}
            checkpoints.publish(
                session, run.id, run.attempt, checkpoint_of(fields | times), [f"{step}.pt"]
            )
        queue.end(session, run.id, run.attempt, Status.FINISHED)
        return run


def start(session: Any) -> Run:
    """Let the worker start the next run."""
    run = claims.claim(
        session,
        1,
        recipes=["own"],
        precisions=["fp16", "bf16"],
        free_devices=range(64),
        lease_seconds=60.0,
    )
    assert run is not None
    queue.seconds_since_start(session, run)
    queue.start(session, run.id, run.attempt)
    return run


@pytest.fixture
def planned(database: Database, ended: Run, browser: TestClient) -> Run:
    """A run that has measured a plan of the ended run."""
    browser.post("/api/v1/runs/1/measurements", json={"task": "precision_plan"})
    with database.writing() as session:
        run = start(session)
    record(database, run, events=[make_precision_plan()])
    with database.writing() as session:
        queue.end(session, run.id, run.attempt, Status.FINISHED)
        return runs.get(session, run.id)


def get(database: Database, run_id: int) -> Run:
    with database.reading() as session:
        return runs.get(session, run_id)


@pytest.mark.parametrize(
    ("wanted", "steps", "parent"),
    [
        ({"task": "precision_plan"}, ["50", "200", "300"], 300),
        ({"task": "precision_plan", "checkpoints": [200, 50]}, ["50", "200"], 200),
        ({"task": "precision_diff"}, ["300"], 300),
        ({"task": "precision_diff", "checkpoints": [100]}, ["100"], 100),
    ],
)
def test_measurement_is_queued_as_a_run(
    database: Database,
    ended: Run,
    browser: TestClient,
    wanted: dict[str, Any],
    steps: list[str],
    parent: int,
) -> None:
    """A measurement is queued as a run with the configuration and checkpoints of the run."""
    answer = browser.post("/api/v1/runs/1/measurements", json=wanted)
    assert answer.status_code == 201
    run = get(database, answer.json()["id"])
    assert (run.task, run.parent_id, run.parent_step) == (wanted["task"], 1, parent)
    assert run.config["lab"]["checkpoints"] == steps
    assert (run.steps_total, run.expected_seconds) == (0, None)
    assert {k: v for k, v in run.config.items() if k not in ("lab", "weights")} == {
        k: v for k, v in CONFIG.items() if k not in ("lab", "weights")
    }
    with database.reading() as session:
        rows = checkpoints.to_measure(session, run)
        assert [row and row.step for row in rows.values()] == list(map(int, steps))
        audited = session.execute(select(AuditEvent.run_id, AuditEvent.detail)).all()
    assert {row.run_id for row in audited if "task" in row.detail} == {1, run.id}


@looped(
    "wanted, status, text",
    [
        ({"task": "precision_plan", "checkpoints": [70]}, 422, "has them at 50, 100, 200, 300"),
        ({"task": "precision_plan", "checkpoints": [1, 2, 3, 4]}, 422, "checkpoints"),
        ({"task": "train"}, 422, "task"),
        ({"task": "precision_plan", "batches": 5}, 422, "batches"),
        ({"task": "precision_plan", "max_error": -1}, 422, "max_error"),
        ({"task": "precision_plan", "min_cosine": 2}, 422, "min_cosine"),
    ],
)
def test_measurement_that_is_not_possible_names_the_field(
    ended: Run, browser: TestClient, wanted: dict[str, Any], status: int, text: str
) -> None:
    """An impossible measurement is refused by the name of the field, and nothing is queued."""
    answer = browser.post("/api/v1/runs/1/measurements", json=wanted)
    assert answer.status_code == status
    assert text in answer.text
    assert browser.get("/api/v1/runs").json()["total"] == 1


def test_run_without_checkpoints_is_planned_with_fresh_weights(
    database: Database, ended: Run, browser: TestClient
) -> None:
    """A run without checkpoints is planned with fresh weights and has no parent; a diff and a plan
    of checkpoints only are refused.
    """
    with database.writing() as session:
        for row in session.scalars(select(CheckpointFile)):
            session.delete(row)
    only = {"task": "precision_plan", "fresh_weights": False}
    for wanted in (only, {"task": "precision_diff"}):
        answer = browser.post("/api/v1/runs/1/measurements", json=wanted)
        assert answer.status_code == 409
        assert "no checkpoint to measure" in answer.text
    answer = browser.post("/api/v1/runs/1/measurements", json={"task": "precision_plan"})
    run = get(database, answer.json()["id"])
    assert (run.parent_id, run.config["lab"]["checkpoints"]) == (None, [])


@looped(
    "changes, field",
    [
        ({"devices_per_node": 2}, "devices_per_node"),
        ({"nodes": 2}, "nodes"),
        ({"config": {"lab": {"task": "precision_plan", "checkpoints": ["5"]}}}, "lab.checkpoints"),
        ({"config": {"lab": {"checkpoints": ["5"]}}}, "lab.checkpoints"),
        ({"config": {"lab": {"task": "precision_diff"}, "precision": "fp32"}}, "precision"),
        ({"config": {"lab": {"checkpoints": ["x"]}}}, "lab.checkpoints"),
        ({"config": {"lab": 5}}, "lab"),
        ({"config": {"lab": {"checkpoints": 5}}}, "lab.checkpoints"),
    ],
)
def test_submitted_measurement_is_checked(
    ended: Run, browser: TestClient, changes: dict[str, Any], field: str
) -> None:
    """A submitted measurement must have one device, and checkpoints of its parent run."""
    body = {"recipe": "own", "config": {"lab": {"task": "precision_plan"}}} | changes
    answer = browser.post("/api/v1/runs", json=body)
    assert answer.status_code == 422
    assert field in answer.json()["errors"]


def test_plan_of_the_api(database: Database, planned: Run, browser: TestClient) -> None:
    """The API has a plan's points with their configurations; a run without a plan has none."""
    plan = browser.get(f"/api/v1/runs/{planned.id}/precision-plan").json()["plan"]
    assert plan["sentences"][0] == FASTEST
    assert [point["label"] for point in plan["points"]] == [
        "fp16 everywhere",
        "fp16 with model.head in fp32",
        "fp32 everywhere",
    ]
    assert plan["best"] == 1
    assert (plan["points"][0]["error"], plan["points"][0]["cosine"]) == ("Infinity", "NaN")
    assert plan["points"][1]["config"] == {
        "precision": "fp16",
        "modules": {"fp32": ["model.head"]},
        "scaler": {"init_scale": 65536.0},
    }
    assert browser.get("/api/v1/runs/1/precision-plan").json() == {"plan": None}
    assert browser.get("/api/v1/runs/99/precision-plan").status_code == 404


def test_page_of_a_plan(planned: Run, database: Database, browser: TestClient) -> None:
    """A plan's page has its points with bounds, how costs were found, and its modules with unknown
    values marked.

    Its runs can be compared by each metric that runs of the recipe have logged.
    """
    with database.writing() as session:
        session.add(LatestMetric(run_id=1, name="val/accuracy", step=1, value=0.5))
    page = " ".join(browser.get(f"/runs/{planned.id}/precision-plan").text.split())
    assert FASTEST in page
    assert "predicted for a GPU from counted operations" in page
    assert "Predicted time</th>" in page
    assert page.count('"bounds">outside</td>') == 1
    assert ">NaN</td>" in page  # the cosine of a gradient that overflows
    assert "<code>model.head</code>" in page
    choices = page.partition('name="metric"')[2].partition("</select>")[0]
    assert re.findall('value="(.*?)"', choices) == ["loss", "val/accuracy"]
    run_page = browser.get("/runs/1?tab=gradients").text
    assert f"/runs/{planned.id}/precision-plan" in run_page


def test_measured_times_are_named_as_such(
    database: Database, planned: Run, browser: TestClient
) -> None:
    """Times measured on a GPU are named as those of CUDA events; texts of the spool are escaped."""
    point = make_plan_point("bf16", ms=1.5, fp32=["<b>"])
    timed = {"cost": "measured", "device": "H100 <i>", "fp32_cost": None, "points": [point]}
    with database.writing() as session:
        row = runs.get(session, planned.id, lock=True)
        row.status = Status.RUNNING
    record(database, planned, events=[make_precision_plan(step=1, **timed)])
    page = browser.get(f"/runs/{planned.id}/precision-plan").text
    assert "measured by CUDA events on H100 &lt;i&gt;" in page
    assert "<code>&lt;b&gt;</code>" in page
    assert "1.5 ms" in page
    assert "Fastest within the bounds on H100 &lt;i&gt;: " in page


def test_page_before_and_without_a_plan(
    database: Database, ended: Run, browser: TestClient
) -> None:
    """Until there is a plan its page says that it is being measured, or why there is none."""
    answer = browser.post(
        "/runs/1/measurements",
        data={"csrf_token": csrf_token(browser), "task": "precision_plan", "checkpoints": ["100"]},
        follow_redirects=False,
    )
    assert answer.headers["location"] == "/runs/2/precision-plan"
    assert get(database, 2).config["lab"]["checkpoints"] == ["100"]
    assert get(database, 2).config["lab"]["fresh_weights"] is False
    assert "This page shows the plan once it is ready" in browser.get("/runs/2/precision-plan").text
    page = browser.get("/runs/2").text
    assert 'data-tab="log"' in page
    assert not [part for part in ("facts", "health") if f'data-fragment="{part}"' in page]
    assert 'data-tab="charts"' not in page
    forms = set(re.findall(r'action="/runs/2/([a-z-]+)" data-action data-when="([a-z ]+)"', page))
    assert ("pause", "queued") in forms
    assert not {"checkpoints", "scale", "precision-diffs"} & {name for name, _ in forms}
    with database.writing() as session:
        run = start(session)
        line = {"time": 1.0, "stream": "stdout", "text": "Measurement 1: batch 1 of 2, <step 100>"}
        session.add(LogLine(run_id=run.id, attempt=run.attempt, number=1, **line))
    measuring = browser.get("/runs/2/precision-plan").text
    assert "data-log-line>Measurement 1: batch 1 of 2, &lt;step 100&gt;</p>" in measuring
    with database.writing() as session:
        error = "ValueError: the model has no parameter"
        queue.end(session, run.id, run.attempt, Status.FAILED, error=error)
    page = browser.get("/runs/2/precision-plan").text
    assert "No plan" in page
    assert "the model has no parameter" in page
    assert "has measured none" in browser.get("/runs/1/precision-plan").text


def test_page_of_a_run_lists_its_measurements(
    database: Database, ended: Run, browser: TestClient
) -> None:
    """A run's page lists its measurements with their checkpoints; a measurement that names none has
    that of its parent step.
    """
    lab = {"task": "precision_plan"}
    body = {"recipe": "own", "config": {"lab": lab}, "parent_id": 1, "parent_step": 200}
    assert browser.post("/api/v1/runs", json=body).status_code == 201
    browser.post("/api/v1/runs/1/measurements", json=lab | {"checkpoints": [50, 100]})
    page = browser.get("/runs/1").text
    listed = re.findall(r"Precision plan, queued, (.*?)<span", page)
    assert [*map(str.strip, listed)] == [
        "initial weights, steps 50, 100",
        "initial weights, step 200",
    ]


def test_point_opens_the_form_of_a_training(
    planned: Run, database: Database, browser: TestClient
) -> None:
    """A plan's point opens a filled-in form, whose run trains from the start and without a
    parent.
    """
    page = browser.get(f"/runs/{planned.id}/precision-plan").text
    links = [part.partition('"')[0] for part in page.split('href="/runs/new?')[1:]]
    best = next(link for link in links if "model.head" in link).replace("&amp;", "&")
    assert {'modules.fp32=["model.head"]', 'lab.task="train"'} <= set(parse_qs(best)["set"])
    form = browser.get(f"/runs/new?{best}").text
    assert 'value="model.head"' in form
    assert 'name="parent_id" value=""' in form or 'name="parent_id"' not in form
    clone = browser.get(f"/runs/new?from={planned.id}").text
    assert 'name="parent_id" value="1"' in clone


def test_best_points_are_queued_over_seeds(
    planned: Run, database: Database, browser: TestClient
) -> None:
    """The best points are queued with fp32, one group a seed; the comparison names each mix."""
    answer = browser.post(
        f"/runs/{planned.id}/precision-plan/runs",
        data={"csrf_token": csrf_token(browser), "seeds": "2", "margin": "0.01"},
        follow_redirects=False,
    )
    query = parse_qs(urlsplit(answer.headers["location"]).query)
    ids = list(map(int, query["runs"][0].split(",")))
    assert query["margin"] == ["0.01"]
    queued = [get(database, run_id) for run_id in ids]
    assert [(run.precision, run.config["training"]["seed"]) for run in queued] == [
        ("fp16", 0),
        ("fp32", 0),
        ("fp16", 1),
        ("fp32", 1),
    ]
    assert {run.task for run in queued} == {"train"}
    assert {run.parent_id for run in queued} == {None}
    assert queued[0].config["modules"]["fp32"] == ["model.head"]
    assert queued[0].name == "own fp16 with model.head in fp32 seed 0"
    assert not any(run.config["training"]["tf32"] for run in queued if run.precision == "fp32")
    parity = browser.get("/api/v1/comparison/parity", params={"runs": query["runs"][0]}).json()
    assert parity["reference"] == "fp32"
    assert [group["name"] for group in parity["groups"]] == ["fp16, model.head in fp32"]
    [group] = parity["groups"]
    assert group["also_differ"] == []
    again = browser.post(f"/api/v1/runs/{planned.id}/precision-plan/runs", json={"seeds": 1})
    assert (again.status_code, len(again.json()["queued"])) == (201, 2)


ORIGINS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({"weights": {"path": "weights.pt"}}, {}),
    "fork": ({}, {"parent_id": 1, "parent_step": 200}),
    "several devices": ({}, {"nodes": 2, "devices_per_node": 4}),
    "TF32": ({"training": {"steps": 300, "tf32": True}}, {}),
}


def submit(session: Session, owner: User, origin: str) -> Run:
    """Submit a run with this parent or these weights."""
    settings, options = ORIGINS[origin]
    config = config_model(Own).model_validate({"training": {"steps": 300}} | settings)
    values = config.model_dump(mode="json")
    return runs.submit(session, owner, Run(recipe="own", config=values, **options))


@pytest.mark.parametrize(
    ("origin", "fresh"),
    sampled(product(ORIGINS, [True, False]), [*product(ORIGINS, [True]), ("weights", False)]),
)
def test_points_are_trained_as_the_measured_run(
    database: Database, ended: Run, ada: User, browser: TestClient, origin: str, fresh: bool
) -> None:
    """Queued points have the measured run's weights or parent, nodes, devices and settings; fp32
    has all modules in full precision.
    """
    with database.writing() as session:
        trained = submit(session, ada, origin)
        (saved,) = session.scalars(select(CheckpointFile).where(CheckpointFile.step == 300))
        saved.run_id = trained.id
        plan = precision_plans.request(
            session,
            ada,
            trained,
            precision_plans.Measurement(task="precision_plan", fresh_weights=fresh),
        )
        event = json_safe(make_precision_plan())
        session.add(Diagnosis(run_id=plan.id, step=0, kind="precision_plan", content=event))
    answer = browser.post(f"/api/v1/runs/{plan.id}/precision-plan/runs", json={"seeds": 2})
    queued = [get(database, run_id) for run_id in answer.json()["queued"]]
    for run in queued:
        assert run.config["weights"] == trained.config["weights"]
        for name in ("parent_id", "parent_step", "nodes", "devices_per_node"):
            assert getattr(run, name) == getattr(trained, name), name
        is_exact = run.precision == "fp32"
        assert run.config["training"]["tf32"] == (origin == "TF32" and not is_exact)
    form = browser.get(
        "/runs/new",
        params={"from": plan.id, "set": ['lab.task="train"', "lab.checkpoints=[]"]},
    ).text
    for name in ("nodes", "devices_per_node", "parent_id", "parent_step"):
        value = getattr(trained, name)
        field = re.search(rf'<input[^>]* name="{name}"[^>]*>', form)
        assert value is None or (field and f'value="{value}"' in field[0]), name
    assert ("weights.pt" in form) == (origin == "weights")


@pytest.mark.parametrize("origin", ["fork", "several devices"])
def test_plan_must_know_what_its_runs_train_from(
    database: Database, ended: Run, ada: User, browser: TestClient, origin: str
) -> None:
    """Points of a plan that does not record what its runs start from are refused."""
    with database.writing() as session:
        run_id = submit(session, ada, origin).id
    answer = browser.post(f"/api/v1/runs/{run_id}/measurements", json={"task": "precision_plan"})
    assert answer.status_code == 409
    assert "measure it once it has saved one" in answer.json()["detail"]


def test_points_of_a_deleted_run_are_refused(
    database: Database, planned: Run, ada: User, browser: TestClient
) -> None:
    """Points of a deleted run are refused, since it is unknown what they would start from."""
    with database.writing() as session:
        trash.delete(session, 1, ada)
    answer = browser.post(f"/api/v1/runs/{planned.id}/precision-plan/runs", json={})
    assert answer.status_code in (404, 409, 410)
    assert "trash" in answer.json()["detail"]


def test_mixes_with_equal_labels_are_both_queued(
    database: Database, ended: Run, browser: TestClient
) -> None:
    """Two mixes with the same label, which names only some modules, are both queued."""
    names = [[f"model.layer{n}" for n in range(10)] + [last] for last in ("model.a", "model.b")]
    points = [make_plan_point(fp32=each, time=0.2 + n / 10) for n, each in enumerate(names)]
    browser.post("/api/v1/runs/1/measurements", json={"task": "precision_plan"})
    with database.writing() as session:
        run = start(session)
    record(database, run, events=[make_precision_plan(points=points)])
    answer = browser.post(f"/api/v1/runs/{run.id}/precision-plan/runs", json={"seeds": 1})
    queued = [get(database, run_id).config["modules"]["fp32"] for run_id in answer.json()["queued"]]
    assert queued == [*names, []]


def test_page_of_a_plan_that_a_script_recorded(
    database: Database, ended: Run, browser: TestClient
) -> None:
    """The page shows a plan that a script recorded, without runs to queue."""
    with database.writing() as session:
        run = session.get_one(Run, 1)
        run.source, run.config = "watch", {}
        event = json_safe(make_precision_plan())
        session.add(Diagnosis(run_id=1, step=0, kind="precision_plan", content=event))
    page = browser.get("/runs/1/precision-plan")
    assert page.status_code == 200
    assert "Time against error" in page.text
    assert "Run the best" not in page.text
    assert "/runs/new?from=1" not in page.text


def test_run_without_a_plan_queues_no_points(ended: Run, browser: TestClient) -> None:
    """Queueing points of a run without a plan is a conflict that says what is missing."""
    answer = browser.post("/api/v1/runs/1/precision-plan/runs", json={})
    assert answer.status_code == 409
    assert "no precision plan with a point within its bounds" in answer.json()["detail"]


def test_measurement_is_neither_compared_nor_measured(planned: Run, browser: TestClient) -> None:
    """A measurement, which trains nothing, can be neither compared nor measured."""
    for path in ("comparison", "measurements"):
        body = {"task": "precision_plan"} if path == "measurements" else None
        answer = browser.post(f"/api/v1/runs/{planned.id}/{path}", json=body)
        assert answer.status_code == 409, path
        assert "does not train" in answer.json()["detail"]


def test_client_and_command(database: Database, ended: Run, address: str, token: str) -> None:
    """Client and command can request measurements, print a plan and queue its best points."""
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    with Client(address, token) as client:
        plan = client.request_precision_plan(1, 50, 300, fresh_weights=False, max_error=0.05)
        lab = get(database, plan["id"]).config["lab"]
        assert (lab["checkpoints"], lab["fresh_weights"], lab["max_error"]) == (
            ["50", "300"],
            False,
            0.05,
        )
        assert client.precision_plan(plan["id"]) is None
        with database.writing() as session:
            run = start(session)
        record(database, run, events=[make_precision_plan()])
        found = client.precision_plan(plan["id"])
        assert found is not None
        assert found["points"][found["best"]]["fp32"] == ["model.head"]
        assert len(client.queue_best_of_plan(plan["id"], seeds=1)) == 2
        assert client.request_checkpoint_diff(1, 100)["parent_step"] == 100
    command = ("run", "precision-plan", str(plan["id"]))
    table = halfstep(*command, **known).stdout
    assert FASTEST in table
    assert json.loads(halfstep(*command, "--json", **known).stdout)["best"] == 1
    without = halfstep("run", "precision-plan", "1", **known)
    assert (without.returncode, without.stdout) == (1, "")
    assert "add --request to queue one" in without.stderr
    asked = halfstep("run", "precision-plan", "1", "--request", "--checkpoint", "200", **known)
    assert "queued  own-fp16 precision plan" in asked.stdout
    asked = halfstep("run", "precision-diff", "1", "--checkpoint", "200", **known)
    assert "queued  own-fp16 precision diff" in asked.stdout


def lab_card_of(browser: TestClient) -> str:
    """Return the HTML of the precision lab's card on the page of the ended run."""
    page = browser.get("/runs/1").text.partition('<section id="measurements"')[2]
    return page.partition('<div id="lab-menu"')[0]


def test_card_of_the_lab_has_one_button_by_state(ended: Run, browser: TestClient) -> None:
    """The lab's card has one button: measure, cancel during a measurement, and measure again after
    a failed one.

    It says which weights are measured.
    """
    assert "with the initial weights and up to 3 checkpoints" in lab_card_of(browser)
    assert re.findall(r"<button title.*?>(.*?)<", lab_card_of(browser)) == ["Plan precision"]
    queued = browser.post("/api/v1/runs/1/measurements", json={"task": "precision_plan"}).json()
    assert re.findall(r"<button>(.*?)<", lab_card_of(browser)) == ["Cancel"]
    weights = "initial weights, steps 50, 200, 300"
    assert weights in lab_card_of(browser)
    assert weights in browser.get(f"/runs/{queued['id']}/precision-plan").text
    browser.post(f"/api/v1/runs/{queued['id']}/cancellation")
    assert re.findall(r"<button title.*?>(.*?)<", lab_card_of(browser)) == ["Plan again"]


def test_card_of_the_lab_has_the_result(planned: Run, browser: TestClient) -> None:
    """The lab's card has the result in a sentence, a bar for each module, and a link to the form of
    a run with the plan.
    """
    card = lab_card_of(browser)
    assert "with model.head in fp32 stays within 10 % of fp32" in card
    assert card.count('class="track') == 1
    assert "Predicted for a GPU: " in card
    assert "of fp32's time; not measured on cpu." in card.replace("&#39;", "'")
    [form] = re.findall(r'<a class="button end" href="(.*?)">New run with this plan</a>', card)
    assert "modules.fp32" in form


def test_card_of_the_lab_offers_no_fork_as_the_run_trains(
    database: Database, planned: Run, browser: TestClient
) -> None:
    """The card offers no fork with the precision and modules that the run already has."""
    with database.writing() as session:
        run = runs.get(session, 1)
        run.config = run.config | {"modules": {"fp32": ["model.head"], "bf16": []}}
    card = lab_card_of(browser)
    assert "stays within 10 % of fp32, as this run trains" in card
    assert "New run" not in card
