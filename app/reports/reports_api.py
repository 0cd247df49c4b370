"""Routes of reports: pages of Markdown with panels of runs."""

from typing import Annotated

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import ListedProject, in_project
from app.auth.routing import Router
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from app.reports.reports import ACTION, WRITE, check_deletable, content_of, create, writable
from db.access.permissions import Permission
from db.runs import reports
from db.tables import Report, User

router = Router(prefix="/reports", tags=["reports"])

Version = Annotated[
    int, Field(ge=1, description="Version before the edit: 409 if there is a newer one")
]
Markdown = Annotated[
    str,
    Field(
        description="Markdown. Fenced blocks `panel` (runs, metrics, title, x, smoothing, y) and "
        "`runs` (runs, columns, title) draw runs; see docs/how-to/reports.md"
    ),
]


class NewReport(Body):
    """A report to create."""

    title: Text
    text: Markdown = ""
    project: Annotated[Text, Field(description="'' is the Default project")] = ""


class ChangedReport(Body):
    """The new content of a report."""

    title: Text
    text: Markdown
    version: Version


class ReportRow(BaseModel):
    """A report in a list."""

    id: int
    title: str
    project: str
    version: int
    author: str
    editor: Annotated[str, Field(description="Author of the last change")]
    created_at: float
    changed_at: float


class ReportContent(ReportRow):
    """A report."""

    text: Markdown
    runs: Annotated[list[int], Field(description="Run ids of its panels, in order")]


class Reports(ListPage):
    """A page of reports, newest first."""

    reports: list[ReportRow]


@router.get("", SIGNED_IN)
def list_reports(
    session: Db, project: ListedProject, after: After = "", limit: Limit = 100
) -> Reports:
    """List the reports of visible projects."""
    names = None if project is None else [project]
    page = reports.list_reports(session, names, after=after, limit=limit)
    rows = [ReportRow(**_row(*row)) for row in page.rows]
    return Reports(reports=rows, total=page.total, next=page.next)


@router.post("", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, status_code=201)
@audited("title", "project")
def create_report(
    body: Annotated[NewReport, in_project(NewReport, WRITE, action=ACTION)],
    session: Db,
    principal: SignedIn,
) -> ReportContent:
    """Create a report. Requires permission to submit to the project."""
    content = content_of(body.title, body.text)
    return _content(session, create(session, principal.user, body.project, content))


@router.get("/{report_id}", SIGNED_IN)
def get_report(report_id: RowId, session: Db) -> ReportContent:
    """Return a report."""
    return _content(session, reports.get(session, report_id))


@router.put("/{report_id}", SIGNED_IN, token_permission=Permission.SUBMIT_RUN)
@audited("title", "version")
def change_report(
    report_id: RowId, body: ChangedReport, session: Db, principal: SignedIn
) -> ReportContent:
    """Replace title and text of a report. Requires permission to submit to its project."""
    writable(session, report_id)
    content = content_of(body.title, body.text)
    report = reports.edit(session, report_id, principal.user, content, version=body.version)
    return _content(session, report)


@router.delete("/{report_id}", SIGNED_IN, status_code=204)
def delete_report(report_id: RowId, session: Db, principal: SignedIn) -> None:
    """Move a report to the trash. Requires its author, or permission to delete runs. Idempotent."""
    check_deletable(session, report_id, principal.grants)
    reports.delete(session, report_id)


@router.post("/{report_id}/restoration", SIGNED_IN, status_code=204)
def restore_report(report_id: RowId, session: Db, principal: SignedIn) -> None:
    """Restore a report from the trash. Idempotent."""
    check_deletable(session, report_id, principal.grants)
    reports.restore(session, report_id)


@router.post("/{report_id}/erasure", SIGNED_IN, status_code=202)
def erase_report(report_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete a report in the trash with its images and links; this cannot be undone."""
    check_deletable(session, report_id, principal.grants)
    reports.erase(session, report_id)


def _content(session: Session, report: Report) -> ReportContent:
    author, editor = (
        session.get_one(User, user_id).name for user_id in (report.user_id, report.editor_id)
    )
    return ReportContent(**_row(report, author, editor), text=report.text, runs=report.run_ids)


def _row(report: Report, author: str, editor: str) -> dict[str, object]:
    columns = ("id", "title", "project", "version", "created_at", "changed_at")
    return {name: getattr(report, name) for name in columns} | {"author": author, "editor": editor}
