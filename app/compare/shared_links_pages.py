"""Forms to create and revoke read-only links, on the pages of runs, comparisons and reports."""

from collections.abc import Sequence

from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, Principal, SignedIn, local_path
from app.auth.permissions import ACCOUNT
from app.auth.routing import Router
from app.compare.comparison import MOST_RUNS
from app.compare.shared_links_api import address_of, check_one_subject, check_shareable
from app.dependencies import Db
from app.html.rendering import Context
from app.http.parameters import FormText, RowId, as_run_id, as_run_ids
from app.http.path_prefix import public_address
from app.reports import reports
from app.runs.summary import RunSummary
from db.access import shared_links
from db.access.permissions import Permission
from db.errors import Invalid
from db.tables import Report, Run

router = Router(prefix="/links")

SHOWN = 50


@router.post("", ACCOUNT)
@audited("runs", "report", "days")
def make_link(
    context: Context,
    _at_browser: AtBrowser,
    runs: FormText = "",
    report: FormText = "",
    days: FormText = "",
) -> HTMLResponse:
    """Create a link and show it once."""
    session = context.session
    report_id = as_run_id("report", report) if report else None
    check_one_subject(runs, report_id)
    ids: list[int] = []
    if report_id is None:
        ids = check_shareable(session, as_run_ids("runs", runs, most=MOST_RUNS))
        subject = "Comparison" if len(ids) > 1 else session.get_one(Run, ids[0]).name
    else:
        subject = reports.check_shareable(session, report_id).title
    secret, errors = "", dict[str, str]()
    try:
        secret, _link = shared_links.make(
            session, context.user, ids, _days(days), report_id=report_id
        )
        if ids:
            audit.set_runs(session, ids)
    except Invalid as error:
        errors = error.errors
    sharing = _sharing(session, ids) if ids else _report_sharing(session, report_id or 0)
    return context.render(
        "compare/shared_made.html",
        address=f"{public_address(context.request)}{address_of(secret)}" if secret else "",
        sharing=sharing,
        errors=errors,
        back=sharing["back"],
        subject=subject,
    )


@router.post("/{link_id}/revocation", ACCOUNT)
def revoke_link(
    link_id: RowId, session: Db, principal: SignedIn, back: FormText = "/runs"
) -> RedirectResponse:
    """Revoke a link, and redirect back."""
    shared_links.revoke(session, link_id, principal.grants)
    return RedirectResponse(local_path(back), status_code=303)


def sharing_panel(
    session: Session, principal: Principal, some_runs: Sequence[Run | RunSummary]
) -> dict[str, object] | None:
    """Return the values of the sharing panel; None if the user may not share these runs."""
    may = principal.grants.may
    if not some_runs or not all(may(Permission.SHARE_RUN, run.project) for run in some_runs):
        return None
    return _sharing(session, [run.id for run in some_runs])


def report_sharing_panel(
    session: Session, principal: Principal, report: Report
) -> dict[str, object] | None:
    """Return the values of a report's sharing panel; None if the user may not share it."""
    if not principal.grants.may(Permission.SHARE_RUN, report.project):
        return None
    return _report_sharing(session, report.id)


def _report_sharing(session: Session, report_id: int) -> dict[str, object]:
    links = shared_links.of_report(session, report_id, limit=SHOWN)
    return {
        "runs": "",
        "report": report_id,
        "links": links.rows,
        "days": shared_links.DAYS,
        "back": f"/reports/{report_id}",
    }


def _sharing(session: Session, run_ids: list[int]) -> dict[str, object]:
    links = shared_links.of_runs(session, run_ids, limit=SHOWN)
    return {
        "runs": ",".join(map(str, run_ids)),
        "report": "",
        "links": links.rows,
        "days": shared_links.DAYS,
        "back": _page_of(run_ids),
    }


def _page_of(run_ids: list[int]) -> str:
    if len(run_ids) == 1:
        return f"/runs/{run_ids[0]}"
    return f"/compare?runs={','.join(map(str, run_ids))}"


def _days(text: str) -> int:
    if not text.isdecimal() or len(text) > 3:
        allowed = ", ".join(map(str, shared_links.DAYS))
        raise Invalid({"days": f"{text[:100]!r} is not valid; allowed: {allowed}"})
    return int(text)
