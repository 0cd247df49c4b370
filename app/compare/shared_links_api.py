"""Routes of read-only links to runs, comparisons and reports."""

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ACCOUNT, check
from app.auth.routing import Router
from app.compare.comparison import MOST_RUNS
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, RunId, as_run_ids
from app.reports import reports
from db.access import shared_links
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import runs as run_rows
from db.tables import LARGEST_ID

router = Router(prefix="/links", tags=["links"])


class LinkRow(BaseModel):
    """A read-only link; its secret is not stored."""

    id: int
    report: Annotated[int | None, Field(description="The report that it shows, instead of runs")]
    user: Annotated[
        str, Field(description="Creator of the link, which ends with the creator's permission")
    ]
    runs: Annotated[int, Field(description="Number of its runs")]
    created_at: float
    expires_at: float


class NewLink(Body):
    """Runs, or a report, and lifetime of a new link."""

    runs: Annotated[list[RunId], Field(default_factory=list, max_length=MOST_RUNS)]
    report: RowId | None = None
    """Report that the link shows, with those of its runs that the link's creator may share"""
    days: Annotated[int, Field(description="1, 7, 30 or 90")] = 7


class CreatedLink(LinkRow):
    """A newly created link."""

    address: Annotated[str, Field(description="Its path, with the secret. It is not shown again")]


class Links(ListPage):
    """Links, newest first."""

    links: list[LinkRow]


@router.get("", ACCOUNT)
def list_links(
    session: Db,
    runs: Annotated[str, Query(description="Comma-separated run ids")] = "",
    report: Annotated[int | None, Query(ge=1, le=LARGEST_ID, description="Or a report")] = None,
    after: After = "",
    limit: Limit = 1000,
) -> Links:
    """List the links that show all of these runs, or a report. Requires permission to share."""
    if report is not None:
        check_one_subject(runs, report)
        reports.check_shareable(session, report)
        page = shared_links.of_report(session, report, after=after, limit=limit)
    else:
        ids = check_shareable(session, as_run_ids("runs", runs, most=MOST_RUNS))
        page = shared_links.of_runs(session, ids, after=after, limit=limit)
    return Links(links=[_row(*row) for row in page.rows], total=page.total, next=page.next)


@router.post("", ACCOUNT, status_code=201)
@audited("runs", "report", "days")
def make_link(
    body: NewLink, session: Db, principal: SignedIn, _at_browser: AtBrowser
) -> CreatedLink:
    """Create a link. Requires a browser: a link made by a stolen token would outlive the token."""
    check_one_subject(body.runs, body.report)
    ids = check_shareable(session, list(dict.fromkeys(body.runs)))
    if body.report is not None:
        reports.check_shareable(session, body.report)
    secret, link = shared_links.make(session, principal.user, ids, body.days, report_id=body.report)
    if ids:
        audit.set_runs(session, ids)
    fields = _row(link, principal.user.name, len(ids)).model_dump()
    return CreatedLink(**fields, address=address_of(secret))


@router.delete("/{link_id}", ACCOUNT, status_code=204)
def revoke_link(link_id: RowId, session: Db, principal: SignedIn) -> None:
    """Revoke one of the user's links, or one to a run of a project that the user maintains."""
    shared_links.revoke(session, link_id, principal.grants)


def check_shareable(session: Session, run_ids: list[int]) -> list[int]:
    """Check that the user may share runs, and return their ids. Raises NotFound, Forbidden."""
    for run_id in run_ids:
        run_rows.get(session, run_id)
        check(session, Permission.SHARE_RUN, run_id)
    return run_ids


def check_one_subject(runs: object, report: int | None) -> None:
    """Check that a link names either runs or a report. Raises Invalid."""
    if bool(runs) == (report is not None):
        text = "both runs and a report are given" if runs else "neither runs nor a report is given"
        raise Invalid({"runs": f"{text}; allowed: one of the two"})


def address_of(secret: str) -> str:
    """Return the path of a link, with its secret in the fragment, which browsers do not send."""
    return f"/shared#{secret}"


def _row(link: Any, user: str, count: int) -> LinkRow:
    times = {"created_at": link.created_at, "expires_at": link.expires_at}
    return LinkRow(id=link.id, report=link.report_id, user=user, runs=count, **times)
