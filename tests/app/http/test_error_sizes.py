"""Responses to invalid requests have a bounded size, whatever is sent."""

import json
from typing import Any

import httpx2
from starlette.testclient import TestClient

from db.errors import Invalid
from db.tables import Run
from halfstep import field_errors
from halfstep.api_client.responses import error_of
from halfstep.field_errors import FURTHER, LONGEST_MESSAGE, LONGEST_PATH, MOST_FIELDS, bound
from tests.marks import looped

#: Names of settings that no recipe has: more than an answer may have bytes for.
UNKNOWN = {f"setting{number}": number for number in range(4000)}
LONG = {"n" * 200_000: 1, "m" * 200_000: 2}
WATCHED = {"id": "0" * 32, "name": "w"}
BODIES: dict[str, tuple[str, str, Any]] = {
    "settings": ("POST", "runs", {"recipe": "digits", "config": UNKNOWN}),
    "settings of a group": ("POST", "runs", {"recipe": "digits", "config": {"training": UNKNOWN}}),
    "long names": ("POST", "runs", {"recipe": "digits", "config": LONG}),
    "fields": ("POST", "runs", UNKNOWN),
    "long fields": ("POST", "runs", LONG),
    "a long recipe": ("POST", "runs", {"recipe": "r" * 800_000}),
    "a long project": ("POST", "runs", {"recipe": "digits", "project": "p" * 800_000}),
    "sweep": ("POST", "sweeps", {"recipe": "digits", "config": UNKNOWN, "space": {}}),
    "space": ("POST", "sweeps", {"recipe": "digits", "space": dict.fromkeys(UNKNOWN, "1, 2")}),
    "preset": ("POST", "presets", {"name": "p", "recipe": "digits", "config": UNKNOWN}),
    "watched run": ("POST", "ingest", WATCHED | {"tags": [["x"]] * 4000}),
    "texts that cannot be stored": (
        "POST",
        "ingest",
        WATCHED | {"config": dict.fromkeys(UNKNOWN, "\0")},
    ),
    "versions": ("POST", "ingest", WATCHED | {"versions": UNKNOWN}),
    "bulk": ("POST", "runs/bulk", {"action": "cancel", "runs": ["x"] * 4000}),
    "end": ("POST", "ingest/1/1/end", {"status": "x" * 800_000, "step": []}),
}


@looped("name", BODIES)
def test_an_answer_to_an_invalid_body_is_short(running: Run, script: TestClient, name: str) -> None:
    """The number and the length of the error messages for an invalid body are bounded."""
    method, path, body = BODIES[name]
    answer = script.request(method, f"/api/v1/{path}", json=body)
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert len(answer.content) < 30_000
    assert len(answer.json().get("errors") or {}) <= MOST_FIELDS + 1


@looped("path", ["runs/new", "sweeps/new", "runs/new/command", "sweeps/command"])
def test_a_page_for_an_invalid_form_is_short(running: Run, browser: TestClient, path: str) -> None:
    """The page of an invalid form does not show fields that the form does not have."""
    form = {f"training.setting{number}": "x" for number in range(900)}
    usual = browser.post(f"/{path}", data={"recipe": "digits"})
    answer = browser.post(f"/{path}", data={"recipe": "digits", **form, "n" * 300_000: "1"})
    assert answer.status_code in (usual.status_code, 403, 422)
    assert len(answer.content) < len(usual.content) + 50_000


def test_only_first_errors_are_reported() -> None:
    """Errors beyond the first ones are only counted, and applying the limit twice is harmless."""
    many = {f"{number}{'p' * 500}": "t" * 5000 for number in range(1000)}
    few = bound(many)
    assert list(few)[-1] == FURTHER
    assert few[FURTHER] == "980 more fields are not allowed"
    assert len(few) == MOST_FIELDS + 1
    assert {len(path) for path in few if path != FURTHER} == {LONGEST_PATH}
    assert {len(text) for path, text in few.items() if path != FURTHER} == {LONGEST_MESSAGE}
    assert bound(few) == few == Invalid(few).errors
    small = {"a": "b", "c": "d"}
    assert (bound(small), str(Invalid(small))) == (small, "a: b; c: d")


def test_the_client_reports_a_part_of_an_older_servers_errors() -> None:
    """The client shortens the errors of an older server, which sends all of them."""
    body = {"detail": "x", "errors": dict.fromkeys(UNKNOWN, "unknown field")}
    answer = httpx2.Response(422, content=json.dumps(body).encode())
    error = error_of(answer)
    assert len(str(error)) <= field_errors.LONGEST_SUMMARY
    assert len(error.errors) == MOST_FIELDS + 1
