"""Uploaded reports of `halfstep check`, per project."""

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.access import projects
from db.errors import Invalid, NotFound
from db.paging import Page, page
from db.tables import CheckReport, User

#: Limit of reports per project.
MOST = 1000


def list_reports(
    session: Session, names: Collection[str] | None = None, *, after: str = "", limit: int
) -> Page:
    """Return a page of reports, newest first, with the names of their authors.

    names: only those of these projects.
    """
    query = select(CheckReport, User.name).join(User, User.id == CheckReport.user_id)
    if names is not None:
        query = query.where(CheckReport.project.in_(names))
    return page(session, query, (CheckReport.id,), after=after, limit=limit, newest_first=True)


def get(session: Session, check_id: int) -> CheckReport:
    """Return a report. Raises NotFound."""
    if (report := session.get(CheckReport, check_id)) is None:
        raise NotFound(f"There is no check {check_id}.")
    return report


def add(session: Session, report: CheckReport) -> CheckReport:
    """Add a report to its project. Raises Invalid."""
    projects.lock_shared(session, report.project)
    in_project = select(func.count()).where(CheckReport.project == report.project)
    if (session.scalar(in_project) or 0) >= MOST:
        raise Invalid({"project": f"it has {MOST:,} checks, the maximum; delete some first"})
    session.add(report)
    session.flush()
    return report


def delete(session: Session, report: CheckReport) -> None:
    """Delete a report."""
    session.delete(report)
