"""Pages of uploaded reports of `halfstep check`: list and report."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.auth.project_parameters import query_project
from app.checks.check_view import view_of
from app.checks.checks import check_deletable, may_delete
from app.dependencies import Db
from app.html.flash import back_to
from app.html.rendering import page
from app.http.list_pages import After
from app.http.parameters import RowId
from db.access import projects
from db.access.permissions import Permission
from db.runs import check_reports
from db.tables import User
from halfstep.check.report import from_content

router = APIRouter(prefix="/checks")

PAGE_SIZE = 50


@router.get("")
@requires(SIGNED_IN)
def list_checks(
    request: Request,
    session: Db,
    principal: SignedIn,
    project: Annotated[str | None, query_project(Permission.VIEW_RUN)],
    after: After = "",
) -> HTMLResponse:
    """List the reports of one visible project, or of all."""
    only = None if project is None else [project]
    listed = check_reports.listed(session, only, after=after, limit=PAGE_SIZE)
    return page(
        request,
        "checks/checks.html",
        principal=principal,
        rows=listed.rows,
        next=listed.next,
        projects=[each.name for each in projects.listed(session, principal.grants.projects)],
        project=project,
    )


@router.get("/{check_id}")
@requires(SIGNED_IN)
def show_check(check_id: RowId, request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show a report: the source with marked lines, and the findings."""
    row = check_reports.get(session, check_id)
    return page(
        request,
        "checks/check.html",
        principal=principal,
        check=row,
        view=view_of(from_content(row.report), row.sources),
        author=session.get_one(User, row.user_id).name,
        may_delete=may_delete(row, principal.grants),
    )


@router.get("/{check_id}/report.json")
@requires(SIGNED_IN)
def download_check(check_id: RowId, session: Db, _principal: SignedIn) -> JSONResponse:
    """Return a report as `halfstep check --json` prints it, for --baseline."""
    row = check_reports.get(session, check_id)
    headers = {"Content-Disposition": f'attachment; filename="check-{check_id}.json"'}
    return JSONResponse(row.report, headers=headers)


@router.post("/{check_id}/deletion")
@requires(SIGNED_IN)
def delete_check(check_id: RowId, request: Request, session: Db, principal: SignedIn) -> Response:
    """Delete a report."""
    row = check_reports.get(session, check_id)
    check_deletable(session, row, principal.grants)
    check_reports.delete(session, row)
    return back_to(request, "/checks", "The check is deleted.")
