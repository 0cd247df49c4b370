"""Routes of read-only links to runs and comparisons."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ACCOUNT, check, requires
from app.compare.comparison import MOST_RUNS
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, RunId, as_run_ids
from db.access import shared_links
from db.access.permissions import Permission
from db.runs import runs

router = APIRouter(prefix="/links", tags=["links"])


class LinkRow(BaseModel):
    """A read-only link; its secret is not stored."""

    id: int
    user: Annotated[str, Field(description="Its creator; it ends with the creator's permission")]
    runs: Annotated[int, Field(description="Number of its runs")]
    created_at: float
    expires_at: float


class NewLink(Body):
    """Runs and lifetime of a new link."""

    runs: Annotated[list[RunId], Field(min_length=1, max_length=MOST_RUNS)]
    days: Annotated[int, Field(description="1, 7, 30 or 90")] = 7


class CreatedLink(LinkRow):
    """A newly created link."""

    address: Annotated[str, Field(description="Its path, with the secret. It is not shown again")]


class Links(ListPage):
    """Links, newest first."""

    links: list[LinkRow]


@router.get("")
@requires(ACCOUNT)
def list_links(
    session: Db,
    _principal: SignedIn,
    runs: Annotated[str, Query(description="Comma-separated run ids")],
    after: After = "",
    limit: Limit = 1000,
) -> Links:
    """List the links that show all of these runs. Requires permission to share them."""
    ids = check_shareable(session, as_run_ids("runs", runs, most=MOST_RUNS))
    page = shared_links.of_runs(session, ids, after=after, limit=limit)
    return Links(links=[_row(*row) for row in page.rows], total=page.total, next=page.next)


@router.post("", status_code=201)
@requires(ACCOUNT)
@audited("runs", "days")
def make_link(
    body: NewLink, session: Db, principal: SignedIn, _at_browser: AtBrowser
) -> CreatedLink:
    """Create a link. Requires a browser: a link made by a stolen token would outlive the token."""
    ids = check_shareable(session, list(dict.fromkeys(body.runs)))
    secret, link = shared_links.make(session, principal.user, ids, body.days)
    audit.set_runs(session, ids)
    fields = _row(link, principal.user.name, len(ids)).model_dump()
    return CreatedLink(**fields, address=address_of(secret))


@router.delete("/{link_id}", status_code=204)
@requires(ACCOUNT)
def revoke_link(link_id: RowId, session: Db, principal: SignedIn) -> None:
    """Revoke one of the user's links, or one to a run of a project that the user maintains."""
    shared_links.revoke(session, link_id, principal.grants)


def check_shareable(session: Session, run_ids: list[int]) -> list[int]:
    """Check that the user may share runs, and return their ids. Raises NotFound, Forbidden."""
    for run_id in run_ids:
        runs.get(session, run_id)
        check(session, Permission.SHARE_RUN, run_id)
    return run_ids


def address_of(secret: str) -> str:
    """Return the path of a link, with its secret in the fragment, which browsers do not send."""
    return f"/shared#{secret}"


def _row(link: Any, user: str, count: int) -> LinkRow:
    times = {"created_at": link.created_at, "expires_at": link.expires_at}
    return LinkRow(id=link.id, user=user, runs=count, **times)
