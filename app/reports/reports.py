"""Reading and writing reports with permission checks, for the API and the pages."""

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
from app.auth.project_parameters import resolve
from app.http.parameters import flaw
from app.reports import blocks
from app.reports.blocks import Panel
from db.access.permissions import Grants, Permission
from db.errors import Invalid, NotFound
from db.runs import reports
from db.runs.reports import Content
from db.tables import Report, User

#: Required to write reports of a project.
WRITE = Permission.SUBMIT_RUN
ACTION = "write reports of"


def content_of(title: str, text: str) -> Content:
    """Return the content of a report that is to be saved. Raises Invalid."""
    errors = {
        name: wrong for name, value in (("title", title), ("text", text)) if (wrong := flaw(value))
    }
    if errors:
        raise Invalid(errors)
    if len(text) > reports.LENGTHS["text"]:
        most = f"allowed: at most {reports.LENGTHS['text']:,}"
        raise Invalid({"text": f"{len(text):,} characters; {most}"})
    panels = blocks.panels_of(text)
    blocks.check(panels)
    return Content(title, text, [panel.shown for panel in panels])


def create(session: Session, user: User, project: str, content: Content) -> Report:
    """Create a report. Raises NotFound, Forbidden, Invalid."""
    return reports.create(session, user, resolve(session, WRITE, project, ACTION), content)


def writable(session: Session, report_id: int, *, lock: bool = False) -> Report:
    """Return a report that the user may write. Raises NotFound, Forbidden."""
    report = reports.get(session, report_id, lock=lock)
    check_project(session, WRITE, report.project, ACTION)
    return report


def append(session: Session, user: User, report_id: int, panel: Panel) -> Report:
    """Add a panel at the end of a report. Raises NotFound, Forbidden, Invalid."""
    report = writable(session, report_id, lock=True)
    text = f"{report.text}\n\n{panel.block}".lstrip()
    content = content_of(report.title, text)
    return reports.edit(session, report_id, user, content, version=report.version)


def may_delete(report: Report, grants: Grants) -> bool:
    """Return whether a user may delete a report: its author, or who may delete runs there."""
    is_author = report.user_id == grants.user_id and grants.may(WRITE, report.project)
    return is_author or grants.may(Permission.DELETE_RUN, report.project)


def check_deletable(session: Session, report_id: int, grants: Grants) -> None:
    """Check that a user may delete, restore or erase a report. Raises NotFound, Forbidden."""
    report = session.get(Report, report_id)
    if report is None:
        raise NotFound(f"There is no report {report_id}.")
    if not may_delete(report, grants):
        check_project(session, Permission.DELETE_RUN, report.project, "delete reports of")


def check_shareable(session: Session, report_id: int) -> Report:
    """Return a report that the user may share. Raises NotFound, Forbidden."""
    report = reports.get(session, report_id)
    check_project(session, Permission.SHARE_RUN, report.project, "share reports of")
    return report
