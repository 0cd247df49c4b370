"""Routes of uploaded reports of `halfstep check`."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.auth.project_parameters import in_project, query_project
from app.checks.checks import ACTION, WRITE, check_deletable, checked, stored
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from db.access.permissions import Permission
from db.runs import check_reports
from db.tables import CheckReport, User

router = APIRouter(prefix="/checks", tags=["checks"])

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


@router.get("")
@requires(SIGNED_IN)
def list_checks(
    session: Db,
    _principal: SignedIn,
    project: Annotated[
        str | None, query_project(Permission.VIEW_RUN, description="Only of this project")
    ],
    after: After = "",
    limit: Limit = 100,
) -> Checks:
    """List the uploaded reports of visible projects."""
    names = None if project is None else [project]
    page = check_reports.listed(session, names, after=after, limit=limit)
    rows = [CheckRow(**_row(*row)) for row in page.rows]
    return Checks(checks=rows, total=page.total, next=page.next)


@router.post("", status_code=201)
@requires(SIGNED_IN, token_permission=Permission.SUBMIT_RUN, for_uploads=True)
@audited("project")
def upload_check(
    body: Annotated[NewCheck, in_project(NewCheck, WRITE, action=ACTION)],
    session: Db,
    principal: SignedIn,
) -> CheckRow:
    """Store a report of at most 1,000 rows. Requires permission to submit to the project."""
    report = stored(checked(body.report, body.sources), body.sources)
    report.project, report.user_id = body.project, principal.user.id
    return CheckRow(**_row(check_reports.add(session, report), principal.user.name))


@router.get("/{check_id}")
@requires(SIGNED_IN)
def get_check(check_id: RowId, session: Db, _principal: SignedIn) -> CheckContent:
    """Return an uploaded report with its sources."""
    report = check_reports.get(session, check_id)
    author = session.get_one(User, report.user_id).name
    return CheckContent(**_row(report, author), report=report.report, sources=report.sources)


@router.delete("/{check_id}", status_code=204)
@requires(SIGNED_IN)
def delete_check(check_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete an uploaded report; this cannot be undone.

    Requires its author, or permission to delete runs.
    """
    report = check_reports.get(session, check_id)
    check_deletable(session, report, principal.grants)
    check_reports.delete(session, report)


def _row(report: CheckReport, author: str) -> dict[str, Any]:
    names = CheckRow.model_fields.keys() - {"author"}
    return {name: getattr(report, name) for name in names} | {"author": author}
