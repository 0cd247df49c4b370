"""Account page: password, API tokens and browser sessions."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth import audit, permissions
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, Principal, SignedIn, sign_in
from app.auth.login_throttling import client_of
from app.auth.permissions import ACCOUNT, requires
from app.auth.project_parameters import form_project
from app.dependencies import Db, Hashing
from app.html.rendering import page
from app.http.parameters import RowId, Text
from db.access import accounts, login_attempts, projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.tables import FULL, LARGEST_ID, SignInSession, User

router = APIRouter(prefix="/account")

#: Form value for a token of all projects; no project can have this name.
ANY = "*"
KINDS = {
    "full": "full access",
    **permissions.KINDS,
    "write": "upload watched runs",
    "run": "upload one watched run",
}


@router.get("")
@requires(ACCOUNT)
def show_account(
    request: Request, session: Db, principal: SignedIn, at_browser: AtBrowser, changed: Text = ""
) -> HTMLResponse:
    """Show the account page. changed: "password" after a change of it."""
    return _account(request, session, principal, at_browser, changed=changed)


@router.post("/password")
@requires(ACCOUNT)
def set_password(
    request: Request,
    _hashing: Hashing,
    session: Db,
    principal: SignedIn,
    at_browser: AtBrowser,
    password: Annotated[str, Form()] = "",
    current: Annotated[str, Form()] = "",
) -> Response:
    """Set a password; all other sessions, tokens and links of the user end.

    Requires the current password, to protect an unattended browser, unless it has just signed in
    by a link, or no password is set.
    """
    user = session.get_one(User, principal.user.id)
    try:
        if accounts.needs_current_password(session, user, at_browser):
            client = client_of(request, user.name)
            login_attempts.take(session, **client)
            accounts.check_current_password(user, current)
            login_attempts.release(session, **client)
        accounts.set_password(session, user, password)
    except Invalid as error:
        return _account(request, session, principal, at_browser, errors=error.errors)
    response = RedirectResponse("/account?changed=password", status_code=303)
    sign_in(request, response, session, user)
    return response


@router.post("/tokens")
@requires(ACCOUNT)
@audited("name", "kind", "project", "run_id", "days")
def make_token(
    request: Request,
    session: Db,
    principal: SignedIn,
    at_browser: AtBrowser,
    project: Annotated[str | None, form_project(Permission.VIEW_RUN, none=ANY)],
    name: Annotated[Text, Form()] = "",
    kind: Annotated[Text, Form()] = FULL,
    run_id: Annotated[Text, Form()] = "",
    days: Annotated[Text, Form()] = str(accounts.TOKEN_DAYS),
) -> HTMLResponse:
    """Create a token and show it once."""
    try:
        token, _row = accounts.make_api_token(
            session,
            principal.user,
            name,
            kind,
            project=project,
            run_id=_number("run_id", run_id, LARGEST_ID),
            days=_number("days", days, accounts.MOST_TOKEN_DAYS),
        )
    except Invalid as error:
        return _account(request, session, principal, at_browser, errors=error.errors)
    return _account(request, session, principal, at_browser, token=token)


@router.post("/tokens/{token_id}/revocation")
@requires(ACCOUNT)
def revoke_token(
    token_id: RowId, session: Db, principal: SignedIn, _at_browser: AtBrowser
) -> RedirectResponse:
    """Revoke a token."""
    name = accounts.delete_api_token(session, principal.user, token_id)
    audit.set_detail(session, f"name {name}" if name else "")
    return RedirectResponse("/account", status_code=303)


def _number(field: str, text: str, most: int) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal() or not 1 <= int(text[:100]) <= most:
        allowed = f"1 to {most}, or empty"
        raise Invalid({field: f"{text[:100]!r} is not valid; allowed: {allowed}"})
    return int(text)


@router.post("/sign-ins/deletion")
@requires(ACCOUNT)
def end_sign_ins(session: Db, principal: SignedIn, at_browser: AtBrowser) -> RedirectResponse:
    """Sign out the user's other browsers."""
    accounts.end_sign_ins(session, principal.user, but=at_browser)
    return RedirectResponse("/account", status_code=303)


def _account(
    request: Request,
    session: Session,
    principal: Principal,
    at_browser: SignInSession,
    *,
    changed: str = "",
    token: str = "",
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    user = session.get_one(User, principal.user.id)
    return page(
        request,
        "auth/account.html",
        principal=principal,
        status_code=422 if errors else 200,
        asks_current=accounts.needs_current_password(session, user, at_browser),
        has_password=user.password_hash is not None,
        tokens=accounts.api_tokens(session, principal.user),
        kinds=KINDS,
        projects=[row.name for row in projects.listed(session, principal.grants.projects)],
        days=accounts.TOKEN_DAYS,
        sign_ins=accounts.sign_ins(session, principal.user),
        this=at_browser.token_hash,
        changed=changed,
        token=token,
        roles=projects.memberships(session, principal.user),
        errors=errors or {},
    )
