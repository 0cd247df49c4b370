"""Page of the audit log, for admins."""

from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from app.auth.audit_api import conditions
from app.auth.authentication import SignedIn
from app.auth.permissions import ADMIN, requires
from app.dependencies import Db
from app.html.rendering import page
from app.http.parameters import Text, as_run_id
from db.access import audit
from db.errors import Invalid
from db.paging import Page

router = APIRouter()


@router.get("/audit")
@requires(ADMIN)
def show_audit_log(
    request: Request,
    session: Db,
    principal: SignedIn,
    run: Annotated[Text, Query()] = "",
    user: Text = "",
    since: Annotated[Text, Query()] = "",
    after: Text = "",
) -> HTMLResponse:
    """Show a page of events, newest first.

    run, user, since: as in the API, but empty values are allowed, as a form sends them.
    """
    filters: dict[str, Any] = {"run": run.strip(), "user": user.strip(), "since": since.strip()}
    events, errors = Page([], 0, None), dict[str, str]()
    try:
        checked = conditions(session, _run(run), user, _day(since))
        events = audit.listed(session, **checked, after=after, limit=100)
    except Invalid as error:
        errors = error.errors
    code = 422 if errors else 200
    return page(
        request,
        "auth/audit.html",
        principal=principal,
        status_code=code,
        events=events,
        errors=errors,
        **filters,
    )


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
