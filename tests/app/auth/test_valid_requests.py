"""A valid request to every writing route succeeds, is audited, and reveals no project."""

import re
from collections.abc import Iterator
from difflib import unified_diff
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from sqlalchemy import func, select

from app.auth.audit import reason_unaudited
from db.database import Database
from db.settings import Settings
from db.tables import AuditEvent, User
from tests.app.auth.identities import IDENTITIES, by_session, by_token
from tests.app.auth.valid_requests import (
    Route,
    Rows,
    Snapshot,
    add_rows,
    dependants,
    request_of,
    writing_routes,
)
from tests.app.installation import HIDDEN, Installation, install
from tests.marks import extended

pytestmark = [pytest.mark.slow, pytest.mark.only_on("sqlite")]
#: A project that does not exist, with a name as long as that of the hidden one.
MISSING = "vault-0"
#: Nonces, CSRF tokens and keys of forms.
SECRET = re.compile(r"[\w-]{22,}")

#: Writing routes that leave no entry in the audit log; each declares its reason by `unaudited`.
UNAUDITED = {
    "PUT /api/v1/artifact-versions/{version_id}/blobs/{sha256}",
    "PUT /api/v1/ingest/{run_id}/{attempt}/{sequence}",
    "PUT /api/v1/ingest/{run_id}/{attempt}/sidecar/{sequence}",
    "PUT /api/v1/ingest/{run_id}/{attempt}/files/{path:path}",
    "POST /api/v1/ingest/{run_id}/{attempt}/source",
    "POST /api/v1/ingest/{run_id}/log",
    "PUT /api/v1/preferences/panels",
    "PUT /api/v1/preferences/toolbar",
    "PUT /api/v1/sweeps/{sweep_id}/claims/{number}",
    "POST /api/v1/alerts/inbox/reading",
    "POST /alerts/inbox/reading",
    "POST /reports/{report_id}/preview",
    "POST /runs/new",
    "POST /shared",
    "POST /sweeps/new",
    "POST /sweeps/new/command",
}


@pytest.fixture
def installed(settings: Settings, database: Database, ada: User, offered: None) -> Installation:
    """Two projects in use, without a member in common."""
    return install(settings, database, ada)


@pytest.fixture
def rows(database: Database, installed: Installation) -> Rows:
    """Rows of the hidden project in the states that routes need."""
    return add_rows(database, installed.hidden)


def test_every_writing_route_has_a_valid_request_and_an_entry_in_the_audit_log(
    app: FastAPI, settings: Settings, database: Database, installed: Installation, rows: Rows
) -> None:
    """An admin's valid request succeeds on each writing route, and is audited unless declared."""
    with database.writing() as session:
        owner = session.get_one(User, installed.hidden.owner.id)
        owner.is_admin = owner.runs_commands = True
    browser = by_session("owner")(app, database, installed)
    script = by_token("owner")(app, database, installed)
    snapshot, wrong, requests = Snapshot(settings), [], 0
    for route in writing_routes(app):
        snapshot.restore()
        caller = script if "/ingest" in route.path else browser
        address, options = request_of(app, route, installed.hidden, rows)
        last = _last_event(database)
        answer = caller.request(route.method, address, **options)
        recorded = _last_event(database) > last
        requests += 1
        if answer.status_code >= 400:
            wrong.append(f"{route} {options}: {answer.status_code} {answer.text[:300]}")
        elif recorded == bool(reason_unaudited(route.endpoint)):
            wrong.append(
                f"{route}: recorded {recorded}, reason {reason_unaudited(route.endpoint)!r}"
            )
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert requests > 160
    declared = {str(each) for each in writing_routes(app) if reason_unaudited(each.endpoint)}
    assert declared == UNAUDITED


def _last_event(database: Database) -> int:
    with database.reading() as session:
        return session.scalar(select(func.max(AuditEvent.id))) or 0


def _naming(
    app: FastAPI, installed: Installation, rows: Rows
) -> Iterator[tuple[Route, str, dict[str, Any]]]:
    """Yield the valid requests that name the hidden project."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if context.path and hasattr(route, "dependant") and "GET" in route.methods:
            names = {each.alias for of in dependants(route.dependant) for each in of.query_params}
            known = {"project": HIDDEN, "name": "valid"}
            params = {name: value for name, value in known.items() if name in names}
            if "project" in params:
                reading = Route("GET", context.path, route.endpoint, frozenset())
                yield reading, context.path, {"params": params}
    for route in writing_routes(app):
        address, options = request_of(app, route, installed.hidden, rows)
        if any(
            value in (HIDDEN, f"in:{HIDDEN}")
            for part in ("params", "json", "data")
            for value in options.get(part, {}).values()
        ):
            yield route, address, options


@pytest.mark.parametrize(
    "name",
    ["outsider's browser", "outsider's token to send", *extended(["outsider", "limited token"])],
)
def test_no_response_reveals_whether_a_project_exists(
    app: FastAPI,
    settings: Settings,
    database: Database,
    installed: Installation,
    rows: Rows,
    name: str,
) -> None:
    """A hidden project and a missing one get the same status and text."""
    caller = IDENTITIES[name](app, database, installed)
    snapshot, wrong, requests = Snapshot(settings), [], 0
    for route, address, options in _naming(app, installed, rows):
        answers = []
        for project in (HIDDEN, MISSING):
            snapshot.restore()
            sent = {
                part: {key: _rename(value, project) for key, value in fields.items()}
                if isinstance(fields, dict)
                else fields
                for part, fields in options.items()
            }
            answer = caller.request(route.method, address, **sent)
            answers.append((answer.status_code, _comparable(answer.text, project)))
            requests += 1
        if answers[0] != answers[1] or answers[0][0] < 400:
            wrong.append(f"{route} {options}: {_difference(*answers)}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert requests > 40


def _comparable(text: str, project: str) -> str:
    """Return a text without the parts that differ between requests."""
    return SECRET.sub("", text.replace(project, HIDDEN))


def _difference(one: tuple[int, str], other: tuple[int, str]) -> str:
    lines = unified_diff(one[1].splitlines(), other[1].splitlines(), lineterm="", n=0)
    return f"{one[0]} {other[0]} {' '.join(lines)[:600]}"


def _rename(value: object, project: str) -> object:
    return value.replace(HIDDEN, project) if isinstance(value, str) else value
