"""Who may sign in: invite, change, remove. For operators."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ADMIN, requires
from app.dependencies import Db
from app.http.parameters import Body, RowId, Text
from db.access import accounts, people, projects
from db.access.permissions import MEMBER

router = APIRouter(prefix="/users", tags=["people"])


class Account(BaseModel):
    """Somebody who may sign in."""

    id: int
    name: str
    roles: Annotated[dict[str, str], Field(description="By project; '' is the one there always is")]
    is_admin: bool
    runs_commands: bool
    is_active: bool
    created_at: float
    link: Annotated[
        str | None, Field(description="Of one that was just reset: path that signs in once")
    ] = None


class Accounts(BaseModel):
    """A page of them, by name. next: what `after` is for the next one, null on the last."""

    users: list[Account]
    next: str | None


class Invitation(Body):
    """Who is to come, and as what."""

    name: Text
    project: Text = projects.DEFAULT
    role: Text = MEMBER


class Invited(BaseModel):
    """An account that was made."""

    id: int
    name: str
    link: Annotated[str, Field(description="Path that signs in once, within a day")]


class Change(Body):
    """What is done with an account."""

    change: people.Change


@router.get("")
@requires(ADMIN)
def list_users(session: Db, _principal: SignedIn, after: Text = "", limit: int = 200) -> Accounts:
    """List the accounts."""
    limit = max(1, min(limit, 1000))
    found = people.listed(session, after=after, limit=limit)
    return Accounts(
        users=[_account(*each) for each in found],
        next=found[-1].user.name if len(found) == limit else None,
    )


@router.post("", status_code=201)
@requires(ADMIN)
@audited("name", "role", "project")
def invite(
    wanted: Invitation, session: Db, _principal: SignedIn, _at_browser: AtBrowser
) -> Invited:
    """Make an account. Only a browser may: else a token that was stolen would make itself one."""
    user = people.invite(session, wanted.name, project=wanted.project, role=wanted.role)
    token = accounts.make_link_token(session, user)
    return Invited(id=user.id, name=user.name, link=f"/?token={token}")


@router.patch("/{user_id}")
@requires(ADMIN)
@audited("change")
def change_user(
    user_id: RowId, wanted: Change, session: Db, _principal: SignedIn, _at_browser: AtBrowser
) -> Account:
    """Change an account; removed, it is not there any more."""
    user = people.get(session, user_id)
    people.CHANGES[wanted.change](session, user)
    session.flush()
    account = _account(user, projects.memberships(session, user))
    if wanted.change == "reset":
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
