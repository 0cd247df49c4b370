"""Runs over several workers, as users submit and see them."""

from sqlalchemy import select
from starlette.testclient import TestClient

from db.database import Database
from db.queue import claims, workers
from db.runs import runs
from db.tables import Run, Status, Sweep, User
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, submit
from tests.app.submission.new_run_pages_made import FORM

WIDE = {"nodes": 2, "devices_per_node": 3}


def add_workers(database: Database, devices: int = 3) -> None:
    """Register two workers that could train a run together."""
    with database.writing() as session:
        for name in ("w1", "w2"):
            offer = {"devices": [{**CPU, "index": index} for index in range(devices)]}
            known = {"recipes": [DIGITS], "versions": {"torch": "2.13.0"}}
            workers.register(session, name=name, host=name, pid=1, **offer, **known)


def test_a_run_says_how_many_nodes_it_has_and_where_they_are(
    database: Database, script: TestClient, browser: TestClient
) -> None:
    """API and form accept a number of nodes; the run's page names their workers once it has
    them.
    """
    add_workers(database)
    run = script.post("/api/v1/runs", json={"recipe": "digits", **WIDE}).json()
    assert (run["nodes"], run["devices_per_node"], run["workers"]) == (2, 3, [])
    assert run["waiting"] == "it is next: a worker is about to take it"
    answer = browser.post("/runs", data=FORM | {"nodes": "3", "name": "too many"})
    text = "It needs 3 nodes of 1 device each, and only 2 workers with the same version"
    page = browser.get(answer.headers["location"]).text
    assert text in page
    assert "Next in the queue" not in page
    assert "next in queue" not in browser.get("/runs?filter=too").text
    with database.writing() as session:
        (worker, _), *_others = workers.all_workers(session)
        claimed = claims.claim(
            session,
            worker.id,
            recipes=["digits"],
            precisions=["fp16"],
            free_devices=range(3),
            lease_seconds=60.0,
        )
    assert claimed is not None
    assert script.get("/api/v1/runs/1").json()["workers"] == ["w1", "w2"]
    assert "2 nodes × 3 devices on w1, w2" in browser.get("/runs/1").text
    assert 'name="nodes" value="2"' in browser.get("/runs/new?from=1").text
    assert script.post("/api/v1/runs/2/cancellation").status_code == 200
    other = script.post("/api/v1/runs", json={"recipe": "digits", **WIDE}).json()
    text = "it needs 2 nodes of 3 devices each, and none can be used"
    assert other["waiting"] == f"it is next: {text}"


def test_derived_runs_have_the_same_nodes(
    database: Database, ada: User, script: TestClient, browser: TestClient
) -> None:
    """Runs of a precision comparison, continued runs and runs of a sweep have the nodes
    of the original.
    """
    add_workers(database)
    submit(database, ada, **WIDE)
    assert script.post("/api/v1/runs/1/comparison").status_code == 201
    sweep = {"recipe": "digits", "config": CONFIG, "space": {"training.batch_size": [8, 16]}}
    assert script.post("/api/v1/sweeps", json=sweep | WIDE).status_code == 201
    form = browser.post("/sweeps/new", data=FORM | {"nodes": "2"}).text
    assert 'name="nodes" value="2"' in form
    with database.reading() as session:
        assert session.scalars(select(Run.nodes).distinct()).all() == [2]
        assert session.scalars(select(Sweep.nodes)).all() == [2]
        assert len(session.scalars(select(Run)).all()) > 3


def test_how_long_a_run_takes_is_noted_when_it_is_submitted(
    database: Database, ada: User, script: TestClient
) -> None:
    """The estimate is that of the slowest finished run with the same sizes and nodes."""
    add_workers(database)
    width = {"title": "Width", "type": "integer", "minimum": 1, "default": 64}
    sizes = {"type": "object", "additionalProperties": False, "properties": {"width": width}}
    properties = SCHEMA["properties"] | {"recipe": sizes}
    with database.writing() as session:
        for worker in (1, 2):
            sized = DIGITS | {"schema": SCHEMA | {"properties": properties}}
            workers.offer(session, worker, [sized])
    for pace in (2.0, 4.0):
        run = submit(database, ada, config=CONFIG | {"recipe": {"width": 64}})
        with database.writing() as session:
            done = runs.get(session, run.id, lock=True)
            runs.set_status(session, done, Status.FINISHED)
            done.steps_per_second = pace
    others = ({"training": {"batch_size": 8}}, {"recipe": {"width": 128}})
    for body in ({}, {"nodes": 2}, *({"config": config} for config in others)):
        assert script.post("/api/v1/runs", json={"recipe": "digits", **body}).status_code == 201
    with database.reading() as session:
        query = select(Run.expected_seconds).where(Run.id > 2).order_by(Run.id)
        assert session.scalars(query).all() == [CONFIG["training"]["steps"] / 2.0, *[None] * 3]


def test_an_invalid_number_of_nodes_is_rejected(database: Database, script: TestClient) -> None:
    """The error for an invalid number of nodes has the allowed values; a command has one node."""
    add_workers(database)
    for body, message in (
        ({"recipe": "digits", "nodes": 0}, "nodes: 0 is not valid; allowed: a whole number"),
        ({"recipe": "digits", "nodes": 257}, "from 1 to 256"),
        ({"command": {"line": "true"}, "nodes": 2}, "allowed: 1 node for a command"),
    ):
        answer = script.post("/api/v1/runs", json=body)
        assert (answer.status_code, message in answer.text) == (422, True), answer.text
    asked = {"recipe": "digits", "precision": "fp16", "nodes": 300}
    assert script.get("/api/v1/estimates", params=asked).status_code == 422


def test_conflicting_settings_are_rejected_before_workers_are_claimed(
    database: Database, script: TestClient
) -> None:
    """Conflicting settings of nodes are rejected at submission with the worker's message."""
    offered = [{**DIGITS, "name": "gpt", "schema": {"type": "object"}}]
    with database.writing() as session:
        known = {"devices": [CPU], "recipes": offered, "versions": {}}
        workers.register(session, name="w", host="w", pid=1, **known)
    training = {"parallel": "fsdp", "compile": True}
    answer = script.post("/api/v1/runs", json={"recipe": "gpt", "config": {"training": training}})
    assert answer.status_code == 422
    text = "parallel fsdp cannot be combined with compile; allowed: ddp"
    assert answer.json()["errors"] == {"training.parallel": text}
    spike = {"spike": {"rollback": True, "threshold": 3.0}, "checkpoints": {"every_steps": None}}
    answer = script.post("/api/v1/runs", json={"recipe": "gpt", "config": spike})
    assert list(answer.json()["errors"]) == ["spike.rollback"]
