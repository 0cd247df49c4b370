"""Read-only links: runs, comparisons and reports, visible without a sign-in.

A link shows what its maker may share at that moment: it ends with that permission. A link to a
report shows the report as it is then, and of its runs those that the maker may share and that the
editors who chose them may see: an editor could otherwise read a hidden run by naming it in
a report that another user shares.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, func, literal, select
from sqlalchemy.orm import Session

from db import clock
from db.access import permissions
from db.access.accounts import DAY, IS_ACTIVE, hash_of
from db.access.permissions import Grants, Permission
from db.clock import now
from db.errors import Invalid, NotFound
from db.paging import Page, page
from db.tables import NOT_DELETED, Report, Run, SharedLink, SharedRun, User

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
    report: Report | None = None


def make(
    session: Session,
    user: User,
    run_ids: Sequence[int],
    days: int,
    *,
    report_id: int | None = None,
) -> tuple[str, SharedLink]:
    """Return the secret of a new link, which cannot be read again, and its row.

    run_ids: runs that the user may share. report_id: a report that the user may share, instead of
    runs. Raises Invalid.
    """
    if days not in DAYS:
        allowed = ", ".join(map(str, DAYS))
        raise Invalid({"days": f"{days} is not valid; allowed: {allowed}"})
    moment = clock.current(session)
    _delete(session, SharedLink.user_id == user.id, SharedLink.expires_at < moment)
    mine = select(func.count()).where(SharedLink.user_id == user.id)
    if (session.scalar(mine) or 0) >= MOST:
        raise Invalid({"runs": f"you have {MOST} links, the maximum; revoke some first"})
    secret = secrets.token_urlsafe(32)
    link = SharedLink(
        token_hash=hash_of(secret),
        user_id=user.id,
        report_id=report_id,
        expires_at=moment + days * DAY,
    )
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


def of_report(session: Session, report_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of the links to a report, like `of_runs`."""
    query = select(SharedLink, User.name, literal(0)).join(User, User.id == SharedLink.user_id)
    query = query.where(SharedLink.report_id == report_id, SharedLink.expires_at > now())
    return page(session, query, (SharedLink.id,), after=after, limit=limit, newest_first=True)


def revoke(session: Session, link_id: int, grants: Grants) -> None:
    """Revoke a link: the user's own, or one to a run or report of a project the user maintains.

    Raises NotFound.
    """
    link = session.get(SharedLink, link_id)
    projects = select(Run.project).join(SharedRun, SharedRun.run_id == Run.id)
    projects = projects.where(SharedRun.link_id == link_id)
    if link is not None and link.report_id is not None:
        projects = select(Report.project).where(Report.id == link.report_id)
    may_revoke = link is not None and (
        link.user_id == grants.user_id
        or any(
            grants.may(Permission.MANAGE_MEMBERS, project)
            for project in session.scalars(projects.distinct())
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
    theirs = permissions.grants(session, maker)
    if link.report_id is not None:
        return _find_report(session, link, maker, theirs)
    shown = select(Run.id, Run.project).join(SharedRun, SharedRun.run_id == Run.id)
    shown = shown.where(SharedRun.link_id == link.id, NOT_DELETED).order_by(SharedRun.place)
    projects = {row[0]: row[1] for row in session.execute(shown)}
    if not projects or not all(
        theirs.may(Permission.SHARE_RUN, project) for project in projects.values()
    ):
        return None
    return Shown(link, maker.name, list(projects), _grants(maker, projects))


def _find_report(session: Session, link: SharedLink, maker: User, theirs: Grants) -> Shown | None:
    report = session.get_one(Report, link.report_id)
    if report.deleted_at is not None or not theirs.may(Permission.SHARE_RUN, report.project):
        return None
    editors_of: dict[int, set[int]] = {}
    for panel in report.edited_panels:
        for run_id, users in panel["editors"].items():
            editors_of.setdefault(int(run_id), set()).update(users)
    ids = set().union(*editors_of.values())
    editors = session.scalars(select(User).where(User.id.in_(ids))).all()
    grants = {user.id: permissions.grants(session, user) for user in editors}
    query = select(Run.id, Run.project).where(Run.id.in_(report.run_ids), NOT_DELETED)
    projects = {
        run_id: project
        for run_id, project in session.execute(query)
        if theirs.may(Permission.SHARE_RUN, project)
        and all(grants[user].may(Permission.VIEW_RUN, project) for user in editors_of[run_id])
    }
    runs = [run_id for run_id in report.run_ids if run_id in projects]
    return Shown(link, maker.name, runs, _grants(maker, projects), report)


def _grants(maker: User, projects: Mapping[int, str]) -> Grants:
    """Return the grants of a link's holders. projects: of its runs, by run id."""
    seen = frozenset({Permission.VIEW_RUN})
    return Grants(
        maker.id,
        is_admin=False,
        permissions=dict.fromkeys(projects.values(), seen),
        most=seen,
        runs=frozenset(projects),
    )


def _delete(session: Session, *conditions: ColumnElement[bool]) -> None:
    links = select(SharedLink.id).where(*conditions)
    session.execute(delete(SharedRun).where(SharedRun.link_id.in_(links)))
    session.execute(delete(SharedLink).where(*conditions))
