"""Labels, the trash and bulk actions, by the JSON API."""

import json

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.queue import queue
from db.runs import runs
from db.tables import Run, Status, User
from tests.app.conftest import submit
from tests.marks import looped

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def ended(database: Database, running: Run) -> int:
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
    return running.id


def test_labels_are_edited(script: TestClient, running: Run) -> None:
    """Editing a run's labels returns the run; the list has name and tags, but no note."""
    body = {"name": "baseline", "tags": ["a", "b"], "note": "**why**"}
    answer = script.patch(f"/api/v1/runs/{running.id}", json=body)
    assert answer.status_code == 200
    for said in (answer.json(), script.get(f"/api/v1/runs/{running.id}").json()):
        assert {name: said[name] for name in body} == body
    [listed] = script.get("/api/v1/runs").json()["runs"]
    assert (listed["name"], listed["tags"], "note" in listed) == ("baseline", ["a", "b"], False)


@looped(
    "body, field",
    [
        ({"note": "a\0"}, "note"),
        ({"tags": ["\ud800"]}, "tags.0"),
        ({"name": ""}, "name"),
        ({"colour": "red"}, "colour"),
        ({"tags": "a, b"}, "tags"),
        ({"seen": {"status": "x"}}, "seen.status"),
    ],
)
def test_bad_labels_are_named(
    script: TestClient, running: Run, body: dict[str, object], field: str
) -> None:
    """An invalid label gets 422 with the field."""
    headers = {"content-type": "application/json"}
    address = f"/api/v1/runs/{running.id}"
    answer = script.patch(address, content=json.dumps(body), headers=headers)
    assert answer.status_code == 422
    assert field in answer.json()["errors"]


def test_a_label_changed_meanwhile_is_not_overwritten(script: TestClient, running: Run) -> None:
    """An edit of a label that changed meanwhile gets 409 with the code `changed`."""
    address = f"/api/v1/runs/{running.id}"
    script.patch(address, json={"note": "theirs"})
    answer = script.patch(address, json={"note": "mine", "seen": {"note": ""}})
    assert (answer.status_code, answer.json()["code"]) == (409, "changed")
    assert script.get(address).json()["note"] == "theirs"


def test_delete_and_restore(script: TestClient, ended: int) -> None:
    """A deleted run is listed in the trash only; once restored it is back in the list."""
    for _again in range(2):
        assert script.delete(f"/api/v1/runs/{ended}").status_code == 204
    gone = script.get(f"/api/v1/runs/{ended}")
    assert (gone.status_code, "in the trash" in gone.json()["detail"]) == (404, True)
    assert script.get("/api/v1/runs").json()["total"] == 0
    binned = script.get("/api/v1/trash").json()
    assert (binned["total"], binned["runs"][0]["id"], binned["next"]) == (1, ended, None)
    assert binned["runs"][0]["erased_after"] == binned["runs"][0]["deleted_at"] + 7 * 86400
    assert script.post(f"/api/v1/runs/{ended}/restoration").status_code == 204
    assert script.get(f"/api/v1/runs/{ended}").status_code == 200
    assert script.post(f"/api/v1/runs/{ended}/erasure").status_code == 409
    script.delete(f"/api/v1/runs/{ended}")
    assert script.post(f"/api/v1/runs/{ended}/erasure").status_code == 202
    assert script.get("/api/v1/trash").json()["runs"][0]["erasing"] is True
    assert script.post(f"/api/v1/runs/{ended}/restoration").status_code == 409


def test_of_many_what_can_be_done_is_done(
    database: Database, script: TestClient, running: Run, ada: User
) -> None:
    """Each run has its own result: active and missing runs do not prevent the others."""
    over = [submit(database, ada).id for _ in range(3)]
    everyone = [running.id, *over, 99]
    act = {"runs": over, "action": "cancel"}
    assert script.post("/api/v1/runs/bulk", json=act).json() == {"done": over, "refused": []}
    answer = script.post("/api/v1/runs/bulk", json={"runs": everyone, "action": "delete"}).json()
    assert answer["done"] == over
    assert [each["id"] for each in answer["refused"]] == [running.id, 99]
    assert "Cancel it first" in answer["refused"][0]["detail"]
    for action, reached in (("restore", over), ("erase", [])):
        answer = script.post("/api/v1/runs/bulk", json={"runs": over, "action": action}).json()
        assert answer["done"] == reached
    mistyped = {"runs": [running.id], "action": "restore"}
    answer = script.post("/api/v1/runs/bulk", json=mistyped).json()
    refused = [{"id": running.id, "detail": f"Run {running.id} was not in the trash."}]
    assert answer == {"done": [], "refused": refused}
    tagging = {"runs": everyone[:-1], "action": "add_tag", "tag": "kept"}
    assert script.post("/api/v1/runs/bulk", json=tagging).json()["done"] == everyone[:-1]
    assert script.get("/api/v1/runs", params={"filter": "tag:kept"}).json()["total"] == 4
    with database.reading() as session:
        assert runs.get(session, over[0]).status == Status.CANCELLED


@looped(
    "body",
    [
        {"runs": [], "action": "delete"},
        {"runs": [1] * 201, "action": "delete"},
        {"runs": [0], "action": "delete"},
        {"runs": [1], "action": "explode"},
        {"runs": [1], "action": "add_tag"},
        {"runs": [1], "action": "delete", "tag": "x"},
    ],
)
def test_invalid_requests_are_rejected(script: TestClient, body: dict[str, object]) -> None:
    """An invalid request to the trash gets 422, and nothing is changed."""
    assert script.post("/api/v1/runs/bulk", json=body).status_code == 422


def test_runs_are_listed_by_what_they_take(
    database: Database, script: TestClient, ada: User
) -> None:
    """Runs can be listed by stored bytes, the largest first, page by page."""
    ids = [submit(database, ada).id for _ in range(3)]
    with database.writing() as session:
        for run_id, size in zip(ids, (5, 2**40, 7), strict=True):
            runs.get(session, run_id).stored_bytes = size
    query = {"sort": "-stored_bytes", "limit": "2"}
    first = script.get("/api/v1/runs", params=query).json()
    assert [run["stored_bytes"] for run in first["runs"]] == [2**40, 7]
    second = script.get("/api/v1/runs", params=query | {"before": first["next"]}).json()
    assert [run["id"] for run in second["runs"]] == [ids[0]]
