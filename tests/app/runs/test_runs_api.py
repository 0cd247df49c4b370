"""Runs by the JSON API."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.runs import runs
from db.tables import Run, Status, User
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import config_schema
from tests.app.conftest import CONFIG, CPU, submit
from tests.db.conftest import add_worker
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.marks import looped


class Own:
    """A recipe with all common settings."""

    name = "own"
    Config = RecipeConfig
    defaults: dict[str, Any] = {}  # noqa: RUF012


def test_a_whole_number_is_stored_as_one(offered: None, script: TestClient) -> None:
    """2.0 is accepted as an integer, and stored as 2."""
    body = {"recipe": "digits", "config": {"training": {"steps": 50.0, "batch_size": 2.0}}}
    run = script.post("/api/v1/runs", json=body).json()
    training = script.get(f"/api/v1/runs/{run['id']}/config").json()["training"]
    assert (repr(training["steps"]), repr(training["batch_size"])) == ("50", "2")


def test_submit_fills_in_defaults(offered: None, script: TestClient) -> None:
    """A submission needs only the recipe; the response is the queued run."""
    body = {"recipe": "digits", "config": {"training": {"steps": 50}}, "tags": "a ,b,,"}
    answer = script.post("/api/v1/runs", json=body)
    assert answer.status_code == 201
    run = answer.json()
    assert (run["status"], run["name"], run["steps_total"]) == ("queued", "digits-fp16", 50)
    assert (run["owner"], run["tags"]) == ("ada", ["a", "b"])
    config = script.get(f"/api/v1/runs/{run['id']}/config").json()
    assert config == CONFIG | {"training": CONFIG["training"] | {"steps": 50}}


def test_the_time_left_is_known_after_ten_steps(
    database: Database, running: Run, script: TestClient
) -> None:
    """The time left is known from the tenth step on, because the first steps are not typical."""
    record(database, running, make_steps([3.0] * 9))
    assert script.get("/api/v1/runs/1").json()["seconds_left"] is None
    record(database, running, make_steps([3.0], first=10))
    left = script.get("/api/v1/runs/1").json()
    remaining = left["steps_total"] - 10
    assert left["seconds_left"] == pytest.approx(remaining / left["steps_per_second"])


def nest(depth: int) -> list[object]:
    """Return a list nested this deep."""
    return [nest(depth - 1)] if depth else []


@looped(
    "body, field, message",
    [
        ({"recipe": "gpt"}, "recipe", "There is no recipe 'gpt'. Workers offer: digits."),
        ({}, "recipe", "Field required"),
        (
            {"recipe": "digits", "config": {"training": {"batch_size": 5000}}},
            "training.batch_size",
            "5000 is not valid; allowed: a whole number from 1 to 1,437",
        ),
        ({"recipe": "digits", "priority": 101}, "priority", "from -100 to 100"),
        ({"recipe": "digits", "devices_per_node": 0}, "devices_per_node", "from 1 to"),
        ({"recipe": "digits", "name": "x" * 101}, "name", "at most 100"),
        ({"recipe": "digits", "after_id": 99}, "after_id", "no run 99"),
        ({"recipe": "digits", "after_id": 10**30}, "after_id", "from 1 to 2147483647"),
        ({"recipe": "digits", "parent_id": -1}, "parent_id", "from 1 to 2147483647"),
        ({"recipe": "digits", "parent_step": 5}, "parent_step", "without parent_id"),
        ({"recipe": "digits", "name": "a\0"}, "name", "cannot be stored"),
        ({"recipe": "digits", "tags": "\ud800"}, "tags", "cannot be stored"),
        ({"recipe": "\ud800"}, "recipe", "cannot be stored"),
        ({"recipe": "digits", "config": {"precision": "\0"}}, "precision", "cannot be stored"),
        ({"recipe": "digits", "config": {"\udfff": 1}}, "\\udfff", "cannot be stored"),
        ({"recipe": "digits", "config": {"a": 10**400}}, "a", "a whole number from"),
        ({"recipe": "digits", "config": {"a": "x" * 10**5}}, "a", "it has 100,000 characters; all"),
        ({"recipe": "digits", "config": {"a": nest(20)}}, "a.0.0.0.0.0.0.0.0.0.0", "is nested"),
        (
            {"recipe": "digits", "config": {"training": {"max_grad_norm": 10**400}}},
            "training.max_grad_norm",
            "allowed: a number greater than 0",
        ),
        ({"recipe": "digits", "config": {"training": {"steps": 1e300}}}, "training.steps", "from"),
        ({"recipe": "digits", "colour": "red"}, "colour", "unknown field"),
        ({"recipe": "digits", "config": "fast"}, "config", "'fast'"),
    ],
)
def test_bad_submission_names_each_field(
    offered: None, script: TestClient, body: object, field: str, message: str
) -> None:
    """An invalid submission gets 422 with the path of each field, its value and the allowed values,
    and nothing is queued.
    """
    headers = {"content-type": "application/json"}
    text = json.dumps(body)  # spells out what UTF-8 cannot hold
    answer = script.post("/api/v1/runs", content=text, headers=headers)
    assert answer.status_code == 422
    assert message in answer.json()["errors"][field]
    assert script.get("/api/v1/runs").json()["runs"] == []


def test_all_mistakes_come_at_once(offered: None, script: TestClient) -> None:
    """Three mistakes in one submission give three errors."""
    config = {"precision": "fp8", "training": {"steps": 0}}
    body = {"recipe": "digits", "priority": 500, "config": config}
    errors = script.post("/api/v1/runs", json=body).json()["errors"]
    assert errors.keys() == {"precision", "training.steps", "priority"}


@looped(
    "config, fields",
    [
        ({"scaler": {"floor": 100, "ceiling": 3}}, {"scaler.floor"}),
        (
            {"scaler": {"floor": 100, "ceiling": 3}, "training": {"steps": 0}},
            {"scaler.floor", "training.steps"},
        ),
        (
            {"scaler": {"floor": 100, "ceiling": 3, "growth_factor": 1, "stop_at_floor": True}},
            {"scaler.floor", "scaler.growth_factor"},
        ),
        (
            {"training": {"rounding": "stochastic", "static_graph": True, "accumulation_steps": 2}},
            {"training.rounding", "training.static_graph"},
        ),
        ({"scaler": {"stop_at_floor": True, "floor": 0}}, {"scaler.floor"}),
        (
            {"spike": {"rollback": True, "threshold": 2}, "weights": {"run": 77}},
            {"spike.rollback", "weights.run"},
        ),
    ],
)
def test_contradictions_come_at_once_with_other_mistakes(
    database: Database, script: TestClient, config: dict[str, Any], fields: set[str]
) -> None:
    """Contradictory settings are reported together with other mistakes, each at its field;
    consequences of a mistake are not.
    """
    schema = config_schema(Own)
    recipe = {"name": "own", "title": "Own", "description": "", "schema": schema}
    add_worker(database, "w1", [recipe], [CPU])
    answer = script.post("/api/v1/runs", json={"recipe": "own", "config": config})
    assert answer.status_code == 422
    assert answer.json()["errors"].keys() == fields


def test_list_is_filtered_and_paged(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """The list can be limited by text, status, number and position."""
    for name in ("one", "two", "three"):
        submit(database, ada, name=name)

    def names(**query: str | int) -> list[str]:
        return [run["name"] for run in script.get("/api/v1/runs", params=query).json()["runs"]]

    assert names() == ["three", "two", "one"]
    assert names(filter="tw") == ["two"]
    assert names(filter="status:finished") == []
    assert names(limit=1, before=3) == ["two"]


def test_queued_run_says_what_it_waits_for(
    database: Database, ada: User, script: TestClient
) -> None:
    """A queued run in the API has its position and pending reason."""
    submit(database, ada)
    run = script.get("/api/v1/runs/1").json()
    assert (run["ahead"], run["waiting"]) == (0, "no worker reports at the moment")


def test_actions_ask_the_training(database: Database, running: Run, script: TestClient) -> None:
    """Checkpoint, pause and cancel are requested from a running run, whose history names
    the user.
    """
    address = f"/api/v1/runs/{running.id}"
    assert script.post(f"{address}/checkpoints").status_code == 202
    assert script.post(f"{address}/pause").json()["status"] == "pausing"
    assert script.post(f"{address}/cancellation").json()["status"] == "stopping"
    assert script.post(f"{address}/kill").json()["status"] == "stopping"
    assert script.post(f"{address}/pause").status_code == 409
    statuses = script.get(address).json()["statuses"]
    assert statuses[-1]["reason"] == "killed by ada"


def test_paused_run_is_resumed_and_moved_forward(
    database: Database, ada: User, script: TestClient
) -> None:
    """A queued run can be paused, resumed and given another priority."""
    submit(database, ada)
    script.post("/api/v1/runs/1/pause")
    assert script.post("/api/v1/runs/1/resumption").json()["status"] == "queued"
    assert script.put("/api/v1/runs/1/priority", json={"priority": 5}).json()["priority"] == 5
    assert script.put("/api/v1/runs/1/priority", json={"priority": 500}).status_code == 422
    with database.reading() as session:
        assert runs.get(session, 1).status == Status.QUEUED


def test_a_repeated_submission_queues_one_run(offered: None, script: TestClient) -> None:
    """A retry with the same key gets the run that the first request queued."""
    body = {"recipe": "digits"}
    key = {"Idempotency-Key": "once"}
    answers = [script.post("/api/v1/runs", json=body, headers=key).json()["id"] for _ in range(2)]
    other = script.post("/api/v1/runs", json=body, headers={"Idempotency-Key": "again"}).json()[
        "id"
    ]
    plain = [script.post("/api/v1/runs", json=body).json()["id"] for _ in range(2)]
    assert [*answers, other, *plain] == [1, 1, 2, 3, 4]


def test_pages_of_the_list_lead_to_each_other(
    database: Database, ada: User, script: TestClient
) -> None:
    """Each page of the list has the total and the start of the next page."""
    for _ in range(5):
        submit(database, ada)
    seen, before = [], None
    while True:
        query = {"limit": 2} | ({"before": before} if before else {})
        page = script.get("/api/v1/runs", params=query).json()
        assert page["total"] == 5
        seen += [run["id"] for run in page["runs"]]
        if (before := page["next"]) is None:
            break
    assert seen == [5, 4, 3, 2, 1]
    assert script.get("/api/v1/runs", params={"filter": "gpt"}).json()["total"] == 0


@pytest.mark.slow
def test_known_data_are_not_sent_again(database: Database, ada: User, script: TestClient) -> None:
    """By its ETag a client avoids an unchanged response; responses can be compressed."""
    submit(database, ada)
    path = "/api/v1/runs/1/config"
    first = script.get(path)
    again = script.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    longer = script.get("/api/v1/openapi.json")
    assert longer.headers["content-encoding"] == "gzip"
    plain = script.get("/api/v1/openapi.json", headers={"Accept-Encoding": "identity"})
    assert plain.json() == longer.json()
    assert "content-encoding" not in plain.headers
    assert len(plain.content) > int(longer.headers["content-length"])


@pytest.mark.slow
def test_the_description_names_permissions_and_errors(script: TestClient) -> None:
    """The OpenAPI description has the ways to sign in, the limits of fields and a single error
    format.
    """
    description = script.get("/api/v1/openapi.json").json()
    assert description["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    fields = description["components"]["schemas"]["Submission"]["properties"]
    assert (fields["priority"]["minimum"], fields["priority"]["maximum"]) == (-100, 100)
    assert fields["name"]["maxLength"] == 100
    answers = description["paths"]["/api/v1/runs/{run_id}/cancellation"]["post"]["responses"]
    assert answers.keys() >= {"200", "401", "403", "404", "409", "422"}
    for status in ("401", "404", "422"):
        [(kind, content)] = answers[status]["content"].items()
        assert kind == "application/problem+json"
        assert content["schema"]["$ref"].endswith("/Problem")


def test_an_unknown_version_is_not_found(script: TestClient) -> None:
    """Unknown versions and paths get 404, wrong methods 405."""
    answers = [script.get(path) for path in ("/api/v2/runs", "/api/v1/nothing", "/api/runs")]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert script.delete("/api/v1/runs").status_code == 405
