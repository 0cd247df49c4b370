"""Commands by the API, forms and pages."""

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from db.access import accounts, projects, secrets
from db.database import Database
from db.queue import claims, queue, workers
from db.runs import config_values, runs
from db.settings import Settings
from db.tables import Status, User
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import CPU, DIGITS
from tests.marks import looped

COMMAND: dict[str, Any] = {
    "line": "python train.py --lr {lr} --name '{name}'",
    "folder": "/home/ada/project",
    "variables": {"COLOUR": "blue"},
    "parameters": {"lr": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.1}},
}


@pytest.fixture
def key(database: Database, settings: Settings, ada: User) -> None:
    """A secret API_KEY with the value open-sesame."""
    settings.data.mkdir()
    with database.writing() as session:
        secrets.put(session, settings.secrets_key, ada, "API_KEY", "open-sesame")


@pytest.fixture
def commanded(database: Database) -> None:
    """A worker that is up and offers digits and commands."""
    offer: dict[str, Any] = {"devices": [CPU], "recipes": [DIGITS], "versions": {"torch": "2"}}
    with database.writing() as session:
        workers.register(session, name="w1", host="h", pid=1, offers_commands=True, **offer)


def test_a_command_is_queued_and_comes_back_as_it_was_submitted(
    key: None, script: TestClient
) -> None:
    """Missing parameters get their default; an undeclared one has the type of its value."""
    command = COMMAND | {"secrets": ["API_KEY"]}
    answer = script.post("/api/v1/runs", json={"command": command, "config": {"name": "it"}})
    assert answer.status_code == 201, answer.text
    run = answer.json()
    assert (run["name"], run["source"], run["recipe"]) == ("train", "command", "")
    assert run["waiting"] == "no worker reports at the moment"
    found = script.get(f"/api/v1/runs/{run['id']}")
    assert found.json()["config"] == {"lr": 0.1, "name": "it"}
    assert found.json()["command"]["secrets"] == ["API_KEY"]
    assert found.json()["command"]["parameters"]["name"]["type"] == "string"
    again = {"command": found.json()["command"], "config": {"name": "other", "lr": 1}}
    assert script.post("/api/v1/runs", json=again).json()["name"] == "train"
    assert "open-sesame" not in found.text


def test_who_may_not_submit_commands_is_not_offered_any(
    app: FastAPI, database: Database, ada: User, commanded: None
) -> None:
    """Neither cards nor palette offer commands to a user without the permission to submit them."""
    with database.writing() as session:
        bob = accounts.make_user(session, "bob")
        projects.set_role(session, bob, projects.DEFAULT, "member")
    browser = browser_of(app, database, bob)
    for is_allowed in (False, True):
        with database.writing() as session:
            session.get_one(User, bob.id).runs_commands = is_allowed
        for address in ("/runs/new", "/sweeps/new"):
            assert ('/new/command"' in browser.get(address).text) is is_allowed


@looped(
    "changes, field, message",
    [
        ({"line": ""}, "command.line", "it is empty"),
        ({"line": "python 'a"}, "command.line", "cannot be split into arguments: no closing"),
        ({"line": "{program} a"}, "command.line", "one without a placeholder"),
        ({"line": "a " + "{x}" * 9 + "b" * 10_000}, "command.line", "at most 10,000"),
        ({"line": " ".join(f"{{a{n}}}" for n in range(60))}, "command.line", "placeholder"),
        ({"line": "a {" + "x" * 60 + "}"}, "command.line", "names of at most 50"),
        ({"line": "a\0"}, "command.line", "cannot be stored"),
        ({"folder": "project"}, "command.folder", "allowed: an absolute path"),
        ({"venv": ".venv"}, "command.venv", "allowed: an absolute path"),
        ({"git": "git@host:it"}, "command.git", "without a user or a password"),
        ({"git": "https://ada:sesame@host/it"}, "command.git", "without a user or a password"),
        ({"git": "ext::sh -c true"}, "command.git", "https://… or file://…"),
        ({"git": "--upload-pack=true"}, "command.git", "https://… or file://…"),
        ({"git": "https://host/it", "commit": "main"}, "command.commit", "a commit's hash"),
        ({"commit": "abcdef0"}, "command.commit", "has no effect without git"),
        (
            {"git": "https://host/it", "commit": "abcdef0", "folder": "../it"},
            "command.folder",
            "a folder of the repository",
        ),
        ({"variables": {"A B": ""}}, "command.variables.A B", "not a digit first"),
        ({"variables": {"HALFSTEP_RUN_FOLDER": "/"}}, None, "the worker sets it"),
        ({"variables": {"A": "x" * 10_001}}, "command.variables.A", "10,000"),
        ({"secrets": ["NONE"]}, "command.secrets", "no secret 'NONE'; allowed: none"),
        ({"parameters": {"other": {}}}, "command.parameters.other", "no placeholder {other}"),
        ({"parameters": {"lr": {"minimum": 0}}}, "command.parameters.lr", "has no bounds"),
        ({"parameters": {"lr": {"type": "number", "minimum": 2, "maximum": 1}}}, None, "bounds"),
        ({"parameters": {"lr": {"type": "number", "enum": ["a"]}}}, None, "has no choices"),
        ({"parameters": {"lr": {"enum": []}}}, "command.parameters.lr", "1 to 100"),
        ({"parameters": {"lr": {"enum": ["a"], "default": "b"}}}, None, "one of a"),
        ({"parameters": {"lr": {"type": "list"}}}, "command.parameters.lr.type", "'number'"),
        ({"shell": True}, "command.shell", "unknown field"),
    ],
)
def test_invalid_commands_are_rejected_by_field(
    script: TestClient, changes: dict[str, Any], field: str | None, message: str
) -> None:
    """Errors of an invalid command have path, value and allowed values."""
    body = {"command": COMMAND | changes, "config": {"name": "it"}}
    answer = script.post("/api/v1/runs", json=body)
    assert answer.status_code == 422, answer.text
    errors = answer.json()["errors"]
    assert message in errors[field] if field else message in str(errors)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, "config.lr: 2 is not valid; allowed: a number from 0 to 1"),
        ("much", "config.lr: much is not valid; allowed: a number"),
        (True, "config.lr: True is not valid; allowed: a number"),
        ("$(reboot)", "config.lr: $(reboot) is not valid; allowed: a number"),
    ],
)
def test_a_value_is_what_its_parameter_allows(script: TestClient, value: Any, message: str) -> None:
    """A parameter's value must match its schema, as a recipe's configuration must."""
    body = {"command": COMMAND, "config": {"lr": value, "name": "it"}}
    assert message in script.post("/api/v1/runs", json=body).json()["detail"]


def test_other_things_that_a_command_is_not(script: TestClient, offered: None) -> None:
    """A command with a recipe, a parent checkpoint, or ranks without torchrun is rejected."""
    for body, message in (
        ({"recipe": "digits", "command": {"line": "true"}}, "allowed: one of the two"),
        ({"command": {"line": "true"}, "parent_id": 1}, "cannot start from a checkpoint"),
        ({"command": {"line": "true"}, "devices_per_node": 2}, "allowed: python SCRIPT"),
        (
            {"command": {"line": "a"}, "config": {"b": 1}},
            "the line has no placeholder {b}; allowed: none",
        ),
        ({"command": {"line": "a {b}"}}, "config.b: the placeholder {b} needs a value"),
    ):
        answer = script.post("/api/v1/runs", json=body)
        assert (answer.status_code, message in answer.text) == (422, True), answer.text
    body = {"command": {"line": "python -m it.train"}, "devices_per_node": 2}
    assert script.post("/api/v1/runs", json=body).json()["name"] == "it.train"


FORM = {
    "command.line": "python train.py {lr} {steps} {opt} {amp}",
    "parameter.lr.kind": "number",
    "parameter.lr.value": "1e-3",
    "parameter.lr.maximum": "1",
    "parameter.steps.kind": "integer",
    "parameter.steps.value": "10",
    "parameter.opt.kind": "choice",
    "parameter.opt.value": "sgd",
    "parameter.opt.choices": "adam, sgd",
    "parameter.amp.kind": "boolean",
    "parameter.amp.value": "true",
    "command.variables": "A=b=c\r\n\r\nD=",
    "name": "kept",
    "devices_per_node": "1",
}


def test_the_form_queues_a_command_and_a_clone_has_what_it_had(
    key: None, commanded: None, database: Database, browser: TestClient
) -> None:
    """The form has each placeholder with its kind, value and bounds; a clone has the command's
    values and selected secrets.
    """
    assert "/runs/new/command" in browser.get("/runs/new").text
    answer = browser.post("/runs/new/command", data=FORM | {"command.secrets": "API_KEY"})
    assert (answer.status_code, answer.headers.get("location")) == (303, "/runs/1"), answer.text
    with database.reading() as session:
        run = runs.get(session, 1)
    assert run.config == {"lr": 0.001, "steps": 10, "opt": "sgd", "amp": True}
    assert run.command is not None
    assert run.command["variables"] == {"A": "b=c", "D": ""}
    assert run.command["parameters"]["opt"]["enum"] == ["adam", "sgd"]
    answer = browser.get("/runs/new", params={"from": 1})
    assert answer.headers["location"] == "/runs/new/command?from=1"
    form = browser.get(answer.headers["location"]).text
    for text in ('name="parameter.lr.value" value="0.001"', 'value="API_KEY" checked', "A=b=c"):
        assert text in form
    assert "open-sesame" not in form


@looped(
    "changes, path, message",
    [
        (
            {"parameter.lr.value": "2"},
            "config.lr",
            "2 is not valid; allowed: a number of at most 1",
        ),
        ({"parameter.lr.value": "9" * 5000}, "config.lr", "allowed: a number"),
        ({"parameter.lr.value": ""}, "config.lr", "{lr} is empty; enter a number of at most 1"),
        ({"parameter.lr.maximum": "much"}, "config.lr", "'much'; allowed: a number"),
        ({"parameter.lr.maximum": "inf"}, "config.lr", "finite"),
        ({"parameter.opt.choices": ""}, "config.opt", "1 to 100"),
        (
            {"parameter.amp.value": "maybe"},
            "config.amp",
            "maybe is not valid; allowed: true or false",
        ),
        ({"command.variables": "A"}, "command.variables", "allowed: NAME=value"),
        ({"command.line": "python '"}, "command.line", "no closing quotation"),
        ({"command.secrets": "NONE"}, "command.secrets", "no secret"),
        ({"priority": "high"}, "priority", "allowed: a whole number"),
    ],
)
def test_errors_appear_at_their_fields_and_input_is_preserved(
    commanded: None,
    database: Database,
    browser: TestClient,
    changes: dict[str, str],
    path: str,
    message: str,
) -> None:
    """An invalid command form is shown again with its input and errors; nothing is queued."""
    answer = browser.post("/runs/new/command", data=FORM | changes)
    assert answer.status_code == 422
    assert f'<a href="#{path}">' in answer.text
    assert message in answer.text.replace("&#39;", "'")
    assert 'value="kept"' in answer.text
    with database.reading() as session:
        assert runs.newest(session) == []


def test_the_page_shows_the_command_without_secrets(
    key: None, commanded: None, database: Database, browser: TestClient
) -> None:
    """The page of a command escapes hostile text, and has no buttons of a recipe's loop."""
    line = "python train.py '{name}' '<script>alert(1)</script>'"
    command = {"line": line, "git": "https://host/it", "commit": "abcdef0", "secrets": ["API_KEY"]}
    body = {"command": command, "config": {"name": "</code><b>"}}
    browser.post("/api/v1/runs", json=body)
    page = browser.get("/runs/1").text
    for text in (
        "abcdef0",
        "https://host/it",
        "API_KEY",
        "A worker is about to take it",
        ">Clone<",
        ">Pause<",
    ):
        assert text in page
    assert "<script>alert(1)" not in page
    assert "</code><b>" not in page
    assert "open-sesame" not in page
    for text in ("Checkpoint now", "Compare precisions", "Set scale"):
        assert text not in page
    assert browser.get("/runs").text.count("command") > 0
    with database.writing() as session:
        options = {"recipes": [], "precisions": [], "free_devices": [0], "lease_seconds": 60.0}
        run = claims.claim(session, 1, commands=True, **options)
        assert run is not None
        queue.start(session, run.id, 1)
    answer = browser.post("/api/v1/runs/1/pause")
    assert answer.status_code == 409
    assert "it would restart; it can be cancelled" in answer.json()["detail"]
    assert browser.post("/runs/1/comparison").status_code == 409
    assert browser.post("/runs/1/cancellation").status_code == 303
    with database.reading() as session:
        assert runs.get(session, 1).status == Status.STOPPING
    assert "Force stop" in browser.get("/runs/1").text


def test_configuration_of_the_script_and_parameters_of_the_command(
    commanded: None, database: Database, browser: TestClient
) -> None:
    """Page, comparison and filter show the script's configuration and the command's parameters; a
    resubmission uses the parameters.
    """
    for lr, width in ((0.1, 8), (0.2, 16)):
        given = {"command": COMMAND, "config": {"lr": lr, "name": "it"}}
        run_id = browser.post("/api/v1/runs", json=given).json()["id"]
        result = {"lr": "adaptive", "model": {"width": width, "act": "<b>"}}
        with database.writing() as session:
            config_values.note_script(session, runs.get(session, run_id), result)
    page = browser.get("/runs/1").text
    assert "<code>model.width</code>" in page
    assert '<code>model.act</code></td><td data-called="value"><b>&lt;b&gt;</b>' in page
    whole = {"lr": 0.1, "name": "it", "model": {"width": 8, "act": "<b>"}}
    assert browser.get("/api/v1/runs/1").json()["config"] == whole
    assert browser.get("/api/v1/runs/1/config").json() == {"lr": 0.1, "name": "it"}
    found = browser.get("/api/v1/runs", params={"filter": "model.width=16"}).json()
    assert [each["id"] for each in found["runs"]] == [2]
    found = browser.get("/api/v1/comparison", params={"runs": "1,2"}).json()
    assert found["differences"] == {"lr": [0.1, 0.2], "model.width": [8, 16]}


def test_secrets_are_set_listed_and_deleted_and_never_shown(
    settings: Settings, browser: TestClient, script: TestClient
) -> None:
    """Page and API set and delete secrets; neither shows a value, even a rejected one."""
    settings.data.mkdir()
    form = {"name": "KEY_A", "value": "open-sesame\r\nsecond line"}
    assert browser.post("/secrets", data=form).status_code == 303
    assert script.put("/api/v1/secrets/KEY_B", json={"value": "open-sesame"}).status_code == 204
    refused = browser.post("/secrets", data={"name": "KEY_C", "value": "sesame"})
    assert (refused.status_code, "8 to 10,000" in refused.text) == (422, True)
    wrong = script.put("/api/v1/secrets/1", json={"value": "open-sesame"})
    assert wrong.status_code == 422
    listed = script.get("/api/v1/secrets")
    rows = listed.json()["secrets"]
    assert [(row["name"], row["user"]) for row in rows] == [("KEY_A", "ada"), ("KEY_B", "ada")]
    for after, name, further in (("", "KEY_A", "1"), ("1", "KEY_B", None)):
        part = script.get("/api/v1/secrets", params={"limit": 1, "after": after}).json()
        result = [row["name"] for row in part["secrets"]], part["total"], part["next"]
        assert result == ([name], 2, further)
    assert script.get("/api/v1/secrets", params={"after": "KEY_A"}).status_code == 422
    page = browser.get("/secrets")
    assert "KEY_A" in page.text
    for answer in (listed, page, refused, wrong):
        assert "sesame" not in answer.text
    assert browser.post("/secrets/KEY_A/deletion").status_code == 303
    assert script.delete("/api/v1/secrets/KEY_B").status_code == 204
    assert script.delete("/api/v1/secrets/KEY_B").status_code == 404
    assert script.get("/api/v1/secrets").json() == {"secrets": [], "total": 0, "next": None}


def test_an_invalid_key_is_named(settings: Settings, script: TestClient) -> None:
    """The error for an invalid encryption key names its file, so that an admin can repair it."""
    settings.data.mkdir()
    settings.secrets_key.write_text("no key")
    answer = script.put("/api/v1/secrets/KEY", json={"value": "open-sesame"})
    assert answer.status_code == 500
    assert "HALFSTEP_SECRETS_KEY_FILE" in answer.json()["detail"]
