"""Read-only links: runs, alone or side by side, for whoever has one."""

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
    """A read-only link; its secret is not kept."""

    id: int
    user: Annotated[str, Field(description="Its maker, whose rights it lasts as long as")]
    runs: Annotated[int, Field(description="How many runs it shows")]
    created_at: float
    expires_at: float


class NewLink(Body):
    """What a link is to show, and for how long."""

    runs: Annotated[list[RunId], Field(min_length=1, max_length=MOST_RUNS)]
    days: Annotated[int, Field(description="1, 7, 30 or 90")] = 7


class MadeLink(LinkRow):
    """A link just made."""

    address: Annotated[str, Field(description="Its path, with the secret. It is not shown again")]


class Links(ListPage):
    """Links, newest first."""

    links: list[LinkRow]


@router.get("")
@requires(ACCOUNT)
def list_links(
    session: Db,
    _principal: SignedIn,
    runs: Annotated[str, Query(description="Run IDs, with commas between them")],
    after: After = "",
    limit: Limit = 1000,
) -> Links:
    """List the links that show all of these runs, which are yours to share."""
    ids = check_shareable(session, as_run_ids("runs", runs, most=MOST_RUNS))
    found = shared_links.of_runs(session, ids, after=after, limit=limit)
    return Links(links=[_row(*each) for each in found.rows], total=found.total, next=found.next)


@router.post("", status_code=201)
@requires(ACCOUNT)
@audited("runs", "days")
def make_link(
    wanted: NewLink, session: Db, principal: SignedIn, _at_browser: AtBrowser
) -> MadeLink:
    """Make a link. Only a browser may: what a stolen token made would outlive its revocation."""
    ids = check_shareable(session, list(dict.fromkeys(wanted.runs)))
    secret, link = shared_links.make(session, principal.user, ids, wanted.days)
    audit.set_runs(session, ids)
    told = _row(link, principal.user.name, len(ids)).model_dump()
    return MadeLink(**told, address=address_of(secret))


@router.delete("/{link_id}", status_code=204)
@requires(ACCOUNT)
def revoke_link(link_id: RowId, session: Db, principal: SignedIn) -> None:
    """End a link of yours, or to a run of a project that you maintain."""
    shared_links.revoke(session, link_id, principal.grants)


def check_shareable(session: Session, run_ids: list[int]) -> list[int]:
    """See that somebody may share runs. Raises NotFound, Forbidden."""
    for run_id in run_ids:
        runs.get(session, run_id)
        check(session, Permission.SHARE_RUN, run_id)
    return run_ids


def address_of(secret: str) -> str:
    """Return the path of a link: what follows # no browser sends, and so no log keeps."""
    return f"/shared#{secret}"


def _row(link: Any, user: str, count: int) -> LinkRow:
    times = {"created_at": link.created_at, "expires_at": link.expires_at}
    return LinkRow(id=link.id, user=user, runs=count, **times)
