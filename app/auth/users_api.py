"""Routes of the user administration, for admins."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ADMIN, requires
from app.auth.project_parameters import in_project
from app.dependencies import Db
from app.http.parameters import Body, RowId, Text
from db.access import accounts, people, projects
from db.access.permissions import MEMBER, Permission

router = APIRouter(prefix="/users", tags=["people"])


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


@router.get("")
@requires(ADMIN)
def list_users(session: Db, _principal: SignedIn, after: Text = "", limit: int = 200) -> Accounts:
    """List the accounts."""
    limit = max(1, min(limit, 1000))
    rows = people.listed(session, after=after, limit=limit)
    return Accounts(
        users=[_account(*row) for row in rows],
        next=rows[-1].user.name if len(rows) == limit else None,
    )


@router.post("", status_code=201)
@requires(ADMIN)
@audited("name", "role", "project")
def invite(
    body: Annotated[Invitation, in_project(Invitation, Permission.MANAGE_MEMBERS)],
    session: Db,
    _principal: SignedIn,
    _at_browser: AtBrowser,
) -> Invited:
    """Create an account. Requires a browser, since a stolen token could otherwise create one."""
    user = people.invite(session, body.name, project=body.project, role=body.role)
    token = accounts.make_link_token(session, user)
    return Invited(id=user.id, name=user.name, link=f"/?token={token}")


@router.patch("/{user_id}")
@requires(ADMIN)
@audited("change")
def change_user(
    user_id: RowId, body: Change, session: Db, _principal: SignedIn, _at_browser: AtBrowser
) -> Account:
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
