"""Attempts to bypass permissions by uploads, limited tokens, groups, keys and old alerts."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select, update
from starlette.testclient import TestClient

from app.alerts.alert_delivery import AlertDelivery
from app.auth.permissions import ACCOUNT, ADMIN, RUN_COMMANDS, access_of
from app.sweeps import sweep_submission
from db.access import permissions, projects
from db.access.permissions import MEMBER, Grants
from db.database import Database
from db.errors import Invalid
from db.files import uploads
from db.runs import runs
from db.settings import Settings
from db.tables import (
    Channel,
    Delivery,
    FrozenSteps,
    OfProject,
    OfRun,
    Run,
    Status,
    StepConversion,
    Table,
    Trial,
    Upload,
    User,
    Worker,
)
from tests.app.auth.permissions_made import routes_of
from tests.app.conftest import DIGITS, SCHEMA, client_of, submit
from tests.app.installation import HIDDEN, MARK, OPEN, Installation, Side, install
from tests.app.uploading import Uploader, write_token
from tests.marks import extended

pytestmark = pytest.mark.slow

CONTENT = b"PK\x03\x04 weights"
WEIGHTS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "run": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "step": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "upload": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
}


@pytest.fixture
def installed(settings: Settings, database: Database, ada: User, offered: None) -> Installation:
    """Two projects in use, and a recipe that starts from weights."""
    found = install(settings, database, ada)
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"weights": WEIGHTS}}
    with database.writing() as session:
        session.execute(update(Worker).values(recipes=[DIGITS | {"schema": schema}]))
    return found


def start_from(client: TestClient, upload: str, project: str = OPEN) -> Any:
    """Submit a run that starts from an upload."""
    config = {"weights": {"upload": upload}}
    return client.post(
        "/api/v1/runs", json={"recipe": "digits", "config": config, "project": project}
    )


def upload_weights(client: TestClient) -> str:
    """Upload weights; return the name by which a configuration refers to them."""
    answer = client.put("/api/v1/uploads/net.pt", content=CONTENT)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["upload"])


def test_to_know_the_hash_of_an_upload_grants_nothing(
    app: FastAPI, database: Database, installed: Installation, tmp_path: Path
) -> None:
    """Another user's upload cannot be used by its hash in runs, sweeps, presets or forms,
    whether it exists or not, even if a watched run states it.
    """
    owner = client_of(app, database, installed.hidden.owner)
    upload = upload_weights(owner)
    assert start_from(owner, upload, HIDDEN).status_code == 201
    outsider = client_of(app, database, installed.users["outsider"])
    sender = Uploader(outsider, write_token(database, installed.users["outsider"]), tmp_path)
    forged = {"weights": {"upload": upload}}
    assert sender.begin(project=OPEN, config=forged).status_code == 200
    for named in (upload, f"{'1' * 64}/net.pt"):
        body: dict[str, Any] = {"recipe": "digits", "project": OPEN}
        body["config"] = {"weights": {"upload": named}}
        sweep = body | {"space": {"training.batch_size": [8]}, "goal": "minimise"}
        search = sweep | {"config": {}, "space": {"weights.upload": [named]}}
        form = {"recipe": "digits", "weights.upload": named, "project": OPEN}
        for answer in (
            start_from(outsider, named),
            outsider.post("/api/v1/sweeps", json=sweep),
            outsider.post("/api/v1/sweeps", json=search),
            outsider.post("/api/v1/presets", json=body | {"name": "p"}),
            outsider.post("/runs", data=form),
        ):
            assert answer.status_code == 422, answer.text
            assert f"there is no upload {named} that you may download" in answer.text
    upload_weights(outsider)
    assert start_from(outsider, upload).status_code == 201


def test_a_run_lets_those_start_from_its_upload_who_may_download_its_files(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """A viewer who may not download a project's files may not start a run from them anywhere."""
    upload = upload_weights(client_of(app, database, installed.hidden.owner))
    viewer, member = installed.users["viewer"], installed.users["both"]
    with database.writing() as session:
        projects.set_role(session, viewer, OPEN, MEMBER)
    clients = {each.name: client_of(app, database, each) for each in (viewer, member)}
    assert start_from(clients["both"], upload).status_code == 422
    assert (
        start_from(client_of(app, database, installed.hidden.owner), upload, HIDDEN).status_code
        == 201
    )
    assert start_from(clients["both"], upload, HIDDEN).status_code == 201
    assert start_from(clients["viewer"], upload).status_code == 422
    with database.writing() as session:
        projects.get(session, HIDDEN).viewers_download = True
    assert start_from(clients["viewer"], upload).status_code == 201


def test_an_upload_of_one_project_stays_there(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """A token of another project cannot start a run from what its owner uploaded to this one."""
    user = installed.users["both"]
    limited = client_of(app, database, user, project=OPEN)
    upload = upload_weights(client_of(app, database, user, project=HIDDEN))
    assert start_from(limited, upload).status_code == 422
    assert upload_weights(limited) == upload
    assert start_from(limited, upload).status_code == 201
    searched = {"recipe": "digits", "project": OPEN, "goal": "minimise"}
    searched |= {"space": {"weights.upload": [upload]}}
    answer = limited.post("/api/v1/sweeps", json=searched)
    assert "a token of one project cannot search weights" in answer.text


def test_records_of_uploads_go_with_their_files(
    database: Database, installed: Installation
) -> None:
    """Records of unused uploads are deleted after a day, unless a run starts from them."""
    with database.writing() as session:
        session.execute(update(Upload).values(uploaded_at=1.0))
        uploads.record(session, installed.hidden.owner, "new/net.pt", 1, None)
        uploads.forget_unused(session, {installed.open.upload})
        found = session.scalars(select(Upload.upload).order_by(Upload.id)).all()
    assert found == [installed.open.upload, "new/net.pt"]


def test_a_sweep_continues_with_files_that_its_owner_may_download(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """A run that a sweep submits in the background is checked as if its owner submitted it."""
    sources = [installed.open.runs[0], installed.hidden.runs[0]]
    body = {"recipe": "digits", "project": OPEN, "goal": "minimise", "at_once": 1}
    body |= {"space": {"weights.run": sources}}
    outsider = client_of(app, database, installed.users["outsider"])
    answer = outsider.post("/api/v1/sweeps", json=body)
    assert answer.status_code == 201, answer.text
    sweep_id = answer.json()["id"]
    with database.writing() as session:
        trials = select(Trial.run_id).where(Trial.sweep_id == sweep_id)
        ended = update(Run).where(Run.id.in_(trials)).values(status=Status.FINISHED, ended_at=1.0)
        session.execute(ended)
    with (
        pytest.raises(Invalid, match="no permission to download files"),
        database.writing() as session,
    ):
        sweep_submission.continue_sweep(session, sweep_id)


@pytest.mark.parametrize("kind", ["full", *extended(["control", "submit", "read"])])
@pytest.mark.parametrize("whose", ["both", "operator"])
def test_a_token_of_one_project_uses_no_route_of_an_account(
    app: FastAPI, database: Database, installed: Installation, whose: str, kind: str
) -> None:
    """Routes of an account or of the server reject a project's token, which could outlive
    itself.
    """
    user = installed.users[whose]
    limited = client_of(app, database, user, kind=kind, project=OPEN)
    asked = 0
    for method, path, endpoint in routes_of(app):
        if access_of(endpoint).need in (ACCOUNT, RUN_COMMANDS, ADMIN):
            address = path.replace("{run_id}", str(installed.open.runs[0])).replace("{", "")
            answer = limited.request(method, address.replace("}", ""))
            assert answer.status_code in (403, 404, 405), f"{method} {path}: {answer.text}"
            asked += answer.status_code == 403
    assert asked > 50
    assert limited.get(f"/api/v1/runs/{installed.open.runs[0]}").status_code == 200
    for path in ("", "/series", "/checkpoints", "/log", "/environment"):
        answer = limited.get(f"/api/v1/runs/{installed.hidden.runs[0]}{path}")
        assert answer.status_code == 404, path


def test_a_token_of_one_project_queues_no_command(
    app: FastAPI, database: Database, installed: Installation, ada: User
) -> None:
    """A token of one project cannot queue commands, whose environment may have server secrets."""
    body = {"command": {"line": "true"}, "project": OPEN}
    answer = client_of(app, database, ada, project=OPEN).post("/api/v1/runs", json=body)
    assert answer.status_code == 422
    assert "this token cannot queue command lines" in answer.json()["errors"]["command"]


def test_a_token_to_read_makes_no_alert_rule(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """A read token creates no alert rule, not even for a run that it may see."""
    reader = client_of(app, database, installed.open.owner, kind="read")
    address = f"/api/v1/runs/{installed.open.runs[0]}/alerts"
    assert reader.post(address, json={"condition": "ended"}).status_code == 403


def test_completion_and_hints_know_no_other_project(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """Names of settings, metrics, tags and users are suggested to project members only."""
    outsider = client_of(app, database, installed.users["outsider"])
    member = client_of(app, database, installed.users["both"])
    words = {each: each.get("/api/v1/runs/autocomplete").text for each in (outsider, member)}
    assert MARK not in words[outsider]
    for name in ("_setting", "/metric", "-owner", "-tag"):
        assert f"{MARK}{name}" in words[member]
        assert f"agora{name}" in words[outsider]
    asked = {"filter": "qzhus_setting>1", "sort": "qzhus_setting"}
    assert MARK not in outsider.get("/api/v1/runs", params=asked).text
    assert f"did you mean {MARK}_setting?" in member.get("/api/v1/runs", params=asked).text
    for name in (f"{MARK}_setting", f"{MARK}/metric"):  # as if nothing had this name
        notes = outsider.get("/api/v1/runs", params={"sort": name}).json()["notes"]
        assert notes == [f"there is no setting or metric {name}"]


def _is_of(row: Any, side: Side) -> bool:
    return getattr(row, "run_id", None) in side.runs or getattr(row, "project", "") == side.project


def test_a_session_shows_no_row_of_a_run_that_its_user_may_not_see(
    database: Database, installed: Installation
) -> None:
    """A session returns no row of a run that its user may not see, from any table and by any query.

    A read-only link's session returns rows of its own runs only.
    """
    mappers = Table.registry.mappers
    tables = [each.class_ for each in mappers if issubclass(each.class_, OfRun | OfProject)]
    assert len(tables) > 20
    hidden, mine = installed.hidden, installed.open
    with database.writing() as session:  # of steps that no test reads here
        for run_id in (*hidden.runs, *mine.runs):
            session.add(StepConversion(run_id=run_id, is_verified=False))
            row = FrozenSteps(run_id=run_id, key=f"steps/{run_id}/a", size_bytes=1, step=1)
            row.attempt, row.sha256, row.footer_sha256 = 1, "0" * 64, "0" * 64
            session.add(row)
    with database.reading() as session:
        everything = {table: session.scalars(select(table)).all() for table in tables}
        assert all(everything.values())
        of_user = permissions.grants(session, installed.users["outsider"])
    of_link = Grants(0, False, {OPEN: frozenset()}, runs=frozenset(mine.runs[:1]))
    for grants, run_ids in ((of_user, set(mine.runs)), (of_link, set(mine.runs[:1]))):
        with database.reading() as session:
            permissions.limit(session, grants)
            for table in tables:
                rows = session.scalars(select(table)).all()
                if grants is of_user and any(_is_of(row, mine) for row in everything[table]):
                    assert rows, table
                assert not any(getattr(row, "project", "") == HIDDEN for row in rows), table
                found = {row.run_id for row in rows if issubclass(table, OfRun)}
                assert found.isdisjoint(hidden.runs), table
                if grants is of_link:
                    assert found <= run_ids, table


def test_a_session_shows_the_projects_of_its_own_user(
    database: Database, installed: Installation
) -> None:
    """Sessions of other users have no effect, and a new role applies from the next session on."""

    def list_shown(name: str) -> set[str]:
        with database.reading() as session:
            permissions.limit(session, permissions.grants(session, installed.users[name]))
            return {run.project for run in session.scalars(select(Run))}

    assert [list_shown(name) for name in ("viewer", "outsider") * 2] == [{HIDDEN}, {OPEN}] * 2
    with database.writing() as session:
        projects.set_role(session, installed.users["viewer"], OPEN, MEMBER)
    assert list_shown("viewer") == {HIDDEN, OPEN}
    with database.writing() as session:
        projects.take_role(session, installed.users["viewer"], OPEN)
    assert list_shown("viewer") == {HIDDEN}


def test_a_run_is_compared_with_runs_of_permitted_projects(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """Adding to a comparison, which changes the other run's group, needs permission in its
    project.
    """
    viewer = installed.users["viewer"]
    with database.writing() as session:
        projects.set_role(session, viewer, OPEN, MEMBER)
    other = submit(database, installed.hidden.owner, project=HIDDEN)
    body = {"recipe": "digits", "project": OPEN, "compared_with": other.id}
    answer = client_of(app, database, viewer).post("/api/v1/runs", json=body)
    assert answer.status_code == 422
    assert "no permission to submit to" in answer.json()["errors"]["compared_with"]
    with database.reading() as session:
        unchanged = runs.get(session, other.id)
        assert (unchanged.group_id, unchanged.revision) == (None, other.revision)
    member = client_of(app, database, installed.users["both"])
    assert member.post("/api/v1/runs", json=body).status_code == 201


def test_an_idempotency_key_belongs_to_one_request(
    app: FastAPI, database: Database, installed: Installation
) -> None:
    """An idempotency key that is reused with another body, or for a run that is hidden now, gets
    422; the same body gets the same run.
    """
    user = installed.users["both"]
    client = client_of(app, database, user)
    limited = client_of(app, database, user, project=OPEN)
    body: dict[str, Any] = {"recipe": "digits", "project": HIDDEN, "config": {"precision": "fp16"}}
    sweep = body | {"space": {"training.batch_size": [8]}, "goal": "minimise"}
    for path, first in (("runs", body), ("sweeps", sweep)):
        options: dict[str, Any] = {"headers": {"Idempotency-Key": "k"}}
        address = f"/api/v1/{path}"
        made = client.post(address, json=first, **options)
        assert made.status_code == 201, made.text
        again = client.post(address, json=dict(reversed(first.items())), **options)
        assert (again.status_code, again.json()["id"]) == (201, made.json()["id"])
        others = (first | {"name": "other"}, first | {"config": {"precision": "bf16"}})
        for other in (*others, first | {"project": OPEN}):
            answer = client.post(address, json=other, **options)
            assert answer.status_code == 422
            assert "already used for another request" in answer.json()["errors"]["idempotency_key"]
        assert limited.post(address, json=first, **options).status_code == 422
        assert limited.post(address, json=first | {"project": OPEN}, **options).status_code == 422
    address = f"/api/v1/runs/{installed.open.runs[0]}/continuation"
    assert client.post(address, headers={"Idempotency-Key": "k"}).status_code == 422
    with database.writing() as session:
        projects.take_role(session, user, HIDDEN)
    assert (
        client.post("/api/v1/runs", json=body, headers={"Idempotency-Key": "k"}).status_code == 422
    )


def test_alerts_of_a_run_end_with_the_role(
    app: FastAPI, database: Database, settings: Settings, installed: Installation
) -> None:
    """A user who loses the role sees no more alerts of a run, and pending deliveries are
    not sent.
    """
    user, run_id = installed.users["both"], installed.hidden.runs[0]
    client = client_of(app, database, user)
    with database.writing() as session:
        channel = Channel(user_id=user.id, name="c", kind="webhook", target="", ciphertext="")
        session.add(channel)
        session.flush()
        waiting = Delivery(user_id=user.id, channel_id=channel.id, run_id=run_id, body=MARK)
        session.add(waiting)
        session.flush()
        delivery_id = waiting.id
    assert MARK in client.get("/api/v1/alerts/deliveries").text
    with database.writing() as session:
        projects.take_role(session, user, HIDDEN)
    assert client.get("/api/v1/alerts/deliveries").json()["total"] == 0
    left = client_of(app, database, installed.users["left"])
    assert left.get("/api/v1/alerts/inbox").json()["total"] == 0
    assert left.get("/api/v1/alerts/inbox/unread").json() == {"unread": 0, "newest": []}
    assert MARK not in left.get("/alerts").text
    AlertDelivery(settings, database, Event()).deliver_due()
    with database.reading() as session:
        row = session.get_one(Delivery, delivery_id)
        assert row.ended_at is not None
        assert row.answer == "not sent: you no longer see what it is about"
