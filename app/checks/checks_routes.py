"""Uploaded reports of `halfstep check`: routes and pages."""

from typing import Annotated, Any

from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import ListedProject, VisibleProject, in_project
from app.auth.routing import Router
from app.checks.check_view import view_of
from app.checks.checks import ACTION, WRITE, check_deletable, may_delete, parse_report, to_row
from app.dependencies import Db
from app.html.rendering import Context
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from db.access import projects
from db.access.permissions import Permission
from db.runs import check_reports
from db.tables import CheckReport, User
from halfstep.check.report import from_content

api = Router(prefix="/checks", tags=["checks"])
pages = Router(prefix="/checks")

Content = Annotated[dict[str, Any], Field(description="As `halfstep check --json` prints it")]
Sources = Annotated[dict[str, str], Field(description="Texts of the files that rows name")]


class NewCheck(Body):
    """A report to upload."""

    report: Content
    sources: Annotated[Sources, Field(default_factory=dict)]
    project: Annotated[Text, Field(description="'' is the Default project")] = ""


class CheckRow(BaseModel):
    """An uploaded report in a list."""

    id: int
    script: str
    project: str
    author: str
    created_at: float
    torch: Annotated[str, Field(description="Its version")]
    steps: Annotated[int, Field(description="Number of checked steps")]
    faults: Annotated[int, Field(description="Rows that are mistakes")]
    notes: Annotated[int, Field(description="Other rows")]


class CheckContent(CheckRow):
    """An uploaded report."""

    report: Content
    sources: Sources


class Checks(ListPage):
    """A page of uploaded reports, newest first."""

    checks: list[CheckRow]


@api.get("", SIGNED_IN)
def list_checks(
    session: Db, project: ListedProject, after: After = "", limit: Limit = 100
) -> Checks:
    """List the uploaded reports of visible projects."""
    names = None if project is None else [project]
    listed = check_reports.list_reports(session, names, after=after, limit=limit)
    rows = [CheckRow(**_row(*row)) for row in listed.rows]
    return Checks(checks=rows, total=listed.total, next=listed.next)


@api.post("", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, for_uploads=True, status_code=201)
@audited("project")
def upload_check(
    body: Annotated[NewCheck, in_project(NewCheck, WRITE, action=ACTION)],
    session: Db,
    principal: SignedIn,
) -> CheckRow:
    """Store a report. It has at most 1,000 rows; requires permission to submit to the project."""
    report = to_row(parse_report(body.report, body.sources), body.sources)
    report.project, report.user_id = body.project, principal.user.id
    return CheckRow(**_row(check_reports.add(session, report), principal.user.name))


@api.get("/{check_id}", SIGNED_IN)
def get_check(check_id: RowId, session: Db) -> CheckContent:
    """Return an uploaded report with its sources."""
    report = check_reports.get(session, check_id)
    author = session.get_one(User, report.user_id).name
    return CheckContent(**_row(report, author), report=report.report, sources=report.sources)


@api.delete("/{check_id}", SIGNED_IN, status_code=204)
def delete_check(check_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete an uploaded report; this cannot be undone.

    Requires its author, or permission to delete runs.
    """
    report = check_reports.get(session, check_id)
    check_deletable(session, report, principal.grants)
    check_reports.delete(session, report)


def _row(report: CheckReport, author: str) -> dict[str, object]:
    names = CheckRow.model_fields.keys() - {"author"}
    return {name: getattr(report, name) for name in names} | {"author": author}


PAGE_SIZE = 50


@pages.get("", SIGNED_IN)
def show_checks(context: Context, project: VisibleProject, after: After = "") -> HTMLResponse:
    """List the reports of one visible project, or of all."""
    session = context.session
    only = None if project is None else [project]
    listed = check_reports.list_reports(session, only, after=after, limit=PAGE_SIZE)
    return context.render(
        "checks/checks.html",
        rows=listed.rows,
        next=listed.next,
        projects=[
            project.name
            for project in projects.list_projects(session, context.principal.grants.projects)
        ],
        project=project,
    )


@pages.get("/{check_id}", SIGNED_IN)
def show_check(check_id: RowId, context: Context) -> HTMLResponse:
    """Show a report: the source with marked lines, and the findings."""
    row = check_reports.get(context.session, check_id)
    return context.render(
        "checks/check.html",
        check=row,
        view=view_of(from_content(row.report), row.sources),
        author=context.session.get_one(User, row.user_id).name,
        may_delete=may_delete(row, context.principal.grants),
    )


@pages.get("/{check_id}/report.json", SIGNED_IN)
def download_check(check_id: RowId, session: Db) -> JSONResponse:
    """Return a report as `halfstep check --json` prints it, for --baseline."""
    row = check_reports.get(session, check_id)
    headers = {"Content-Disposition": f'attachment; filename="check-{check_id}.json"'}
    return JSONResponse(row.report, headers=headers)


@pages.post("/{check_id}/deletion", SIGNED_IN)
def post_deletion(check_id: RowId, context: Context) -> Response:
    """Delete a report."""
    row = check_reports.get(context.session, check_id)
    check_deletable(context.session, row, context.principal.grants)
    check_reports.delete(context.session, row)
    return context.redirect("/checks", "The check is deleted.")
