"""User administration, for admins: routes and page."""

from typing import Annotated, Any

from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import AtBrowser
from app.auth.permissions import ADMIN
from app.auth.project_parameters import form_project, in_project
from app.auth.routing import Router
from app.dependencies import Db
from app.html.rendering import Context
from app.http.parameters import Body, FormText, RowId, Text
from app.http.path_prefix import public_address
from db.access import accounts, people, projects
from db.access.permissions import MEMBER, ROLES, Permission
from db.errors import HalfstepError, Invalid

api = Router(prefix="/users", tags=["people"])
pages = Router(prefix="/people")


class Account(BaseModel):
    """A user's account."""

    id: int
    name: str
    roles: Annotated[dict[str, str], Field(description="By project; '' is the Default project")]
    is_admin: bool
    runs_commands: bool
    is_active: bool
    created_at: float
    link: Annotated[
        str | None, Field(description="After a reset: path of a one-time sign-in link")
    ] = None


class Accounts(BaseModel):
    """A page of accounts, by name."""

    users: list[Account]
    next: Annotated[str | None, Field(description="`after` of the next page; null on the last")]


class Invitation(Body):
    """A user to invite, with a role."""

    name: Text
    project: Text = projects.DEFAULT
    role: Text = MEMBER


class Invited(BaseModel):
    """A newly created account."""

    id: int
    name: str
    link: Annotated[str, Field(description="Path of a one-time sign-in link, valid for a day")]


class Change(Body):
    """A change of an account."""

    change: people.Change


@api.get("", ADMIN)
def list_users(session: Db, after: Text = "", limit: int = 200) -> Accounts:
    """List the accounts."""
    limit = max(1, min(limit, 1000))
    rows = people.list_people(session, after=after, limit=limit)
    return Accounts(
        users=[_account(*row) for row in rows],
        next=rows[-1].user.name if len(rows) == limit else None,
    )


@api.post("", ADMIN, status_code=201)
@audited("name", "role", "project")
def invite(
    body: Annotated[Invitation, in_project(Invitation, Permission.MANAGE_MEMBERS)],
    session: Db,
    _at_browser: AtBrowser,
) -> Invited:
    """Create an account. Requires a browser, since a stolen token could otherwise create one."""
    user = people.invite(session, body.name, project=body.project, role=body.role)
    token = accounts.make_link_token(session, user)
    return Invited(id=user.id, name=user.name, link=f"/?token={token}")


@api.patch("/{user_id}", ADMIN)
@audited("change")
def change_user(user_id: RowId, body: Change, session: Db, _at_browser: AtBrowser) -> Account:
    """Change or remove an account."""
    user = people.get(session, user_id)
    people.CHANGES[body.change](session, user)
    session.flush()
    account = _account(user, projects.memberships(session, user))
    if body.change == "reset":
        account.link = f"/?token={accounts.make_link_token(session, user)}"
    return account


def _account(user: Any, roles: dict[str, str]) -> Account:
    return Account(
        id=user.id,
        name=user.name,
        roles=roles,
        is_admin=user.is_admin,
        runs_commands=user.runs_commands,
        is_active=user.deactivated_at is None,
        created_at=user.created_at,
    )


@pages.get("", ADMIN)
def show_people(context: Context) -> HTMLResponse:
    """Show all accounts with their roles."""
    return _people(context)


@pages.post("", ADMIN)
@audited("name", "role", "project")
def post_invitation(
    context: Context,
    _at_browser: AtBrowser,
    project: Annotated[str, form_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)],
    name: FormText = "",
    role: FormText = MEMBER,
) -> HTMLResponse:
    """Create an account and show its sign-in link once."""
    try:
        with context.session.begin_nested():
            user = people.invite(context.session, name, project=project, role=role)
            token = accounts.make_link_token(context.session, user)
    except Invalid as error:
        typed = {"name": name, "role": role, "project": project}
        return _people(context, typed=typed, errors=error.errors)
    return _people(context, invited=user.name, token=token)


@pages.post("/{user_id}/{change}", ADMIN)
def change(
    user_id: RowId, change: people.Change, context: Context, _at_browser: AtBrowser
) -> Response:
    """Change an account; a reset shows a new sign-in link once."""
    user = people.get(context.session, user_id)
    try:
        people.CHANGES[change](context.session, user)
    except HalfstepError as error:
        return _people(context, errors={"change": str(error)})
    if change == "reset":
        token = accounts.make_link_token(context.session, user)
        return _people(context, invited=user.name, token=token)
    return context.redirect("/people")


def _people(
    context: Context,
    *,
    typed: dict[str, str] | None = None,
    invited: str = "",
    token: str = "",
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    context.session.flush()
    return context.render(
        "auth/users.html",
        people=people.list_people(context.session),
        projects=[row.name for row in projects.list_projects(context.session)],
        roles=ROLES,
        typed=typed or {"name": "", "role": MEMBER, "project": ""},
        invited=invited,
        link=f"{public_address(context.request)}/?token={token}" if token else "",
        errors=errors,
    )
