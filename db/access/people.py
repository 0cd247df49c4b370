"""User administration by admins."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.access import accounts, projects
from db.errors import Invalid, NotFound
from db.tables import Membership, User


class Person(NamedTuple):
    """An account with its roles by project."""

    user: User
    roles: dict[str, str]


def list_people(session: Session, *, after: str = "", limit: int = 1000) -> list[Person]:
    """List the accounts that were not removed, by name. after: the name of the last one seen."""
    query = select(User).where(User.removed_at.is_(None), User.name > after)
    users = session.scalars(query.order_by(User.name).limit(limit)).all()
    roles: dict[int, dict[str, str]] = {user.id: {} for user in users}
    memberships = (
        select(Membership).where(Membership.user_id.in_(roles)).order_by(Membership.project)
    )
    for row in session.scalars(memberships):
        roles[row.user_id][row.project] = row.role
    return [Person(user, roles[user.id]) for user in users]


def get(session: Session, user_id: int) -> User:
    """Return an account that was not removed. Raises NotFound."""
    user = session.get(User, user_id)
    if user is None or user.removed_at is not None:
        raise NotFound(f"There is no account {user_id}.")
    return user


def named(session: Session, name: str) -> User:
    """Return the account of that name. Raises NotFound."""
    user = accounts.find_user(session, name)
    if user is None or user.removed_at is not None:
        raise NotFound(f"There is no account {name[:100]!r}.")
    return user


def invite(session: Session, name: str, *, project: str, role: str) -> User:
    """Create an account with a role. Raises Invalid, NotFound."""
    user = accounts.make_user(session, name)
    projects.set_role(session, user, project, role)
    return user


def set_subject(session: Session, user: User, subject: str) -> None:
    """Set a user's OIDC subject. Raises Invalid if another user has it."""
    other = session.scalar(select(User).where(User.subject == subject, User.id != user.id))
    if other is not None:
        raise Invalid({"subject": f"it already belongs to {other.name!r}; use another one"})
    user.subject = subject or None


def make_admin(session: Session, user: User) -> None:
    """Make a user admin."""
    accounts.set_admin(session, user, is_admin=True)


def revoke_admin(session: Session, user: User) -> None:
    """Remove admin from a user. Raises Conflict for the last admin."""
    accounts.set_admin(session, user, is_admin=False)


def allow_commands(_session: Session, user: User) -> None:
    """Allow a user to queue command lines."""
    user.runs_commands = True


def refuse_commands(_session: Session, user: User) -> None:
    """Forbid a user to queue command lines."""
    user.runs_commands = False


Change = Literal[
    "deactivate", "activate", "remove", "reset", "admin", "no-admin", "commands", "no-commands"
]
#: Actions on an account, by the last part of the route.
CHANGES: Mapping[Change, Callable[[Session, User], None]] = MappingProxyType(
    {
        "deactivate": accounts.deactivate,
        "activate": accounts.reactivate,
        "remove": accounts.remove,
        "reset": accounts.reset,
        "admin": make_admin,
        "no-admin": revoke_admin,
        "commands": allow_commands,
        "no-commands": refuse_commands,
    }
)
