"""Artifacts through the API and on pages: permissions, limits and lineage."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.artifacts.artifact_uploads import BlobUpload
from db.access import accounts, permissions, projects
from db.database import Database
from db.files import artifact_versions
from db.queue import quotas
from db.settings import Settings
from db.tables import AuditEvent, Project, Run, User
from halfstep.artifacts.manifest import Entry, digest_of
from halfstep.protocol import DAMAGED
from halfstep.telemetry import events
from tests.db.conftest import is_blocked, make_watched
from tests.marks import looped

CONTENT = b"one"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def body(**changes: Any) -> dict[str, Any]:
    files = [{"path": "a.csv", "size_bytes": len(CONTENT), "sha256": SHA256}]
    return {"name": "digits", "type": "dataset", "files": files, **changes}


def save(script: TestClient, **changes: Any) -> dict[str, Any]:
    """Save a version with its content; return the API's first response."""
    answer = script.post("/api/v1/artifacts", json=body(**changes))
    assert answer.status_code == 201, answer.text
    version: dict[str, Any] = answer.json()
    for sha256 in version["missing"]:
        assert put(script, version["id"], CONTENT, sha256).json()["stored"]
    return version


def put(script: TestClient, version_id: int, piece: bytes, sha256: str, **query: int) -> Any:
    address = f"/api/v1/artifact-versions/{version_id}/blobs/{sha256}"
    params = {"offset": 0, "size": len(CONTENT)} | query
    return script.put(address, params=params, content=piece)


def test_a_version_is_uploaded_in_pieces_and_downloaded(script: TestClient) -> None:
    """A piece at a wrong offset gets the right one, and content with another hash is rejected."""
    version = script.post("/api/v1/artifacts", json=body()).json()
    assert (version["version"], version["missing"]) == ("v0", [SHA256])
    assert put(script, version["id"], b"o", SHA256).json() == {"offset": 1, "stored": False}
    wrong = put(script, version["id"], b"ne", SHA256)
    assert (wrong.status_code, wrong.json()["offset"]) == (409, 1)
    assert put(script, version["id"], b"xx", SHA256, offset=1).status_code == 422
    assert put(script, version["id"], CONTENT, SHA256).json() == {"offset": 3, "stored": True}
    answer = script.get(f"/api/v1/artifact-versions/{version['id']}/files/a.csv")
    assert answer.content == CONTENT
    assert answer.headers["content-disposition"] == 'attachment; filename="digits-v0-a.csv"'
    part = script.get(
        f"/api/v1/artifact-versions/{version['id']}/files/a.csv", headers={"Range": "bytes=1-"}
    )
    assert (part.status_code, part.content) == (206, b"ne")


def test_files_that_are_lost_are_named_where_a_version_is_shown(
    settings: Settings, script: TestClient, browser: TestClient
) -> None:
    """Lost files are named by the version's page and responses; a download ends with the reason."""
    version = save(script)
    address = f"/artifact-versions/{version['id']}"
    assert DAMAGED not in script.get(f"/api/v1{address}").headers
    [content] = settings.data.glob("blobs/*-*")
    content.unlink()
    text = "Files of this version are missing on the server: a.csv."
    assert text in browser.get(address).text
    for path in (f"/api/v1{address}", "/api/v1/artifacts/version?name=digits"):
        assert script.get(path).headers[DAMAGED] == text
    lost = script.get(f"/api/v1{address}/files/a.csv")
    assert (lost.status_code, "is no longer in the store" in lost.text) == (404, True)


def test_content_above_the_limit_of_a_project_is_refused_although_its_version_was_saved(
    database: Database, settings: Settings, script: TestClient
) -> None:
    """Versions that fit the quota one by one, but not together, are refused."""
    with database.writing() as session:
        session.get_one(Project, "").stored_gib = len(CONTENT) / quotas.GIB
    other = b"two"
    digest = hashlib.sha256(other).hexdigest()
    files = [{"path": "b.csv", "size_bytes": len(other), "sha256": digest}]
    first, second = (
        script.post("/api/v1/artifacts", json=body(**changes)).json()
        for changes in ({}, {"files": files})
    )
    assert put(script, first["id"], CONTENT, SHA256).json()["stored"]
    refused = put(script, second["id"], other, digest)
    assert (refused.status_code, refused.json()["code"]) == (409, "over_quota")
    assert len(list(settings.data.glob("blobs/*-*"))) == 1


def test_unchanged_content_of_a_full_project_is_saved_again(
    database: Database, script: TestClient
) -> None:
    """In a full project content that it has already can be saved again, in any number of files."""
    version = save(script)
    with database.writing() as session:
        session.get_one(Project, "").stored_gib = len(CONTENT) / quotas.GIB
    again = script.post("/api/v1/artifacts", json=body())
    assert (again.status_code, again.json()["id"]) == (201, version["id"])
    files = [*body()["files"], *body(files=[body()["files"][0] | {"path": "b.csv"}])["files"]]
    same_content = script.post("/api/v1/artifacts", json=body(files=files))
    assert (same_content.status_code, same_content.json()["missing"]) == (201, [])
    new = {"path": "c.csv", "size_bytes": 1, "sha256": hashlib.sha256(b"c").hexdigest()}
    refused = script.post("/api/v1/artifacts", json=body(files=[*files, new]))
    assert (refused.status_code, refused.json()["code"]) == (409, "over_quota")


@pytest.mark.sql
@pytest.mark.only_on("postgresql")
def test_content_that_fills_a_project_concurrently_is_refused_and_deleted(
    database: Database, settings: Settings, ada: User, script: TestClient
) -> None:
    """Content stored before its artifact was refused is deleted again."""
    other = hashlib.sha256(b"two").hexdigest()
    files = [{"path": "b.csv", "size_bytes": 3, "sha256": other}]
    first, second = (
        script.post("/api/v1/artifacts", json=body(**changes)).json()
        for changes in ({"name": "other", "files": files}, {})
    )
    with database.writing() as session:
        session.get_one(Project, "").stored_gib = len(CONTENT) / quotas.GIB
    with ThreadPoolExecutor() as pool:
        with database.writing() as session:
            grants = permissions.grants(session, ada)
            BlobUpload(grants, first["id"], 3, other).record(session, "blobs/x")
            putting = pool.submit(put, script, second["id"], CONTENT, SHA256)
            while not is_blocked(database) and not putting.done():
                pass
        refused = putting.result()
    assert (refused.status_code, refused.json()["code"]) == (409, "over_quota")
    assert list(settings.data.glob("blobs/*-*")) == []


@looped(
    "changes, field",
    [
        ({"name": "../x"}, "name"),
        ({"aliases": ["v3"]}, "alias"),
        ({"aliases": ["a b"]}, "aliases.0"),
        ({"files": []}, "files"),
        ({"files": [{"path": "../a", "size_bytes": 1, "sha256": SHA256}]}, "files"),
        ({"files": [{"path": "a", "size_bytes": -1, "sha256": SHA256}]}, "files.0.size_bytes"),
        ({"files": [{"path": "a", "size_bytes": 1, "sha256": "x"}]}, "files.0.sha256"),
    ],
)
def test_what_is_not_allowed_is_named(
    script: TestClient, changes: dict[str, Any], field: str
) -> None:
    """An invalid artifact is rejected with its field, and nothing is saved."""
    answer = script.post("/api/v1/artifacts", json=body(**changes))
    assert answer.status_code == 422
    assert field in answer.json()["errors"]
    assert script.get("/api/v1/artifacts").json()["total"] == 0


def test_a_role_decides_who_saves_and_deletes(
    app: Any, database: Database, ada: User, script: TestClient
) -> None:
    """A viewer downloads if the project allows it, a member saves, a maintainer deletes."""
    tokens = {}
    with database.writing() as session:
        projects.make(session, "vision").viewers_download = False
        for role in projects.ROLES:
            user = accounts.make_user(session, role)
            projects.set_role(session, user, "vision", role)
            tokens[role] = accounts.make_api_token(session, user, "script")[0]
        eve = accounts.make_user(session, "eve")
        tokens["eve"] = accounts.make_api_token(session, eve, "script")[0]
    version = save(script, project="vision")
    file = f"/api/v1/artifact-versions/{version['id']}/files/a.csv"
    one = f"/api/v1/artifact-versions/{version['id']}"

    def ask(role: str, method: str, path: str, **options: Any) -> int:
        headers = {"Authorization": f"Bearer {tokens[role]}"}
        return script.request(method, path, headers=headers, **options).status_code

    again = {"json": body(project="vision", name="other")}
    assert [ask(role, "GET", one) for role in tokens] == [200, 200, 200, 404]
    assert [ask(role, "GET", file) for role in tokens] == [403, 200, 200, 404]
    assert [ask(role, "POST", "/api/v1/artifacts", **again) for role in tokens] == [
        *(403, 201, 201, 404)
    ]
    assert [ask(role, "DELETE", one) for role in tokens] == [403, 403, 204, 404]
    with database.reading() as session:
        actions = [row.action for row in session.query(AuditEvent).order_by(AuditEvent.id)]
    assert f"DELETE {one}" in actions
    assert "POST /api/v1/artifacts" in actions


def chain(database: Database, ada: User) -> list[int]:
    """Create two runs: one makes data, the other uses them and makes a model; return the
    versions.
    """
    entry = Entry("a.csv", len(CONTENT), SHA256)
    file = events.ArtifactFile(
        name="a.csv", path=f"blobs/{SHA256}", size_bytes=len(CONTENT), sha256=SHA256
    )
    ids = []
    with database.writing() as session:
        for key, name in (("1", "data"), ("2", "model")):
            run_id = make_watched(session, ada, key * 32, name=f"makes {name} <b>").run_id
            run = session.get_one(Run, run_id)
            made = events.SavedArtifact(
                name=name, type="dataset", digest=digest_of([entry]), is_file=True, files=[file]
            )
            if ids:
                used = events.UsedArtifact(project="", name="data", digest=digest_of([entry]))
                artifact_versions.use_by_run(session, run, used)
            version = artifact_versions.save_of_run(session, run, made)
            ids.append(version.id)
            artifact_versions.store_blob(
                session, SHA256, len(CONTENT), "blobs/x", version_id=version.id
            )
    return ids


def test_the_lineage_goes_both_ways(
    database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """The lineage of a model has the run that made its data, as a drawing and as a list."""
    data, model = chain(database, ada)
    graph = script.get(f"/api/v1/artifact-versions/{model}/lineage").json()
    assert {node["key"]: node["layer"] for node in graph["nodes"]} == {
        "version-2": 0,
        "run-2": -1,
        "version-1": -2,
        "run-1": -3,
    }
    assert sorted(map(tuple, graph["edges"])) == [
        ("run-1", "version-1"),
        ("run-2", "version-2"),
        ("version-1", "run-2"),
    ]
    after = script.get(f"/api/v1/artifact-versions/{data}/lineage").json()
    assert {node["key"]: node["layer"] for node in after["nodes"]} == {
        "version-1": 0,
        "run-1": -1,
        "run-2": 1,
        "version-2": 2,
    }
    page = browser.get(f"/artifact-versions/{model}").text
    assert '<svg class="lineage"' in page
    assert '<a href="/artifact-versions/1"' in page
    assert "makes data &lt;b&gt;" in page
    assert "<b>makes" not in page


def test_the_pages_show_versions_differences_and_links(
    database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """Versions have a list, a page of differences between two, and links on a run's Files tab."""
    data, _model = chain(database, ada)
    changed = [{"path": "b.csv", "size_bytes": len(CONTENT), "sha256": SHA256}]
    second = save(script, name="data", files=changed)
    assert '<a href="/artifacts/1">data</a>' in browser.get("/artifacts").text
    moved = browser.get("/artifacts/1")
    assert moved.headers["location"] == f"/artifact-versions/{second['id']}"
    page = browser.get(f"/artifact-versions/{second['id']}", params={"against": data}).text
    assert '<td class="change-added">added</td>' in page
    assert '<td class="change-removed">removed</td>' in page
    run = browser.get("/runs/2").text
    assert f'<td>used</td><td><a href="/artifact-versions/{data}">data:v0</a>' in run
    assert "<td>made</td>" in run


def test_forms_set_an_alias_and_delete(
    database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """An impossible alias or deletion is reported on the page."""
    data, _model = chain(database, ada)
    address = f"/artifact-versions/{data}"
    assert browser.post(f"{address}/alias", data={"alias": "best"}).status_code == 303
    assert script.get(f"/api/v1{address}").json()["aliases"] == ["latest", "best"]
    refused = browser.post(f"{address}/alias", data={"alias": "v7"})
    assert "not v and a number" in refused.text
    refused = browser.post(f"{address}/deletion", data={"force": "true"})
    assert refused.status_code == 409
    assert "is in use by run 2, which has not ended" in refused.text
