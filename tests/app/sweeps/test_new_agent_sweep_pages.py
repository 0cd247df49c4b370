"""The form of a sweep for agents."""

import re

import pytest
from starlette.testclient import TestClient

from app.sweeps.new_agent_sweep_pages import _read
from db.errors import Invalid
from tests.app.conftest import find_confirmation
from tests.marks import looped

FORM = {
    "settings": "lr = 0.1, 0.01\n\n size=16..64 step 16 \nname = adam\nepochs = 10\n fused=true",
    "kind": "grid",
    "runs": "",
    "metric": "score",
    "goal": "maximise",
    "seed": "0",
    "project": "",
}


def test_a_sweep_for_agents_is_counted_then_begun(browser: TestClient) -> None:
    """Lists and ranges are searched, other values are common to all runs; a repeated request
    creates one sweep, and its page shows the agents' command.
    """
    page = browser.get("/sweeps/new/agents").text
    assert 'href="/sweeps/new">Workers' in page
    assert '<option value="hyperband">' in page
    assert 'name="at_once"' not in page
    key = re.findall(r'name="key" value="(\w+)"', page)[0]
    counted = browser.post("/sweeps/agents", data=FORM | {"key": key}).text
    assert "This offers <b>8 runs</b>." in counted
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []
    confirmed = {"confirmed": find_confirmation(counted), "key": key}
    for _ in range(2):
        begun = browser.post("/sweeps/agents", data=FORM | confirmed)
        assert begun.headers["location"] == "/sweeps/1", begun.text
    sweep = browser.get("/api/v1/sweeps/1").json()
    assert sweep["source"] == "script"
    assert sweep["space"] == {"lr": "0.1, 0.01", "size": "16, 32, 48, 64"}
    assert sweep["config"] == {"name": "adam", "epochs": 10, "fused": True}
    shown = browser.get("/sweeps/1").text
    assert "halfstep agent 1 -- python train.py" in shown
    assert "No agent is running." in shown
    assert "differ from the default" not in shown  # only a recipe has defaults


def test_the_form_offers_agents_without_a_recipe(browser: TestClient) -> None:
    """Without recipes the form links to the one for agents, which need no worker."""
    page = browser.get("/sweeps/new").text
    assert "No recipes yet" in page
    assert 'href="/sweeps/new/agents"' in page
    assert 'href="/sweeps/new/agents"' in browser.get("/sweeps/new/command").text


@looped(
    "changes, field, message",
    [
        ({"settings": ""}, "settings", "0 settings are searched; allowed: 1 to 20"),
        ({"settings": "lr = 0.1"}, "settings", "0 settings are searched; allowed: 1 to 20"),
        ({"settings": "lr"}, "settings", "lr is not valid; allowed: name = values"),
        ({"settings": "= 1, 2"}, "settings", "= 1, 2 is not valid; allowed: name = values"),
        ({"settings": "a = 1, 2\na = 3"}, "settings", "a has two lines; allowed: one"),
        (
            {"settings": "a = uniform(0, 1)"},
            "settings",
            "has infinitely many values; allowed in a grid",
        ),
        ({"settings": "a = uniform(1, 0)", "kind": "random"}, "settings", "a: "),
        (
            {"settings": "a = 1, 2\nb = inf"},
            "settings",
            "b: inf is not valid; allowed: finite numbers",
        ),
        ({"settings": "a = 1, nan"}, "settings", "a: "),
        ({"settings": f"{'a' * 300} = 1, 2"}, "settings", "a name of at most 200 characters"),
        ({"settings": "a = 1..2000"}, "settings", "allowed: "),
        ({"runs": "many"}, "runs", "many is not valid; allowed: a whole number"),
        ({"kind": "hyperband"}, "kind", "allowed: grid, random, tpe"),
        ({"goal": ""}, "goal", "allowed: minimize or maximize"),
    ],
)
def test_errors_stand_at_their_fields(
    browser: TestClient, changes: dict[str, str], field: str, message: str
) -> None:
    """The form is shown again with the errors and the entered values; no sweep is created."""
    answer = browser.post("/sweeps/agents", data=FORM | changes)
    assert answer.status_code == 422
    assert f'<a href="#{field}">' in answer.text
    assert f'id="{field}-error"' in answer.text
    assert message in answer.text
    assert 'value="score"' in answer.text
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []


@looped(
    "text, value",
    [
        ("True", True),
        ("TRUE", True),
        ("false", False),
        ("[0.9, 0.999]", [0.9, 0.999]),
        ('{"a": [1, "x, y"]}', {"a": [1, "x, y"]}),
        ('"a, b"', "a, b"),
        ("adam", "adam"),
        ("1e3", 1000.0),
    ],
)
def test_one_value_is_the_same_in_all_runs(text: str, value: object) -> None:
    """A fixed value may also be a list, an object or a text with a comma, written as JSON."""
    assert _read(f"a = {text}\nlr = 0.1, 0.2") == ({"a": value}, {"lr": "0.1, 0.2"})


@looped("text", ["[1,2], [3,4]", "'a', 'b'", "[" * 9000, '"a", "b"'])
def test_values_that_look_like_json_and_are_not_are_rejected(text: str) -> None:
    """Invalid JSON is rejected instead of being split at its commas."""
    with pytest.raises(Invalid) as rejected:
        _read(f"a = {text}")
    assert set(rejected.value.errors) == {"settings"}


@pytest.mark.sql
@looped(
    "field, text",
    [
        ("settings", "a = [1, 1e999]"),
        ("settings", "a = [NaN]"),
        ("settings", 'a = {"b": "\\u0000"}'),
        ("settings", "a = [1" + "0" * 400 + "]"),
        ("settings", "a = " + "[" * 500 + "]" * 500),
        ("priority", "9" * 20),
        ("nodes", "9" * 20),
        ("seed", "9" * 20),
    ],
)
def test_what_a_database_cannot_store_is_rejected(
    browser: TestClient, field: str, text: str
) -> None:
    """Values that a database cannot store are rejected with the field, and no row is written."""
    settings = "lr = 0.1, 0.2"
    data = FORM | {"settings": settings}
    data[field] = f"{settings}\n{text}" if field == "settings" else text
    answer = browser.post("/sweeps/agents", data=data, follow_redirects=False)
    assert answer.status_code == 422
    assert browser.get("/api/v1/sweeps").json()["sweeps"] == []


@pytest.mark.sql
@looped("number", ["1e999", "-1e999", "NaN"])
def test_a_nested_number_that_is_not_finite_is_named(script: TestClient, number: str) -> None:
    """The error for a nested non-finite number names its field, also by the API."""
    body = '{"space": {"lr": [0.1, 0.2]}, "config": {"betas": [0.9, NUMBER]}}'
    headers = {"Content-Type": "application/json"}
    answer = script.post(
        "/api/v1/sweeps/agents", content=body.replace("NUMBER", number), headers=headers
    )
    assert answer.status_code == 422
    assert "betas.1" in str(answer.json()["errors"])
