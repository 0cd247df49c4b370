"""Sweeps of a command: values of its placeholders, and permission to queue it."""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from app.sweeps import search_space, sweep_submission
from db.access import accounts, projects, secrets
from db.access.permissions import MAINTAINER
from db.database import Database
from db.runs import runs
from db.settings import Settings
from db.sweeps import sweeps
from db.tables import CONTROL, SUBMIT, Run, User
from tests.app.conftest import client_of, find_confirmation
from tests.app.sweeps.sweep_submission_made import finish
from tests.marks import looped

SWEEP: dict[str, Any] = {
    "command": {
        "line": "python train.py --lr {lr} --batch {batch} --name '{name}'",
        "folder": "/home/ada/project",
        "parameters": {"lr": {"type": "number", "minimum": 0, "maximum": 1}},
    },
    "config": {"name": "it"},
    "space": {"lr": [0.1, 0.01], "batch": "16, 32"},
}


def make_given(**changes: Any) -> dict[str, Any]:
    """Make the sweep with other fields, also those of its command."""
    command = SWEEP["command"] | changes.pop("command", {})
    return SWEEP | {"command": command} | changes


def rejection(database: Database) -> str | None:
    """Return why the sweep cannot continue."""
    with database.reading() as session:
        return sweeps.get(session, 1).error


def test_a_grid_over_placeholders_is_submitted_as_commands(
    database: Database, script: TestClient
) -> None:
    """A grid submits each point once, named by its differing values; more values add points."""
    begun = script.post("/api/v1/sweeps", json=make_given())
    assert begun.status_code == 201, begun.text
    sweep = begun.json()
    assert (sweep["name"], sweep["recipe"], sweep["runs_total"]) == ("train by lr, batch", "", 4)
    assert sweep["command"]["line"] == SWEEP["command"]["line"]
    assert sweep["command"]["parameters"]["batch"]["type"] == "integer"
    for run_id in (1, 2, 3, 4):
        finish(database, run_id, float(run_id))
        sweep_submission.submit_due(database)
    more = script.post("/api/v1/sweeps/1/extension", json={"space": {"lr": "0.5"}})
    assert more.json()["runs_total"] == 6
    wrong = script.post("/api/v1/sweeps/1/extension", json={"space": {"lr": "2"}}).json()["errors"]
    assert "2 is not valid; allowed: a number from 0 to 1" in wrong["space.lr"]
    with database.reading() as session:
        found = session.scalars(select(Run).order_by(Run.id)).all()
    assert {run.source for run in found} == {"command"}
    assert [(run.name, run.config) for run in found][1] == (
        "lr=0.1, batch=32",
        {"lr": 0.1, "batch": 32, "name": "it"},
    )
    assert (found[4].config["lr"], type(found[4].config["batch"])) == (0.5, int)
    assert found[0].command is not None
    assert found[0].command["folder"] == "/home/ada/project"
    assert script.get("/api/v1/sweeps/1").json()["best"] == 1.0


@pytest.mark.parametrize("kind", ["random", "tpe", "cmaes", "qmc"])
def test_points_are_drawn_for_placeholders(
    database: Database, script: TestClient, kind: str
) -> None:
    """Points drawn for placeholders are within their bounds, and whole numbers stay whole."""
    space = {"lr": "loguniform(1e-4, 0.1)", "batch": "integers(1, 64)"}
    answer = script.post(
        "/api/v1/sweeps", json=make_given(kind=kind, space=space, runs=3, at_once=3)
    )
    assert answer.status_code == 201, answer.text
    with database.reading() as session:
        configs = session.scalars(select(Run.config)).all()
    assert len(configs) == 3
    assert all(1e-4 <= each["lr"] <= 0.1 and type(each["batch"]) is int for each in configs)


@looped(
    "changes, field, message",
    [
        ({"config": {"name": 1 << 2000}}, "config.name", ""),
        ({"kind": "hyperband"}, "kind", "allowed: grid, random, tpe"),
        ({"recipe": "digits"}, "recipe", "'digits' and a command; allowed: one of the two"),
        ({"command": None}, "recipe", "Field required, or a command"),
        ({"space": {"lrr": "1, 2"}}, "space.lrr", "allowed: lr, batch, name"),
        ({"space": {"lr": "0.1, 2"}}, "space.lr", "2 is not valid; allowed: a number"),
        ({"space": {"lr": "1, 1.0"}}, "space.lr", "it has 1 twice"),
        ({"space": {"batch": "uniform(1, 2)"}}, "space.batch", "allowed in a grid: values"),
        ({"space": {}}, "space", "0 settings"),
        ({"space": {"lr": "0.1"}}, "config.batch", "{batch} needs a value"),
        ({"config": {}}, "config.name", "{name} needs a value"),
        ({"config": {"name": "it", "x": 1}}, "config.x", "the line has no placeholder {x}"),
        ({"command": {"line": "python '"}}, "command.line", "no closing quotation"),
        ({"command": {"secrets": ["NONE"]}}, "command.secrets", "no secret 'NONE'"),
        ({"nodes": 2}, "nodes", "2 is not valid; allowed: 1"),
    ],
)
def test_invalid_sweeps_are_rejected_by_field(
    database: Database, script: TestClient, changes: dict[str, Any], field: str, message: str
) -> None:
    """An invalid sweep is rejected with path, value and allowed values, and not created."""
    is_bare = changes == {"command": None}
    body = SWEEP | changes if is_bare else make_given(**changes)
    answer = script.post("/api/v1/sweeps", json=body)
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["errors"][field]
    assert script.get("/api/v1/sweeps").json()["sweeps"] == []


def test_a_placeholder_may_be_called_as_a_field_is(script: TestClient) -> None:
    """Errors in the values of a placeholder named like a field are assigned to the placeholder."""
    body = make_given(
        command={"line": "python train.py {seed} {space}", "parameters": {}}, config={}
    )
    body |= {"space": {"seed": "1..3", "space": "uniform(1, 2)"}}
    errors = script.post("/api/v1/sweeps", json=body).json()["errors"]
    assert list(errors) == ["space.space"]
    body |= {"kind": "random", "runs": 1}
    run = script.post("/api/v1/sweeps", json=body).json()
    assert run["space"] == {"seed": "1, 2, 3", "space": "uniform(1, 2)"}


@looped(
    "tried, kind",
    [
        ("1, 2", {"type": "integer"}),
        ("1, 0.5", {"type": "number"}),
        ([1, 0.5], {"type": "number"}),
        ("1..9 step 2", {"type": "integer"}),
        ("0..1 step 0.5", {"type": "number"}),
        ("integers(1, 3)", {"type": "integer"}),
        ("loguniform(1, 3)", {"type": "number"}),
        ({"distribution": "integers", "low": 1, "high": 2}, {"type": "integer"}),
        ({"values": ["a"]}, {"type": "string"}),
        ("true, false", {"type": "boolean"}),
        ([True, 1], {"type": "string"}),
        ("adam, sgd", {"type": "string", "enum": ["adam", "sgd"]}),
        ([], {"type": "string"}),
        ({"values": 1}, {"type": "integer"}),
    ],
)
def test_an_undeclared_direction_is_that_of_the_tried_values(
    tried: Any, kind: dict[str, Any]
) -> None:
    """The type of an undeclared placeholder follows from its values, as for a single run."""
    assert search_space.guess(tried) == kind


def test_only_who_may_run_commands_has_them_swept(
    app: FastAPI, database: Database, ada: User, script: TestClient
) -> None:
    """The permission to run commands is checked when a sweep is created and at each submission:
    neither a limited token nor another user who controls the project can submit more.
    """
    with database.writing() as session:
        bob = accounts.make_user(session, "bob")
        projects.make(session, "vision")
        projects.set_role(session, bob, "vision", MAINTAINER)
    client = client_of(app, database, bob)
    body = make_given(project="vision")
    refused = client.post("/api/v1/sweeps", json=body)
    assert refused.status_code == 422
    assert "require a separate permission" in refused.json()["errors"]["command"]
    limited = client_of(app, database, ada, kind=SUBMIT)
    refused = limited.post("/api/v1/sweeps", json=body).json()["errors"]["command"]
    assert "this token cannot queue command lines" in refused
    assert script.post("/api/v1/sweeps", json=body).status_code == 201
    steering = client_of(app, database, ada, kind=CONTROL)
    for each, text in ((client, "separate permission"), (steering, "this token cannot queue")):
        for word, asked in (("extension", {"space": {"lr": [0.7]}}), ("resumption", {})):
            each.post("/api/v1/sweeps/1/pause")
            answer = each.post(f"/api/v1/sweeps/1/{word}", json=asked)
            assert answer.status_code == 422
            assert text in answer.json()["errors"]["command"]
    assert script.post("/api/v1/sweeps/1/resumption").json()["status"] == "running"
    assert script.get("/api/v1/sweeps/1").json()["submitted"] == 1


def test_it_stops_once_its_owner_may_run_no_commands(
    app: FastAPI, database: Database, ada: User
) -> None:
    """A sweep stops if its owner may not run commands any more, and continues once they may."""
    with database.writing() as session:
        bob = accounts.make_user(session, "bob")
        projects.make(session, "vision")
        projects.set_role(session, bob, "vision", MAINTAINER)
        bob.runs_commands = True
    client = client_of(app, database, bob)
    assert client.post("/api/v1/sweeps", json=make_given(project="vision")).status_code == 201
    with database.writing() as session:
        session.get_one(User, bob.id).runs_commands = False
    finish(database, 1)
    sweep_submission.submit_due(database)
    assert client.get("/api/v1/sweeps/1").json()["status"] == "failed"
    assert "require a separate permission" in str(rejection(database))
    with database.writing() as session:
        session.get_one(User, bob.id).runs_commands = True
    assert client.post("/api/v1/sweeps/1/resumption").json()["submitted"] == 2


def test_each_submission_requests_its_secrets(
    database: Database, settings: Settings, ada: User, script: TestClient
) -> None:
    """A sweep stores only the names of secrets; it stops if one is deleted, and shows no value."""
    settings.data.mkdir()
    with database.writing() as session:
        secrets.put(session, settings.secrets_key, ada, "API_KEY", "open-sesame")
    begun = script.post("/api/v1/sweeps", json=make_given(command={"secrets": ["API_KEY"]}))
    assert begun.json()["command"]["secrets"] == ["API_KEY"]
    assert "open-sesame" not in begun.text
    with database.reading() as session:
        command = runs.get(session, 1).command
    assert command is not None
    assert command["secrets"] == ["API_KEY"]
    assert script.delete("/api/v1/secrets/API_KEY").status_code == 204
    finish(database, 1)
    sweep_submission.submit_due(database)
    assert "there is no secret 'API_KEY'" in str(rejection(database))


def test_its_page_shows_the_command(browser: TestClient) -> None:
    """The page has the escaped command line, and the values that all runs of the sweep share."""
    line = "python train.py {lr} {name} '<script>alert(1)</script>'"
    body = make_given(command={"line": line}, config={"name": "</dd><b>"}, space={"lr": "0.1, 0.2"})
    browser.post("/api/v1/sweeps", json=body)
    page = browser.get("/sweeps/1").text
    assert '<p class="command"><code>$ python train.py {lr} {name}' in page
    assert "<script>alert(1)" not in page
    assert "</dd><b>" not in page
    assert "<dt>name</dt>" in page
    assert '<td class="number steps">0</td>' in page
    assert "· command · grid" in browser.get("/sweeps").text


FORM = {
    "command.line": "python train.py {lr} {batch} {opt} {name}",
    "command.folder": "/home/ada",
    "command.variables": "A=b",
    "parameter.lr.kind": "number",
    "parameter.lr.value": "0.1, 0.01",
    "parameter.lr.maximum": "1",
    "parameter.batch.kind": "number",
    "parameter.batch.value": "16, 32",
    "parameter.opt.kind": "choice",
    "parameter.opt.value": "sgd",
    "parameter.opt.choices": "adam, sgd",
    "parameter.name.kind": "string",
    "parameter.name.value": "a, b",
    "kind": "grid",
    "runs": "",
    "at_once": "2",
    "metric": "val/loss",
    "goal": "",
    "seed": "0",
    "priority": "0",
    "devices_per_node": "1",
}


def test_the_form_of_a_command_becomes_a_sweeps(browser: TestClient) -> None:
    """A command's form becomes a sweep's with the entered values; numbers and choices are searched,
    a text is one value, the runs are counted before they are queued, and a repeated request creates
    one sweep.
    """
    assert 'href="/sweeps/new/command" data-to-sweep' in browser.get("/runs/new/command").text
    page = browser.post("/sweeps/new/command", data=FORM | {"tags": "t"}).text
    key = re.findall(r'name="key" value="(\w+)"', page)[0]
    assert re.findall(r'searched"><span>Values</span><input name="(.+?)"', page) == [
        "parameter.lr.value",
        "parameter.batch.value",
    ]
    assert 'name="parameter.lr.value" value="0.1, 0.01"' in page
    assert 'name="tags" value="t"' in page
    counted = browser.post("/sweeps/command", data=FORM | {"key": key}).text
    assert "This queues <b>4 runs</b>, 2 at once" in counted
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []
    confirmed = {"confirmed": find_confirmation(counted), "key": key}
    for _ in range(2):
        begun = browser.post("/sweeps/command", data=FORM | confirmed)
        assert begun.headers["location"] == "/sweeps/1", begun.text
    sweep = browser.get("/api/v1/sweeps/1").json()
    assert sweep["space"] == {"lr": "0.1, 0.01", "batch": "16, 32"}
    assert sweep["command"]["variables"] == {"A": "b"}
    config = browser.get("/api/v1/runs/1/config").json()
    assert config == {"lr": 0.1, "batch": 16, "opt": "sgd", "name": "a, b"}
    assert type(config["batch"]) is int


@looped(
    "changes, path, message",
    [
        (
            {"parameter.lr.value": "0.1, 2"},
            "config.lr",
            "2 is not valid; allowed: a number of at most 1",
        ),
        ({"parameter.batch.value": "16, x"}, "config.batch", "x is not valid; allowed: a number"),
        ({"parameter.opt.value": "lion"}, "config.opt", "one of adam, sgd"),
        ({"parameter.lr.maximum": "much"}, "config.lr", "allowed: a number"),
        ({"command.variables": "A"}, "command.variables", "allowed: NAME=value"),
        ({"runs": "many"}, "runs", "many is not valid; allowed: a whole number"),
        ({"at_once": ""}, "at_once", "it is empty; allowed: a whole number"),
        ({"kind": "hyperband"}, "kind", "allowed: grid, random, tpe"),
    ],
)
def test_mistakes_appear_at_their_fields(
    browser: TestClient, changes: dict[str, str], path: str, message: str
) -> None:
    """The form is shown again with the entered values and the errors, and no sweep is created."""
    answer = browser.post("/sweeps/command", data=FORM | changes)
    assert answer.status_code == 422
    assert f'<a href="#{path}">' in answer.text
    assert message in answer.text.replace("&#39;", "'")
    assert 'value="val/loss"' in answer.text
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []
