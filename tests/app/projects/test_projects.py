"""Renaming and deleting projects, and moving runs between them."""

import html
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from app.runs import continue_run
from app.submission import submission
from app.submission.submission import Submission
from app.sweeps import sweep_submission
from app.sweeps.sweep_submission import SweepSubmission, begin
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER
from db.alerts import rules
from db.database import Database
from db.errors import Conflict, Invalid, NotFound
from db.files.erasure import erase
from db.files.object_store import open_store
from db.queue import quotas, run_control
from db.runs import notes, runs, trash
from db.settings import Settings
from db.sweeps import sweeps
from db.tables import (
    AlertRule,
    ApiToken,
    AuditEvent,
    Note,
    Preset,
    Project,
    RetentionRule,
    Run,
    Status,
    Sweep,
    Trial,
    User,
)
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import CONFIG, start_run, submit
from tests.app.runs.continue_run_made import end
from tests.app.uploading import Uploader
from tests.db.conftest import is_blocked, make_watched

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def mel(database: Database, ada: User, offered: None) -> User:
    """A user who maintains two projects, and is a member of a third."""
    with database.writing() as session:
        found = accounts.make_user(session, "mel")
        for name, role in (("vision", MAINTAINER), ("speech", MAINTAINER), ("text", MEMBER)):
            projects.make(session, name)
            projects.set_role(session, found, name, role)
        projects.make(session, "hidden")
    return found


def furnish(session: Session, user: User, project: str) -> None:
    """Add a retention rule, a preset and a note to a project."""
    session.add(RetentionRule(project=project, log_days=30.0, user_id=user.id))
    preset = {"recipe": "digits", "config": {}, "place": {}, "user_id": user.id}
    session.add(Preset(project=project, name="usual", **preset))
    notes.write(session, user, notes.of_project(project), "What we see.", "")


def furniture(session: Session) -> list[str]:
    """Return the projects that have a retention rule, a preset or a note."""
    return [
        *session.scalars(select(RetentionRule.project)),
        *session.scalars(select(Preset.project)),
        *session.scalars(select(Note.subject)),
    ]


def test_a_project_is_renamed_with_all_that_is_of_it(
    app: FastAPI, database: Database, ada: User, mel: User, browser: TestClient
) -> None:
    """Runs, roles, limits, tokens, rules, presets and the note follow a renamed project; the
    Default project cannot be renamed, and no two names look alike.
    """
    run = submit(database, ada, project="vision")
    with database.writing() as session:
        quotas.set_limits(projects.get(session, "vision"), {"queued": "5"})
        accounts.make_api_token(session, mel, "its", project="vision")
        rule = {"condition": "ended", "scope": "project", "project": "vision"}
        rules.make(session, mel, **rule)
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
    assert (
        "a project &#39;sight&#39; already exists" in browser.post("/projects/name", data=form).text
    )
    assert browser_of(app, database, mel).get(f"/runs/{run.id}").status_code == 200
    with database.reading() as session:
        assert furniture(session) == ["sight", "sight", "project:sight"]
        for table in (ApiToken, AlertRule):
            assert session.scalars(select(table.project)).all() == ["sight"]
        kept = {"sight": MAINTAINER, "speech": MAINTAINER, "text": MEMBER}
        assert projects.memberships(session, mel) == kept
        assert session.get(Project, "vision") is None
        said = session.scalars(select(AuditEvent.detail).order_by(AuditEvent.id)).all()
    assert "name Vision, new_name sight" in said


def test_a_role_is_changed_in_its_row(
    app: FastAPI, database: Database, mel: User, browser: TestClient
) -> None:
    """A user who may grant roles sees a select with the present role; others see its text."""
    row = re.compile(
        r'<form[^>]*action="/projects/roles"[^>]*>((?:(?!</form>).)*value="mel".*?)</form>'
    )
    page = browser.get("/projects").text
    rows = [each for each in row.findall(page) if 'name="project" value="text"' in each]
    assert [re.findall(r"selected>(\w+)", each) for each in rows] == [["member"]]
    form = dict(re.findall(r'name="(project|user)" value="(\w+)"', rows[0])) | {"role": "viewer"}
    assert browser.post("/projects/roles", data=form).status_code == 303
    with database.reading() as session:
        assert projects.memberships(session, mel)["text"] == "viewer"
    own = browser_of(app, database, mel).get("/projects").text
    assert not any('value="text"' in each for each in row.findall(own))
    assert "<td>viewer</td>" in own


def test_each_project_has_a_link_to_its_runs(
    database: Database, ada: User, mel: User, browser: TestClient
) -> None:
    """Each project links to its own runs, also the Default project, whose name is empty."""
    submit(database, ada, name="of the first")
    submit(database, ada, name="of another", project="vision")
    links = re.findall(r'<a href="(/runs\?filter=[^"]+)">Runs</a>', browser.get("/projects").text)
    lists = [browser.get(html.unescape(link)).text for link in links]
    first, *_others = ["of the first" in text for text in lists]
    assert first
    assert ["of another" in text for text in lists].count(True) == 1
    assert "of another" not in lists[0]


def test_a_project_is_deleted_when_it_is_empty(
    app: FastAPI, database: Database, ada: User, mel: User, browser: TestClient
) -> None:
    """A project is deleted with its roles and tokens if it has no runs, also none in the trash."""
    run = submit(database, ada, project="vision")
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, mel, "its", project="vision")
        run_control.cancel(session, run.id, ada)
        furnish(session, mel, "vision")
    assert browser.delete(f"/api/v1/runs/{run.id}").status_code < 300
    refused = browser.delete("/api/v1/projects", params={"name": "vision"})
    assert (refused.status_code, "those in the trash included" in refused.text) == (409, True)
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


@pytest.mark.slow
def test_runs_are_moved_by_who_maintains_both_projects(
    app: FastAPI, database: Database, ada: User, mel: User
) -> None:
    """Moving runs gives each a result with a reason; audit log and history name the user.
    Forbidden destinations are rejected, and hidden ones do not exist.
    """
    busy = start_run(database, ada, project="vision").id
    queued = submit(database, ada, project="vision").id
    others = submit(database, ada, project="text").id
    client = browser_of(app, database, mel)
    for project, status in (("text", 403), ("hidden", 404), ("none", 404)):
        answer = client.put(f"/api/v1/runs/{queued}/project", json={"project": project})
        assert answer.status_code == status, answer.text
    wanted = {"action": "move", "runs": [queued, busy, others], "project": "speech"}
    result = client.post("/api/v1/runs/bulk", json=wanted).json()
    assert result["done"] == [queued]
    said = {each["id"]: each["detail"] for each in result["refused"]}
    assert "after it has ended" in said[busy]
    assert "does not allow you to move runs out of or into the project 'text'" in said[others]
    for wrong in ({"project": None}, {"action": "cancel"}):
        assert client.post("/api/v1/runs/bulk", json=wanted | wrong).status_code == 422
    page = client.get(f"/runs/{queued}").text
    assert "Moved by mel, from project vision to project speech" in page
    assert '<option value="vision">' in page
    assert '<option value="text">' not in page
    back = client.post(f"/runs/{queued}/project", data={"project": "vision"})
    assert back.headers["location"] == f"/runs/{queued}"
    with database.writing() as session:
        done = session.scalars(
            select(AuditEvent).where(AuditEvent.run_id == queued).order_by(AuditEvent.id)
        ).all()
        assert runs.get(session, queued).project == "vision"
        quotas.set_limits(projects.get(session, "speech"), {"queued": "0", "stored_gib": "1"})
        run_control.cancel(session, queued, ada)
        runs.get(session, queued).stored_bytes = 2**31
        waiting = runs.submit(
            session, ada, Run(recipe="digits", config=CONFIG, project="vision")
        ).id
    assert [each.detail for each in done] == ["action move, project speech", "project vision"]
    assert {each.user_id for each in done} == {mel.id}
    for run_id, why in ((waiting, "in the queue"), (queued, "than its limit of 1 GiB")):
        answer = client.put(f"/api/v1/runs/{run_id}/project", json={"project": "speech"})
        assert (answer.status_code, answer.json()["code"]) == (409, "over_quota")
        assert why in answer.text


def test_who_looks_on_sees_no_more_of_a_run_that_is_moved_away(
    address: str, database: Database, ada: User, mel: User
) -> None:
    """A viewer's live stream of a run ends, and is 404, once the run is in a hidden project."""
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
    """After a watched run was moved, its script cannot move it back, and a token of the former
    project cannot send it.
    """
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


def begin_sweep(database: Database, user: User, **place: Any) -> Sweep:
    """Begin a sweep with a first run in the queue and a second one not yet submitted."""
    space: dict[str, Any] = {"training.batch_size": [8, 16]}
    given = SweepSubmission(recipe="digits", space=space, goal="minimise", **place)
    with database.writing() as session:
        return begin(session, user, given)


@pytest.mark.slow
def test_a_sweep_is_moved_with_all_of_its_runs(
    app: FastAPI, database: Database, ada: User, mel: User
) -> None:
    """Maintainers of both projects move a sweep with its runs in the trash; a single trial and
    training runs are not moved.
    """
    sweep = begin_sweep(database, ada, project="vision")
    client = browser_of(app, database, mel)
    with database.writing() as session:
        run_control.cancel(session, 1, ada)
        trash.delete(session, 1, ada)
        sweep_submission.continue_sweep(session, sweep.id)
    alone = client.put("/api/v1/runs/2/project", json={"project": "speech"})
    assert (alone.status_code, "move the sweep" in alone.text) == (409, True)
    address = f"/api/v1/sweeps/{sweep.id}/project"
    for project, status in (("text", 403), ("hidden", 404), ("none", 404)):
        assert client.put(address, json={"project": project}).status_code == status
    with database.writing() as session:
        quotas.set_limits(projects.get(session, "speech"), {"queued": "0"})
    full = client.put(address, json={"project": "speech"})
    assert (full.status_code, full.json()["code"]) == (409, "over_quota")
    with database.writing() as session:
        quotas.set_limits(projects.get(session, "speech"), {"queued": ""})
        assert session.scalars(select(Run.project).distinct()).all() == ["vision"]
    moved = client.put(address, json={"project": "speech"})
    assert (moved.status_code, moved.json()["project"]) == (200, "speech")
    with database.writing() as session:
        assert session.scalars(select(Run.project).distinct()).all() == ["speech"]
        runs.get(session, 2).status = Status.RUNNING
    busy = client.post(f"/sweeps/{sweep.id}/project", data={"project": "vision"})
    assert (busy.status_code, "run 2 with devices" in busy.text) == (409, True)
    assert '<option value="vision">' in client.get(f"/sweeps/{sweep.id}").text
    with database.writing() as session:
        runs.get(session, 2).status = Status.FINISHED
    back = client.post(f"/sweeps/{sweep.id}/project", data={"project": "vision"})
    assert back.headers["location"] == f"/sweeps/{sweep.id}"
    assert "Moved by mel, from project speech to project vision" in client.get("/runs/2").text
    with database.reading() as session:
        audit_events = session.scalars(
            select(AuditEvent)
            .where(AuditEvent.action.like("%/sweeps/%/project"))
            .order_by(AuditEvent.id)
        ).all()
    assert [each.detail for each in audit_events] == ["project speech", "project vision"]


def test_a_project_goes_with_sweeps_that_have_no_runs_left(
    database: Database, settings: Settings, ada: User, mel: User, browser: TestClient
) -> None:
    """A sweep that will submit more runs, or has one in the trash, prevents the deletion."""
    sweep = begin_sweep(database, ada, project="vision")

    def delete() -> tuple[int, str]:
        answer = browser.delete("/api/v1/projects", params={"name": "vision"})
        return answer.status_code, answer.text

    with database.writing() as session:
        sweeps.cancel(session, sweep.id, ada)
        trash.delete(session, 1, ada)
    assert (delete()[0], "those in the trash included" in delete()[1]) == (409, True)
    with database.writing() as session:
        trash.erase(session, 1, ada)
    erase(database, settings, open_store(settings), 1, Event())
    with database.writing() as session:
        session.get_one(Sweep, sweep.id).status = sweeps.RUNNING
    assert (delete()[0], f"sweep {sweep.id}, which has more runs to submit" in delete()[1]) == (
        409,
        True,
    )
    with database.writing() as session:
        session.get_one(Sweep, sweep.id).status = sweeps.CANCELLED
    assert delete()[0] == 204
    with database.reading() as session:
        assert session.get(Sweep, sweep.id) is None
        assert session.scalars(select(Trial)).all() == []
        assert session.get(Project, "vision") is None


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize("is_deleted", [False, True])
def test_runs_submitted_meanwhile_are_included(
    database: Database, ada: User, mel: User, *, is_deleted: bool
) -> None:
    """A run whose submission began before a rename gets the new name; one that comes during the
    rename waits, and is refused.
    """
    wanted = Submission(recipe="digits", project="vision")

    def change(session: Session) -> None:
        if is_deleted:
            projects.delete_empty(session, "vision")
        else:
            projects.rename(session, "vision", "sight")

    def in_writing(work: Callable[[Session], object]) -> None:
        with database.writing() as session:
            work(session)

    with ThreadPoolExecutor() as pool:
        with database.writing() as session:
            submission.submit(session, ada, wanted)
            changing = pool.submit(in_writing, change)
            while not is_blocked(database) and not changing.done():
                pass
        if is_deleted:
            with pytest.raises(Conflict, match="has runs"):
                changing.result()
            with database.writing() as session:
                session.execute(update(Run).values(project=""))
        else:
            changing.result()
            with database.writing() as session:
                assert session.scalars(select(Run.project)).all() == ["sight"]
                projects.rename(session, "sight", "vision")
        with database.writing() as session:
            change(session)
            late = pool.submit(in_writing, lambda own: submission.submit(own, ada, wanted))
            while not is_blocked(database) and not late.done():
                pass
        with pytest.raises(Invalid, match="vision"):
            late.result()


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize("what", ["sweep", "run", "watched"])
def test_who_makes_more_of_a_project_waits_for_who_renames_it(
    database: Database, ada: User, mel: User, what: str
) -> None:
    """A new sweep, a failed run or a watched run waits for the rename without a deadlock, and
    continues in the renamed project.
    """
    if what == "watched":
        with database.writing() as session:
            make_watched(session, ada, project="vision")
    elif what == "sweep":
        sweep = begin_sweep(database, ada, project="vision")
        with database.writing() as session:
            run_control.cancel(session, 1, ada)
    else:
        end(database, start_run(database, ada, project="vision"), Status.FAILED, 40)

    def add_a_run() -> None:
        with database.writing() as session:
            if what == "watched":
                make_watched(session, ada, project="vision")
            elif what == "sweep":
                sweep_submission.continue_sweep(session, sweep.id)
            else:
                continue_run.continue_run(session, ada, 1)

    with ThreadPoolExecutor() as pool:
        with database.writing() as session:
            session.execute(select(Project).where(Project.name == "vision").with_for_update())
            going_on = pool.submit(add_a_run)
            while not is_blocked(database) and not going_on.done():
                pass
            projects.rename(session, "vision", "sight")
        going_on.result()
    with database.reading() as session:
        assert set(session.scalars(select(Run.project))) == {"sight"}
