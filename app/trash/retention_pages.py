"""Page of retention rules."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import Principal, SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, Posted
from app.html.flash import back_to
from app.html.rendering import page
from app.http.parameters import Text
from app.trash.retention_job import project_of
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.files import retention
from db.files.pruning import PINNED
from db.files.retention import FIELDS, Preview
from db.telemetry import frozen_steps

router = APIRouter(prefix="/retention")

Scope = Annotated[Text, Form()]


@router.get("")
@requires(SIGNED_IN)
def show_rules(request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show the rules of visible projects."""
    return _page(request, session, principal, {})


@router.post("")
@requires(SIGNED_IN)
@audited("scope", "checkpoint_days", "log_days")
def set_rule(
    request: Request, session: Db, principal: SignedIn, posted: Posted, scope: Scope = ""
) -> Response:
    """Set a rule if its preview is confirmed; otherwise show the preview or the errors."""
    project = project_of(session, principal.grants, scope)
    typed = {"scope": scope} | {name: str(posted.get(name, ""))[:50] for name in FIELDS}
    try:
        rules = retention.checked(typed)
    except Invalid as error:
        return _page(request, session, principal, typed, errors=error.errors)
    confirmed = repr(rules)
    if str(posted.get("confirmed", "")) != confirmed:
        audit.discard(request)  # nothing is changed yet
        preview = retention.preview(session, project, rules)
        return _page(request, session, principal, typed, preview=preview, confirmation=confirmed)
    retention.set_rule(session, principal.user, project, rules)
    return back_to(request, "/retention", "The rule is set.")


@router.post("/deletion")
@requires(SIGNED_IN)
@audited("scope")
def end_rule(request: Request, session: Db, principal: SignedIn, scope: Scope = "") -> Response:
    """Delete a rule."""
    retention.end_rule(session, project_of(session, principal.grants, scope))
    return back_to(request, "/retention", "The rule is deleted.")


def _page(
    request: Request,
    session: Session,
    principal: Principal,
    typed: dict[str, str],
    *,
    errors: dict[str, str] | None = None,
    preview: Preview | None = None,
    confirmation: str = "",
) -> HTMLResponse:
    seen = projects.listed(session, principal.grants.projects)
    names = {row.name for row in seen}
    managed = [
        row.name for row in seen if principal.grants.may(Permission.MANAGE_MEMBERS, row.name)
    ]
    rules = retention.listed(session)
    frozen_runs, frozen_bytes = frozen_steps.usage(session)
    return page(
        request,
        "trash/retention.html",
        principal=principal,
        status_code=422 if errors else 200,
        rules=[rule for rule in rules if rule.project is None or rule.project in names],
        managed=managed,
        fields=FIELDS,
        pinned=PINNED,
        typed={"scope": "", "checkpoint_days": "", "log_days": ""} | typed,
        errors=errors or {},
        preview=preview,
        confirmation=confirmation,
        frozen_runs=frozen_runs,
        frozen_bytes=frozen_bytes,
    )
