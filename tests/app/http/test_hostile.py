"""Deliberately malformed input gets an error that names the problem, never a 500."""

import hashlib
import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.files import artifacts
from db.tables import Run, User
from tests.app.conftest import submit
from tests.app.uploading import Uploader, write_token
from tests.marks import looped
from tests.spool_made import artifact_of

ZEROS = "0" * 5000
CODE = HTTPStatus(413).name.lower()  # Python 3.13 calls it by its new name
FIELDS = {"recipe": "digits", "precision": "fp16", "priority": "0", "devices_per_node": "1"}


@pytest.mark.parametrize("path", ["/runs", "/api/v1/runs"])
def test_a_filter_is_bounded(browser: TestClient, path: str) -> None:
    """A filter has at most 1,000 characters; SQLite would reject a pattern of 50,000 bytes."""
    assert browser.get(path, params={"filter": "_" * 1000}).status_code == 200
    answer = browser.get(path, params={"filter": "_" * 26_000})
    assert answer.status_code == 422
    assert "it has 26,000 characters; allowed: at most 1000" in answer.text


@looped("digits", [ZEROS, "9" * 400, "9" * 5000, f"{ZEROS}7", "1e400", "²"])
@looped(
    "field", ["training.steps", "training.max_grad_norm", "priority", "after_id", "parent_step"]
)
def test_a_form_states_the_range_of_a_number(
    offered: None, browser: TestClient, field: str, digits: str
) -> None:
    """A number with any number of digits is accepted or rejected, never a server error."""
    answer = browser.post("/runs", data=FIELDS | {"training.steps": "5", field: digits})
    assert answer.status_code in (303, 422)


@looped(
    "path, form",
    [
        ("runs/1/priority", {"priority": ZEROS}),
        ("runs/1/replays", {"step": "9" * 5000}),
        ("runs/1/scale", {"scale": "9" * 5000}),
        ("runs/cancellation", {"run": "9" * 5000}),
        ("sign-in", {"name": "n" * 5000, "password": "p" * 5000}),
        ("account/tokens", {"name": "n" * 5000}),
    ],
)
def test_a_form_field_of_any_length_is_answered(
    running: Run, browser: TestClient, path: str, form: dict[str, str]
) -> None:
    """Buttons and small forms answer an overlong field by a client error."""
    assert 400 <= browser.post(f"/{path}", data=form).status_code < 500


@pytest.mark.sql
@looped(
    "path, body",
    [
        ("runs/1/replays", b'{"step": %s}' % (b"9" * 401)),
        ("runs/1/replays", b'{"step": %s}' % (b"9" * 5000)),
        ("runs/1/scale", b'{"scale": %s}' % (b"9" * 401)),
        ("runs/1/scale", b'{"scale": NaN}'),
        ("runs", b'{"recipe": "digits", "priority": %s}' % (b"9" * 401)),
        ("runs", b'{"recipe": "digits", "config": %s}' % (b"[" * 50_000)),
        ("runs", b'{"recipe": "digits", "config": {"a": %s}}' % (b"9" * 5000)),
        ("runs", b'{"recipe": "%s"}' % (b"r" * 50_000)),
    ],
)
def test_a_number_of_any_length_is_answered(
    running: Run, script: TestClient, path: str, body: bytes
) -> None:
    """JSON numbers that Python or PostgreSQL cannot represent are answered without a server
    error.
    """
    headers = {"content-type": "application/json"}
    assert 400 <= script.post(f"/api/v1/{path}", content=body, headers=headers).status_code < 500


@pytest.mark.parametrize("path", ["runs", "projects"])
def test_json_is_no_deeper_than_people_write_it(
    running: Run, script: TestClient, path: str
) -> None:
    """Deeply nested JSON is answered by 413 before parsing; brackets within texts do not count."""
    text = {"config": "]" + "[" * 1000, "note": '\\"[[' * 100}
    body = json.dumps({"recipe": "digits", **text})[:-1].encode()
    headers = {"content-type": "application/json"}
    for depth in (33, 500, 995, 100_000):
        deep = b'%s, "more": %s%s}' % (body, b"[" * depth, b"]" * depth)
        answer = script.post(f"/api/v1/{path}", content=deep, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (413, CODE)
        assert "allowed: 32 levels" in answer.json()["detail"]
    flat = body + b', "more": [[1]]}'
    assert script.post(f"/api/v1/{path}", content=flat, headers=headers).status_code == 422
    open_ended = b'"' + b'\\"' * 400_000
    answer = script.post(f"/api/v1/{path}", content=open_ended, headers=headers)
    assert answer.status_code == 422
    assert len(answer.content) < 2000


def test_a_configuration_holds_no_file(running: Run, script: TestClient) -> None:
    """A text of 900 kB in any configuration is refused by the name of its field."""
    config = {"training": {"dataset": "x" * 900_000}}
    watched = {"id": "0" * 32, "attempt": 1, "name": "w", "started": "2026-01-01T00:00:00Z"}
    for path, body in (
        ("runs", {"recipe": "digits"}),
        ("runs", {"command": {"line": "python a.py {lr}"}}),
        ("sweeps", {"recipe": "digits", "space": {"training.batch_size": [8]}, "goal": "minimise"}),
        ("ingest", watched),
    ):
        answer = script.post(f"/api/v1/{path}", json=body | {"config": config})
        assert answer.status_code == 422, path
        assert "training.dataset: " in answer.json()["detail"], path
        assert len(answer.content) < 2000


def test_invisible_characters_in_names(
    database: Database, ada: User, running: Run, browser: TestClient, tmp_path: Path
) -> None:
    """Invisible characters become blanks in names of runs and sweeps; names that only users type
    are rejected.
    """
    wild, seen = "\x1b[31mbest\u202egnp\u200b", "[31mbest gnp"
    made = browser.post(
        "/api/v1/runs", json={"recipe": "digits", "name": wild, "tags": wild}
    ).json()
    assert (made["name"], made["tags"]) == (seen, [seen])
    edited = browser.patch("/api/v1/runs/1", json={"name": wild, "tags": [wild]}).json()
    assert (edited["name"], edited["tags"]) == (seen, [seen])
    sweep = {"recipe": "digits", "space": {"training.batch_size": [8]}, "goal": "minimise"}
    assert browser.post("/api/v1/sweeps", json=sweep | {"name": wild}).json()["name"] == seen
    uploader = Uploader(browser, write_token(database, ada), tmp_path)
    assert uploader.begin(name=wild, tags=[wild], project="").status_code == 200
    watched = browser.get(f"/api/v1/runs/{uploader.run}").json()
    assert (watched["name"], watched["tags"]) == (seen, [seen])
    for path, body in (("views", {"filter": ""}), ("tokens", {})):
        answer = browser.post(f"/api/v1/{path}", json=body | {"name": wild})
        assert answer.status_code == 422, path
        assert "which is invisible" in answer.json()["detail"]


def publish(database: Database, run: Run, key: str, body: bytes) -> None:
    """Record an artifact under any key, as earlier versions did."""
    event: dict[str, Any] = {"step": 1, "name": "a.txt", "size_bytes": len(body)}
    event["sha256"] = hashlib.sha256(body).hexdigest()
    with database.writing() as session:
        artifacts.publish(session, run.id, run.attempt, artifact_of(event), key)


@pytest.mark.parametrize("key", ["runs/1/artifacts/../../2/a.txt", "/etc/passwd", "", "runs//a"])
def test_a_key_that_names_no_file_of_the_store_is_not_found(
    database: Database, running: Run, script: TestClient, key: str
) -> None:
    """An artifact key that names no file of the store is answered by 404, and nothing is sent."""
    publish(database, running, key, b"secret")
    answer = script.get("/runs/1/artifacts/1/download")
    assert answer.status_code == 404
    assert "is no longer in the store" in answer.text


def test_the_list_shows_a_run_of_an_earlier_version(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A stored number of 401 digits, by an earlier version, does not break the list."""
    config = {"precision": "fp16", "training": {"steps": 5, "device_memory_gib": 10**400}}
    submit(database, ada, config=config)
    assert browser.get("/runs").status_code == 200
