"""The user's own account: routes of API tokens, and the page with password and sign-ins."""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import Form
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from app.auth import audit, permissions
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn, sign_in
from app.auth.login_throttling import client_of
from app.auth.permissions import ACCOUNT
from app.auth.project_parameters import form_project, in_project
from app.auth.routing import Router
from app.dependencies import Db, Hashing
from app.html.rendering import Context
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, FormText, RowId, Text
from db.access import accounts, login_attempts, projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.tables import FULL, LARGEST_ID, ONE_RUN, SignInSession, User

api = Router(prefix="/tokens", tags=["tokens"])
pages = Router(prefix="/account")


class TokenName(Body):
    """Name, scope, project and lifetime of a token."""

    name: Text
    kind: Annotated[
        Literal["full", "read", "submit", "control", "write", "run"],
        Field(
            description="full: all permissions of the user. read: view and download. submit: read, "
            "and submit runs. control: submit, and control runs. write: only upload watched runs. "
            "run: only upload one watched run."
        ),
    ] = "full"
    project: Text | None = None
    """Project that the token is limited to; null: all"""
    run_id: Annotated[RowId | None, Field(description="For kind run: the run to upload")] = None
    days: int | None = accounts.TOKEN_DAYS
    """Days until it expires; null: never"""


class TokenRow(BaseModel):
    """A token; its secret is not stored."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    name: str
    kind: str
    project: str | None
    run_id: int | None
    created_at: float
    expires_at: float | None
    used_at: float | None


class NewToken(TokenRow):
    """A newly created token."""

    token: Annotated[str, Field(description="The secret. It is not shown again.")]


class Tokens(ListPage):
    """Tokens, newest first."""

    tokens: list[TokenRow]


@api.get("", ACCOUNT)
def list_tokens(session: Db, principal: SignedIn, after: After = "", limit: Limit = 1000) -> Tokens:
    """List the user's tokens."""
    listed = accounts.page_of_api_tokens(session, principal.user, after=after, limit=limit)
    tokens = [TokenRow.model_validate(row) for (row,) in listed.rows]
    return Tokens(tokens=tokens, total=listed.total, next=listed.next)


@api.post("", ACCOUNT, status_code=201)
@audited("name", "kind", "project", "run_id", "days")
def make_token(
    body: Annotated[TokenName, in_project(TokenName, Permission.VIEW_RUN, is_invalid=True)],
    session: Db,
    principal: SignedIn,
    _at_browser: AtBrowser,
) -> NewToken:
    """Create a token. Requires a browser, since a stolen token could otherwise create others."""
    token, row = accounts.make_api_token(
        session,
        principal.user,
        body.name,
        body.kind,
        project=body.project,
        run_id=body.run_id,
        days=body.days,
    )
    return NewToken(**TokenRow.model_validate(row).model_dump(), token=token)


@api.delete("/{token_id}", ACCOUNT, status_code=204)
def revoke_token(token_id: RowId, session: Db, principal: SignedIn) -> None:
    """Revoke one of the user's tokens."""
    name = accounts.delete_api_token(session, principal.user, token_id)
    audit.set_detail(session, f"name {name}" if name else "")


#: Form value for a token of all projects; no project can have this name.
ANY = "*"
NEW_TOKEN = {
    "name": "",
    "kind": FULL,
    "project": ANY,
    "run_id": "",
    "days": str(accounts.TOKEN_DAYS),
}
KINDS = {
    "full": "full access",
    **permissions.KINDS,
    "write": "upload watched runs",
    "run": "upload one watched run",
}


@pages.get("", ACCOUNT)
def show_account(context: Context, at_browser: AtBrowser, changed: Text = "") -> HTMLResponse:
    """Show the account page. changed: "password" after a change of it."""
    return _account(context, at_browser, changed=changed)


@pages.post("/password", ACCOUNT)
def set_password(
    _hashing: Hashing,
    context: Context,
    at_browser: AtBrowser,
    password: Annotated[str, Form()] = "",
    current: Annotated[str, Form()] = "",
) -> Response:
    """Set a password; all other sessions, tokens and links of the user end.

    Requires the current password, to protect an unattended browser, unless it has just signed in
    by a link, or no password is set.
    """
    session = context.session
    user = session.get_one(User, context.user.id)
    try:
        if accounts.needs_current_password(session, user, at_browser):
            client = client_of(context.request, user.name)
            login_attempts.take(session, **client)
            accounts.check_current_password(user, current)
            login_attempts.release(session, **client)
        accounts.set_password(session, user, password)
    except Invalid as error:
        return _account(context, at_browser, errors=error.errors)
    response = context.redirect("/account?changed=password")
    sign_in(context.request, response, session, user)
    return response


@pages.post("/tokens", ACCOUNT)
@audited("name", "kind", "project", "run_id", "days")
def post_token(
    context: Context,
    at_browser: AtBrowser,
    project: Annotated[str | None, form_project(Permission.VIEW_RUN, none=ANY)],
    name: FormText = "",
    kind: FormText = FULL,
    run_id: FormText = "",
    days: FormText = str(accounts.TOKEN_DAYS),
) -> HTMLResponse:
    """Create a token and show it once."""
    try:
        token, _row = accounts.make_api_token(
            context.session,
            context.user,
            name,
            kind,
            project=project,
            run_id=_number("run_id", run_id, LARGEST_ID) if kind == ONE_RUN else None,
            days=_number("days", days, accounts.MOST_TOKEN_DAYS),
        )
    except Invalid as error:
        given = {"name": name, "kind": kind, "run_id": run_id, "days": days}
        given["project"] = ANY if project is None else project
        return _account(context, at_browser, errors=error.errors, given=given)
    return _account(context, at_browser, token=token)


@pages.post("/tokens/{token_id}/revocation", ACCOUNT)
def post_revocation(
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


@pages.post("/sign-ins/deletion", ACCOUNT)
def end_sign_ins(session: Db, principal: SignedIn, at_browser: AtBrowser) -> RedirectResponse:
    """Sign out the user's other browsers."""
    accounts.end_sign_ins(session, principal.user, but=at_browser)
    return RedirectResponse("/account", status_code=303)


def _account(
    context: Context,
    at_browser: SignInSession,
    *,
    errors: dict[str, str] | None = None,
    changed: str = "",
    token: str = "",
    given: Mapping[str, str] = NEW_TOKEN,
) -> HTMLResponse:
    """Show the page. given: fields of a token that was not created."""
    session, principal = context.session, context.principal
    user = session.get_one(User, context.user.id)
    return context.render(
        "auth/account.html",
        asks_current=accounts.needs_current_password(session, user, at_browser),
        has_password=user.password_hash is not None,
        tokens=accounts.api_tokens(session, principal.user),
        kinds=KINDS,
        projects=[row.name for row in projects.list_projects(session, principal.grants.projects)],
        sign_ins=accounts.sign_ins(session, principal.user),
        this=at_browser.token_hash,
        roles=projects.memberships(session, principal.user),
        errors=errors,
        changed=changed,
        token=token,
        server_url=context.settings.address,
        given=given,
    )
