"""Permissions of every role on every route, for the user's own runs and those of other users and
projects.
"""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.sse import EventSourceResponse
from starlette.testclient import TestClient

from app.auth.permissions import (
    ACCOUNT,
    ADMIN,
    ANY_SUBMITTER,
    NO_SUBMITTING,
    RUN_COMMANDS,
    SHARED_LINK,
    SIGNED_IN,
    access_of,
)
from app.http.active_requests import STREAM
from app.sweeps.sweep_submission import SweepSubmission, begin
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER, Permission
from db.database import Database
from db.tables import CheckpointFile, Run, Sweep, User
from tests.app.auth.permissions_made import routes_of, script_of
from tests.app.conftest import submit

#: What each role may, word for word as docs/how-to/teams.md has it: of one's own runs, and of
#: others'.
ALLOWED = {
    VIEWER: ({"view_run", "download_files"}, {"view_run", "download_files"}),
    MEMBER: (
        {"view_run", "download_files", "submit_run", "control_run"},
        {"view_run", "download_files", "submit_run"},
    ),
    MAINTAINER: (set(Permission), set(Permission)),
}
PROJECT, HIDDEN = "vision", "hush-hush"


@pytest.fixture
def people(database: Database, ada: User, offered: None) -> dict[str, User]:
    """A user of each role in a project, and one with a role in another project only."""
    with database.writing() as session:
        projects.make(session, PROJECT)
        projects.make(session, "speech")
        found = {role: accounts.make_user(session, role) for role in ALLOWED}
        for role, user in found.items():
            projects.set_role(session, user, PROJECT, role)
        found["outsider"] = accounts.make_user(session, "outsider")
        projects.set_role(session, found["outsider"], "speech", MAINTAINER)
    return found


def _sweep(database: Database, user: User, **place: Any) -> Sweep:
    space: dict[str, Any] = {"training.batch_size": [8, 16]}
    given = SweepSubmission(recipe="digits", space=space, goal="minimise", **place)
    with database.writing() as session:
        return begin(session, user, given)


def test_every_route_declares_what_it_requires(app: FastAPI) -> None:
    """Each route declares a permission; without one it would be for admins only, by accident."""
    undeclared = [path for _method, path, route in routes_of(app) if not hasattr(route, "access")]
    assert not undeclared


def test_streams_count_against_the_limit_of_streams(app: FastAPI) -> None:
    """Event streams, and no other routes, count against the limit of streams."""
    routes = [route.original_route for route in iter_route_contexts(app.routes)]
    streams = [
        route for route in routes if getattr(route, "response_class", 0) is EventSourceResponse
    ]
    counted = [
        route for route in routes if access_of(getattr(route, "endpoint", None)).lasts == STREAM
    ]
    assert len(streams) == 4
    assert counted == streams


@pytest.mark.slow
def test_a_role_allows_what_it_says_on_every_route(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """Each role gets 403 for actions without permission, and 404 for hidden objects, on every
    route.

    Roles are tried in order of permissions, so that nothing is deleted before all requests.
    """
    for role, user in people.items():
        client = script_of(app, database, user)
        own = submit(database, user if role == MEMBER else ada, project=PROJECT)
        others = submit(database, ada, project=PROJECT)
        sweeps = [
            _sweep(database, user if role == MEMBER else ada, project=PROJECT),
            _sweep(database, ada, project=PROJECT),
        ]
        for method, path, endpoint in routes_of(app):
            need = access_of(endpoint).need
            is_stream = path.endswith("/live") and need in ALLOWED.get(role, ((),))[0]
            if need in (SIGNED_IN, ACCOUNT, SHARED_LINK) or is_stream:  # which would not end
                continue
            for i, run in enumerate((own, others)):
                if i == 0 and role != MEMBER:  # `own` is not of that role's user
                    continue
                ids = {"run_id": run.id, "sweep_id": sweeps[i].id}
                address = re.sub(r"\{(\w+)[^}]*\}", lambda m, ids=ids: str(ids.get(m[1], 1)), path)
                if i and role == MEMBER and "{run_id" not in path and "{sweep_id" not in path:
                    continue  # it was sent already
                answer = client.request(method, address)
                result = f"{role} {method} {address}: {answer.status_code} {answer.text[:200]}"
                is_placed = need not in (RUN_COMMANDS, ADMIN)
                missing = f"There is no {'run' if 'run_id' in path else 'sweep'} "
                is_hidden = answer.status_code == 404 and missing in answer.text
                if need == ANY_SUBMITTER:  # an outsider submits to a project of their own
                    assert (answer.status_code == 403) == (role == VIEWER), result
                elif role == "outsider" and is_placed:
                    assert is_hidden or (method, answer.status_code) == ("HEAD", 404), result
                elif is_placed and need in ALLOWED[role][i]:
                    assert answer.status_code != 403, result
                    assert not is_hidden, result
                else:
                    assert answer.status_code == 403, result
                    assert method == "HEAD" or answer.json()["code"] == "forbidden", result


@pytest.mark.slow
def test_an_admin_is_denied_nothing(app: FastAPI, database: Database, ada: User) -> None:
    """The first account is an admin."""
    client = script_of(app, database, ada)
    for method, path, _endpoint in routes_of(app):
        if path.endswith("/live"):  # which would not end
            continue
        answer = client.request(method, re.sub(r"\{[^}]+\}", "1", path))
        assert answer.status_code != 403 or answer.json()["code"] == "not_for_scripts", path


@pytest.mark.extended
@pytest.mark.slow
def test_what_one_may_not_see_is_on_no_page(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """Hidden runs appear on no page of an outsider: not in lists, counts or suggestions,
    nor by id.
    """
    hidden = submit(database, ada, project=PROJECT, name=HIDDEN, tags=HIDDEN)
    sweep = _sweep(database, ada, project=PROJECT, name=HIDDEN)
    with database.writing() as session:
        session.get_one(Run, hidden.id).group_id = hidden.id
        projects.make(session, HIDDEN)
    submit(database, ada, project=HIDDEN)
    outsider = script_of(app, database, people["outsider"])
    viewer = script_of(app, database, people[VIEWER])
    pages = [path for method, path, _ in routes_of(app) if method == "GET" and "live" not in path]
    seen = 0
    for path in pages:
        ids = {"sweep_id": str(sweep.id)}
        address = re.sub(r"\{(\w+)[^}]*\}", lambda m, ids=ids: ids.get(m[1], str(hidden.id)), path)
        questions = {"runs": str(hidden.id), "from": str(hidden.id), "filter": ""}
        if path.startswith("/api/v1/"):  # which refuses what it does not know
            unknown = outsider.get(address, params=questions).json().get("errors", {})
            questions = {name: each for name, each in questions.items() if name not in unknown}
        assert HIDDEN not in outsider.get(address, params=questions).text, address
        seen += HIDDEN in viewer.get(address, params=questions).text
    assert seen > 8
    found = outsider.get("/api/v1/runs").json()
    assert (found["runs"], found["total"]) == ([], 0)
    assert viewer.get("/api/v1/runs").json()["total"] == 1 + 1  # and the sweep's first


def test_a_rejection_names_the_request(
    app: FastAPI, database: Database, people: dict[str, User]
) -> None:
    """A rejection names what was requested; a user without any project gets its own message."""
    member = script_of(app, database, people[MEMBER])
    refused = f"Your role does not allow you to {{}} the project {PROJECT!r}."
    rule = {"scope": f"in:{PROJECT}", "log_days": 3}
    answer = member.put("/api/v1/retention", json=rule)
    assert answer.json()["detail"] == refused.format("set retention rules of")
    change = {"name": PROJECT, "viewers_download": True}
    answer = member.patch("/api/v1/projects", json=change)
    assert answer.json()["detail"] == refused.format("change")
    viewer = script_of(app, database, people[VIEWER])
    preset = {"name": "mine", "recipe": "digits", "config": {}}
    assert viewer.post("/api/v1/presets", json=preset).json()["detail"] == NO_SUBMITTING
    run = {"recipe": "digits", "config": {}}
    errors = viewer.post("/api/v1/runs", json=run).json()["errors"]
    assert errors["project"] == NO_SUBMITTING


@pytest.mark.slow
def test_runs_go_where_one_may_submit(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """Runs, sweeps and watched runs go to permitted projects only; the error names these."""
    hidden = submit(database, ada, project="speech")
    for role, is_allowed in ((VIEWER, False), (MEMBER, True), ("outsider", False)):
        client = script_of(app, database, people[role])
        run = {"recipe": "digits", "project": PROJECT}
        sweep = {**run, "space": {"training.batch_size": [8]}, "goal": "minimise"}
        for path, given in (("/runs", run), ("/sweeps", sweep)):
            answer = client.post(f"/api/v1{path}", json=given)
            assert answer.status_code == (201 if is_allowed else 422), (role, path)
            if not is_allowed:
                why = NO_SUBMITTING if role == VIEWER else "'vision' is not valid; allowed: "
                assert why in answer.json()["errors"]["project"]
        rule = {"condition": "ended", "scope": "project", "project": "speech"}
        result = client.post("/api/v1/alerts/rules", json=rule)
        assert result.status_code == (201 if role == "outsider" else 422), (role, result.text)
    for given in (
        {"project": "nowhere"},
        {"project": PROJECT, "after_id": hidden.id},
        {"project": PROJECT, "parent_id": hidden.id, "parent_step": 1},
        {"project": PROJECT, "compared_with": hidden.id},
        {"project": PROJECT, "config": {"weights": {"run": hidden.id}}},
    ):
        answer = script_of(app, database, people[MEMBER]).post(
            "/api/v1/runs", json={"recipe": "digits", **given}
        )
        assert answer.status_code in (404, 409, 422), given


def test_weights_are_uploaded_with_permission_to_submit(
    app: FastAPI, database: Database, people: dict[str, User]
) -> None:
    """Uploading weights requires permission to submit to a project, or to the token's project."""
    body = {"content": b"PK\x03\x04 weights"}
    for role, project, status in (
        (VIEWER, None, 403),
        (MEMBER, None, 201),
        (MEMBER, PROJECT, 201),
        (MEMBER, "speech", 403),
    ):
        with database.writing() as session:
            if project == "speech":
                projects.set_role(session, people[role], project, VIEWER)
            user = people[role]
            token, _row = accounts.make_api_token(session, user, "script", project=project)
        headers = {"Authorization": f"Bearer {token}"}
        client = TestClient(app, base_url="http://localhost", headers=headers)
        answer = client.put("/api/v1/uploads/net.pt", **body)
        assert answer.status_code == status, (role, project, answer.text)
        if status == 403:
            assert "ask a maintainer of a project" in answer.json()["detail"]


def test_many_runs_are_each_requested(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """A bulk request changes the permitted runs, and gives a reason for each of the others."""
    own = submit(database, people[MEMBER], project=PROJECT)
    others = submit(database, ada, project=PROJECT)
    hidden = submit(database, ada, project="speech")
    member = script_of(app, database, people[MEMBER])
    ids = [own.id, others.id, hidden.id]
    answer = member.post("/api/v1/runs/bulk", json={"action": "cancel", "runs": ids}).json()
    assert answer["done"] == [own.id]
    words = {each["id"]: each["detail"] for each in answer["refused"]}
    assert "control other people's runs of the project 'vision'" in words[others.id]
    assert words[hidden.id] == f"There is no run {hidden.id}."
    answer = member.post("/api/v1/runs/bulk", json={"action": "delete", "runs": [own.id]}).json()
    assert answer["done"] == []


@pytest.mark.slow
def test_nothing_is_got_round_by_submitting(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """A submission can neither start from files that the user may not download, nor take another
    run's position in the queue.
    """
    source = submit(database, ada, project=PROJECT)
    with database.writing() as session:
        projects.get(session, PROJECT).viewers_download = False
        projects.set_role(session, people[VIEWER], "speech", MEMBER)
        file: dict[str, Any] = {"sha256": "0" * 64, "size_bytes": 1, "attempt": 1, "reason": ""}
        for kind in ("checkpoint", "weights"):
            row = CheckpointFile(run_id=source.id, step=5, kind=kind, key=f"{kind}.pt", **file)
            session.add(row)
    viewer = script_of(app, database, people[VIEWER])
    given: dict[str, dict[str, Any]] = {
        "parent_id": {"parent_id": source.id, "parent_step": 5},
        "weights.run": {"config": {"weights": {"run": source.id}}},
    }
    for field, start in given.items():
        wanted = {"recipe": "digits", "project": "speech", **start}
        errors = viewer.post("/api/v1/runs", json=wanted).json()["errors"]
        assert field in errors or field.partition(".")[0] in errors, errors
    member = script_of(app, database, people[MEMBER])
    wanted = {"recipe": "digits", "project": PROJECT, "priority": 5}
    refused = member.post("/api/v1/runs", json=wanted).json()["errors"]
    assert "permission to prioritize" in refused["priority"]
    sweep = {**wanted, "space": {"training.batch_size": [8]}, "goal": "minimise"}
    assert member.post("/api/v1/sweeps", json=sweep).status_code == 422
    assert member.post("/api/v1/runs", json=wanted | {"priority": -5}).status_code == 201
    wanted = {"recipe": "digits"}  # of the only project that there is for them
    assert member.post("/api/v1/runs", json=wanted).json()["project"] == PROJECT
    may = member.get("/runs").text.partition('data-may="')[2].partition('"')[0].split()
    assert "submit_run" in may
    assert "prioritize_run" not in may


def test_a_token_of_one_project_is_no_operators(
    app: FastAPI, database: Database, ada: User, people: dict[str, User]
) -> None:
    """A token of one project gives no admin access, whoever owns it."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script", project=PROJECT)
    headers = {"Authorization": f"Bearer {token}"}
    client = TestClient(app, base_url="http://localhost", headers=headers)
    for path in ("users", "audit", "secrets"):
        assert client.get(f"/api/v1/{path}").status_code == 403, path
