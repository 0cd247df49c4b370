"""Audit log, for admins: routes and page."""

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import HTMLResponse, StreamingResponse
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session
from starlette.routing import BaseRoute

from app.auth.permissions import ADMIN
from app.auth.routing import Router
from app.dependencies import Db, TheDatabase
from app.html.rendering import Context
from app.http.active_requests import EXPORT
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId, Text, as_run_id
from db.access import accounts, audit
from db.errors import Invalid
from db.paging import Page
from db.tables import AuditEvent

api = Router(prefix="/audit", tags=["people"])
pages = Router()

API = "/api/v1"


class AuditEventRow(BaseModel):
    """An audit event."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    time: float
    user: Annotated[
        str | None, Field(description="User; null if unknown, or for commands on the server")
    ]
    token: Annotated[str | None, Field(description="Name of the API token, if one was used")]
    action: Annotated[str, Field(description="Method and path, or a command")]
    detail: Annotated[str, Field(description="Recorded fields of the request")]
    run_id: int | None
    address: Annotated[str, Field(description="Client address; terminal: the server's")]


class AuditLog(ListPage):
    """Audit events, newest first."""

    audit_events: list[AuditEventRow]


#: In UTC, so that it is independent of the client's time zone.
Since = Annotated[date | None, Query(description="First day, UTC: 2026-11-22")]


def _row(action: AuditEvent, name: str | None) -> AuditEventRow:
    return AuditEventRow.model_validate({**vars(action), "user": name})


@api.get("", ADMIN)
def list_audit_events(
    session: Db,
    run: Annotated[RunId | None, Query(description="Only events of this run")] = None,
    user: Annotated[Text, Query(description="Only events of this user")] = "",
    since: Since = None,
    after: After = "",
    limit: Limit = 1000,
) -> AuditLog:
    """List audit events."""
    filters = conditions(session, run, user, since)
    listed = audit.list_events(session, **filters, after=after, limit=limit)
    rows = [_row(action, name) for action, name in listed.rows]
    return AuditLog(audit_events=rows, total=listed.total, next=listed.next)


def conditions(session: Session, run: int | None, user: str, since: date | None) -> dict[str, Any]:
    """Return the filters of a list of events. Raises Invalid for an unknown user."""
    row = accounts.find_user(session, user) if user.strip() else None
    if user.strip() and row is None:
        allowed = "the name of a user, including removed users"
        raise Invalid({"user": f"there is no user {user[:100]!r}; allowed: {allowed}"})
    begin = datetime.combine(since, time.min, UTC).timestamp() if since else None
    return {"run_id": run, "user_id": row.id if row else None, "since": begin}


@api.get("/export", ADMIN, lasts=EXPORT)
def export_audit_log(database: TheDatabase) -> StreamingResponse:
    """Export the audit log as JSON lines, oldest first."""

    def lines() -> Iterator[str]:
        with database.reading() as session:
            for action, name in audit.all_of_them(session):
                yield json.dumps(_row(action, name).model_dump()) + "\n"

    return StreamingResponse(lines(), media_type="application/jsonl")


@pages.get("/audit", ADMIN)
def show_audit_log(
    context: Context, run: Text = "", user: Text = "", since: Text = "", after: Text = ""
) -> HTMLResponse:
    """Show a page of events, newest first.

    run, user, since: as in the API, but empty values are allowed, as a form sends them.
    """
    events, errors = Page([], 0, None), dict[str, str]()
    try:
        checked = conditions(context.session, _run(run), user, _day(since))
        events = audit.list_events(context.session, **checked, after=after, limit=100)
    except Invalid as error:
        errors = error.errors
    run, user, since = run.strip(), user.strip(), since.strip()
    actions = {action.action for action, _name in events.rows}
    return context.render(
        "auth/audit.html",
        events=events,
        words=describe_actions(context.request.app.routes, actions),
        errors=errors,
        run=run,
        user=user,
        since=since,
    )


def describe_actions(routes: Sequence[BaseRoute], actions: set[str]) -> dict[str, str]:
    """Return what requests do, by action: "Pause a run" for "POST /runs/3/pause".

    The words describe the route, or else the same route of the API. Commands on the server, and
    routes of earlier versions, have none.
    """
    words, of_api = dict[str, str](), dict[str, str]()
    for route in iter_route_contexts(routes):
        description = inspect.getdoc(route.endpoint)
        if not description or not route.path:
            continue
        sentence = re.split(r"[.,:;]", description, maxsplit=1)[0]
        for action in actions:
            method, _, path = action.partition(" ")
            for found, address in ((words, path), (of_api, API + path)):
                if method in (route.methods or ()) and route.path_regex.match(address):
                    found.setdefault(action, sentence)
    return of_api | words


def _run(text: str) -> int | None:
    return as_run_id("run", text.strip()) if text.strip() else None


def _day(text: str) -> date | None:
    if not text.strip():
        return None
    try:
        return date.fromisoformat(text.strip())
    except ValueError as error:
        message = f"{text[:100]!r} is not valid; allowed: a date such as 2026-11-22"
        raise Invalid({"since": message}) from error
