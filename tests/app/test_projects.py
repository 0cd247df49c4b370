"""Projects that are renamed and deleted, and runs that go from one to another."""

from collections import deque
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from db import accounts, alerts, notes, projects, quotas, runs, steering
from db.database import Database
from db.errors import NotFound
from db.rights import MAINTAINER, MEMBER
from db.tables import (
    AlertRule,
    ApiToken,
    Deed,
    Note,
    Preset,
    Project,
    RetentionRule,
    Run,
    User,
)
from tests.app.conftest import CONFIG, start_run, submit
from tests.app.test_people import browser_of
from tests.app.uploading import Uploader


@pytest.fixture
def mel(database: Database, ada: User, offered: None) -> User:
    """Who maintains two projects, and is a member of a third."""
    with database.writing() as session:
        found = accounts.make_user(session, "mel")
        for name, role in (("vision", MAINTAINER), ("speech", MAINTAINER), ("text", MEMBER)):
            projects.make(session, name)
            projects.set_role(session, found, name, role)
        projects.make(session, "hidden")
    return found


def furnish(session: Session, user: User, project: str) -> None:
    """Let a project have what people make of one: a rule of retention, a preset, a note."""
    session.add(RetentionRule(project=project, log_days=30.0, user_id=user.id))
    preset = {"recipe": "digits", "config": {}, "place": {}, "user_id": user.id}
    session.add(Preset(project=project, name="usual", **preset))
    notes.write(session, user, notes.of_project(project), "What we see.", "")


def furniture(session: Session) -> list[str]:
    """Return the projects that have a rule of retention, a preset or a note, one each."""
    return [
        *session.scalars(select(RetentionRule.project)),
        *session.scalars(select(Preset.project)),
        *session.scalars(select(Note.subject)),
    ]


def test_a_project_is_renamed_with_all_that_is_of_it(
    app: FastAPI, database: Database, ada: User, mel: User, browser: TestClient
) -> None:
    """Runs, roles, limits, tokens, rules, presets, note; the first has no other name, and no two
    projects have names that look alike.
    """
    run = submit(database, ada, project="vision")
    with database.writing() as session:
        quotas.set_limits(projects.get(session, "vision"), {"queued": "5"})
        accounts.make_api_token(session, mel, "its", project="vision")
        rule = {"condition": "ended", "scope": "project", "project": "vision"}
        alerts.make(session, mel, **rule)
        furnish(session, mel, "vision")
    for wanted, status in (
        ({"name": "", "new_name": "x"}, 422),
        ({"name": "vision", "new_name": "SPEECH"}, 422),
        ({"name": "vision", "new_name": "vision"}, 422),
        ({"name": "none", "new_name": "x"}, 404),
        ({"name": "vision", "new_name": "Vision"}, 200),
        ({"name": "Vision", "new_name": "sight"}, 200),
    ):
        answer = browser.patch("/api/v1/projects/name", json=wanted)
        assert answer.status_code == status, (wanted, answer.text)
    assert answer.json()["queued"] == 5
    form = {"project": "speech", "new_name": "Sight"}
    assert "there is a project &#39;sight&#39;" in browser.post("/projects/name", data=form).text
    assert browser_of(app, database, mel).get(f"/runs/{run.id}").status_code == 200
    with database.reading() as session:
        assert furniture(session) == ["sight", "sight", "project:sight"]
        for table in (ApiToken, AlertRule):
            assert session.scalars(select(table.project)).all() == ["sight"]
        kept = {"sight": MAINTAINER, "speech": MAINTAINER, "text": MEMBER}
        assert projects.memberships(session, mel) == kept
        assert session.get(Project, "vision") is None
        said = session.scalars(select(Deed.detail).order_by(Deed.id)).all()
    assert "name Vision, new_name sight" in said


def test_a_project_is_deleted_when_it_is_empty(
    app: FastAPI, database: Database, ada: User, mel: User, browser: TestClient
) -> None:
    """And not before: what is in the bin counts. Its roles and tokens go with it."""
    run = submit(database, ada, project="vision")
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, mel, "its", project="vision")
        steering.cancel(session, run.id, ada)
        furnish(session, mel, "vision")
    assert browser.delete(f"/api/v1/runs/{run.id}").status_code < 300
    refused = browser.delete("/api/v1/projects", params={"name": "vision"})
    assert (refused.status_code, "those in the bin included" in refused.text) == (409, True)
    assert (
        "only an empty one" in browser.post("/projects/deletion", data={"project": "vision"}).text
    )
    assert browser.delete("/api/v1/projects", params={"name": ""}).status_code == 422
    with database.writing() as session:
        session.get_one(Run, run.id).project = ""  # as its erasure leaves it
    assert browser_of(app, database, mel).delete("/api/v1/projects?name=text").status_code == 403
    assert browser.post("/projects/deletion", data={"project": "vision"}).status_code == 303
    with database.reading() as session:
        assert accounts.find_api_token(session, token) is None
        assert "vision" not in projects.memberships(session, mel)
        assert furniture(session) == []
        with pytest.raises(NotFound):
            projects.get(session, "vision")


def test_runs_are_moved_by_who_maintains_both_projects(
    app: FastAPI, database: Database, ada: User, mel: User
) -> None:
    """One, or many, each answered for itself; what is left out is told, the deeds and its history
    say who. Where it may not go is refused, and a project that one does not see is not there.
    """
    busy = start_run(database, ada, project="vision").id
    queued = submit(database, ada, project="vision").id
    others = submit(database, ada, project="text").id
    client = browser_of(app, database, mel)
    for project, status in (("text", 403), ("hidden", 404), ("none", 404)):
        answer = client.put(f"/api/v1/runs/{queued}/project", json={"project": project})
        assert answer.status_code == status, answer.text
    wanted = {"action": "move", "runs": [queued, busy, others], "project": "speech"}
    told = client.post("/api/v1/runs/bulk", json=wanted).json()
    assert told["done"] == [queued]
    said = {each["id"]: each["detail"] for each in told["refused"]}
    assert "once it has ended" in said[busy]
    assert "does not let you move runs out of or into the project 'text'" in said[others]
    for wrong in ({"project": None}, {"action": "cancel"}):
        assert client.post("/api/v1/runs/bulk", json=wanted | wrong).status_code == 422
    page = client.get(f"/runs/{queued}").text
    assert "moved by mel, from project vision to project speech" in page
    assert '<option value="vision">' in page
    assert '<option value="text">' not in page
    back = client.post(f"/runs/{queued}/project", data={"project": "vision"})
    assert back.headers["location"] == f"/runs/{queued}"
    with database.writing() as session:
        done = session.scalars(select(Deed).where(Deed.run_id == queued).order_by(Deed.id)).all()
        assert runs.get(session, queued).project == "vision"
        quotas.set_limits(projects.get(session, "speech"), {"queued": "0", "stored_gib": "1"})
        steering.cancel(session, queued, ada)
        runs.get(session, queued).stored_bytes = 2**31
        waiting = runs.submit(
            session, owner=ada, recipe="digits", config=CONFIG, project="vision"
        ).id
    assert [each.detail for each in done] == ["action move, project speech", "project vision"]
    assert {each.user_id for each in done} == {mel.id}
    for run_id, why in ((waiting, "in the queue"), (queued, "than the 1 GiB that it may")):
        answer = client.put(f"/api/v1/runs/{run_id}/project", json={"project": "speech"})
        assert (answer.status_code, answer.json()["code"]) == (409, "over_quota")
        assert why in answer.text


def test_who_looks_on_sees_no_more_of_a_run_that_is_moved_away(
    address: str, database: Database, ada: User, mel: User
) -> None:
    """A stream of it ends, as its page does; and a watched run is sent to where it is by now."""
    run_id = submit(database, ada, project="text").id
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, mel, "script")
    headers = {"Authorization": f"Bearer {token}"}
    live = f"{address}/api/v1/runs/{run_id}/live"
    with httpx2.stream("GET", live, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        with database.writing() as session:
            projects.move(session, run_id, ada, "hidden")
        with pytest.raises(httpx2.RemoteProtocolError):
            deque(lines)
    assert httpx2.get(live, headers=headers).status_code == 404


def test_a_watched_run_stays_where_it_was_moved(
    stranger: TestClient, database: Database, mel: User, tmp_path: Path
) -> None:
    """Whatever its script says; and a token of the project before sends it no more."""
    with database.writing() as session:
        of_vision, _row = accounts.make_api_token(session, mel, "a", "write", project="vision")
        of_all, _row = accounts.make_api_token(session, mel, "b", "write")
    uploader = Uploader(stranger, of_vision, tmp_path)
    run_id = uploader.begin(project="vision").json()["run"]
    with database.writing() as session:
        projects.move(session, run_id, mel, "speech")
    assert uploader.begin(project="vision").json()["code"] == "not_for_sending"
    uploader.headers = {"Authorization": f"Bearer {of_all}"}
    assert uploader.begin(project="vision").json()["run"] == run_id
    with database.reading() as session:
        assert session.get_one(Run, run_id).project == "speech"
