"""Read-only links: runs and comparisons, visible without a sign-in.

A link shows what its maker may share at that moment: it ends with that permission.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from db.access import permissions
from db.access.accounts import DAY, IS_ACTIVE, hash_of
from db.access.permissions import Grants, Permission
from db.database import now
from db.errors import Invalid, NotFound
from db.paging import Page, page
from db.tables import NOT_DELETED, Run, SharedLink, SharedRun, User

#: Range of a link's lifetime in days.
DAYS = (1, 7, 30, 90)
#: Limit per user.
MOST = 100


@dataclass(frozen=True)
class Shown:
    """The content of a link."""

    link: SharedLink
    maker: str
    runs: list[int]  # in order
    grants: Grants  # of its holders, who see nothing else


def make(session: Session, user: User, run_ids: Sequence[int], days: int) -> tuple[str, SharedLink]:
    """Return the secret of a new link, which cannot be read again, and its row.

    run_ids: runs that the user may share. Raises Invalid.
    """
    if days not in DAYS:
        allowed = ", ".join(map(str, DAYS))
        raise Invalid({"days": f"{days} is not allowed; allowed: {allowed}"})
    moment = session.scalars(select(now())).one()
    _delete(session, SharedLink.user_id == user.id, SharedLink.expires_at < moment)
    mine = select(func.count()).where(SharedLink.user_id == user.id)
    if (session.scalar(mine) or 0) >= MOST:
        raise Invalid({"runs": f"you have {MOST} links; allowed: no more, revoke some"})
    secret = secrets.token_urlsafe(32)
    link = SharedLink(token_hash=hash_of(secret), user_id=user.id, expires_at=moment + days * DAY)
    session.add(link)
    session.flush()
    session.add_all(
        SharedRun(link_id=link.id, run_id=run_id, place=position)
        for position, run_id in enumerate(run_ids)
    )
    session.flush()
    return secret, link


def of_runs(session: Session, run_ids: Sequence[int], *, after: str = "", limit: int) -> Page:
    """Return a page of the links that show all of these runs, newest first.

    Each has the name of its creator and the number of its runs.
    """
    showing = select(SharedRun.link_id).where(SharedRun.run_id.in_(run_ids))
    showing = showing.group_by(SharedRun.link_id).having(func.count() == len(run_ids))
    count = select(func.count()).where(SharedRun.link_id == SharedLink.id).scalar_subquery()
    query = select(SharedLink, User.name, count).join(User, User.id == SharedLink.user_id)
    query = query.where(SharedLink.id.in_(showing), SharedLink.expires_at > now())
    return page(session, query, (SharedLink.id,), after=after, limit=limit, newest_first=True)


def revoke(session: Session, link_id: int, grants: Grants) -> None:
    """Revoke a link: the user's own, or one to a run of a project that the user maintains.

    Raises NotFound.
    """
    link = session.get(SharedLink, link_id)
    projects = select(Run.project).join(SharedRun, SharedRun.run_id == Run.id)
    projects = projects.where(SharedRun.link_id == link_id).distinct()
    may_revoke = link is not None and (
        link.user_id == grants.user_id
        or any(
            grants.may(Permission.MANAGE_MEMBERS, project) for project in session.scalars(projects)
        )
    )
    if not may_revoke:
        raise NotFound(f"There is no read-only link {link_id} that you may revoke.")
    _delete(session, SharedLink.id == link_id)


def find(session: Session, secret: str) -> Shown | None:
    """Return the content of a link; None if it has ended or does not exist."""
    query = select(SharedLink, User).join(User, User.id == SharedLink.user_id)
    query = query.where(SharedLink.token_hash == hash_of(secret), SharedLink.expires_at > now())
    row = session.execute(query.where(IS_ACTIVE)).one_or_none()
    if row is None:
        return None
    link, maker = row
    shown = select(Run.id, Run.project).join(SharedRun, SharedRun.run_id == Run.id)
    shown = shown.where(SharedRun.link_id == link.id, NOT_DELETED).order_by(SharedRun.place)
    projects = {row[0]: row[1] for row in session.execute(shown)}
    theirs = permissions.grants(session, maker)
    if not projects or not all(
        theirs.may(Permission.SHARE_RUN, project) for project in projects.values()
    ):
        return None
    seen = frozenset({Permission.VIEW_RUN})
    of_link = Grants(
        maker.id,
        is_admin=False,
        permissions=dict.fromkeys(projects.values(), seen),
        most=seen,
        runs=frozenset(projects),
    )
    return Shown(link, maker.name, list(projects), of_link)


def _delete(session: Session, *conditions: ColumnElement[bool]) -> None:
    links = select(SharedLink.id).where(*conditions)
    session.execute(delete(SharedRun).where(SharedRun.link_id.in_(links)))
    session.execute(delete(SharedLink).where(*conditions))
