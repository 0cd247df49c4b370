"""Images in a project's note are a named artifact of the project."""

from typing import Any

from starlette.testclient import TestClient

from db.access import accounts, projects
from db.database import Database
from db.files import artifact_versions
from db.queue import quotas
from db.tables import AuditEvent, Project
from tests.app.artifacts.test_artifacts import CONTENT
from tests.marks import looped
from tests.pictures import picture

PATH = "/api/v1/projects/images"
PICTURE = picture("red")


def test_an_image_is_stored_once_and_shown_in_the_note(
    database: Database, browser: TestClient
) -> None:
    """The same image is stored once at one address, which the artifact and the audit log list."""
    with database.writing() as session:
        projects.make(session, "vision")
    answer = browser.post(PATH, params={"project": "vision"}, content=PICTURE)
    assert answer.status_code == 201, answer.text
    image = answer.json()
    assert image["media_type"] == "image/png"
    sent = browser.get(image["address"])
    assert (sent.content, sent.headers["content-type"]) == (PICTURE, "image/png")
    assert sent.headers["content-security-policy"] == "default-src 'none'; sandbox"
    again = browser.post(PATH, params={"project": "vision"}, content=PICTURE).json()
    assert again == image
    with database.reading() as session:
        [row] = artifact_versions.list_artifacts(session, "vision", limit=9).rows
        assert (row[0].name, row[0].type) == ("note-images", "image")
        actions = [event.action for event in session.query(AuditEvent)]
    assert actions.count(f"POST {PATH}") == 2
    note = {"project": "vision", "note": f"![loss]({image['address']})", "seen": ""}
    assert browser.post("/notes", data=note).status_code == 303
    assert f'<img src="{image["address"]}" alt="loss"' in browser.get("/projects").text


@looped(
    "project, content, status",
    [
        ("", CONTENT, 422),
        ("", b"", 422),
        ("none", PICTURE, 404),
        ("", PICTURE + b"\0" * (4 << 20), 413),
    ],
)
def test_what_is_not_allowed_stores_nothing(
    database: Database, browser: TestClient, project: str, content: bytes, status: int
) -> None:
    """Files that are too large or no image, and unknown projects, are rejected."""
    answer = browser.post(PATH, params={"project": project}, content=content)
    assert answer.status_code == status
    with database.reading() as session:
        assert artifact_versions.list_artifacts(session, None, limit=9).rows == []


def test_a_full_project_takes_no_further_image(database: Database, browser: TestClient) -> None:
    """Images count towards a project's storage limit, except one that it has already."""
    assert browser.post(PATH, content=PICTURE).status_code == 201
    with database.writing() as session:
        session.get_one(Project, "").stored_gib = 1 / quotas.GIB
    assert browser.post(PATH, content=PICTURE).status_code == 201
    answer = browser.post(PATH, content=picture("blue"))
    assert (answer.status_code, answer.json()["code"]) == (409, "over_quota")


def test_a_role_decides_who_adds_images(database: Database, script: TestClient) -> None:
    """Users who may write the note of a project may add images to it."""
    found: dict[str, Any] = {}
    with database.writing() as session:
        projects.make(session, "vision")
        for role in projects.ROLES:
            user = accounts.make_user(session, role)
            projects.set_role(session, user, "vision", role)
            found[role] = accounts.make_api_token(session, user, "script")[0]
        found["none"] = accounts.make_api_token(session, accounts.make_user(session, "eve"), "s")[0]
    for role, token in found.items():
        headers = {"Authorization": f"Bearer {token}"}
        answer = script.post(PATH, params={"project": "vision"}, content=PICTURE, headers=headers)
        found[role] = answer.status_code
    assert list(found.values()) == [403, 201, 201, 404]
