"""Who changed what, when and from where. For operators."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import OPERATE, requires
from app.dependencies import Db, TheDatabase
from app.http.active_requests import EXPORT
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId, Text
from db.access import accounts, audit
from db.errors import Invalid
from db.tables import Deed

router = APIRouter(prefix="/deeds", tags=["people"])


class DeedRow(BaseModel):
    """What somebody has done."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    time: float
    user: Annotated[
        str | None, Field(description="Who; null of nobody known, and on the server's terminal")
    ]
    token: Annotated[str | None, Field(description="Name of the token that a script came with")]
    deed: Annotated[str, Field(description="Method and path, or a command")]
    detail: Annotated[str, Field(description="Of what was sent, what may be kept")]
    run_id: int | None
    address: Annotated[str, Field(description="From where; terminal: the server's")]


class Deeds(ListPage):
    """Deeds, newest first."""

    deeds: list[DeedRow]


#: A day's beginning is the same wherever one is.
Since = Annotated[date | None, Query(description="Not before this day, UTC: 2026-11-22")]


def _row(deed: Deed, name: str | None) -> DeedRow:
    return DeedRow.model_validate({**vars(deed), "user": name})


@router.get("")
@requires(OPERATE)
def list_deeds(
    session: Db,
    _visitor: SignedIn,
    run: Annotated[RunId | None, Query(description="Done to this run alone")] = None,
    user: Annotated[Text, Query(description="By this person alone")] = "",
    since: Since = None,
    after: After = "",
    limit: Limit = 1000,
) -> Deeds:
    """List what was done."""
    chosen = conditions(session, run, user, since)
    found = audit.listed(session, **chosen, after=after, limit=limit)
    rows = [_row(deed, name) for deed, name in found.rows]
    return Deeds(deeds=rows, total=found.total, next=found.next)


def conditions(session: Session, run: int | None, user: str, since: date | None) -> dict[str, Any]:
    """Return what deeds are listed by. Raises Invalid of a person that there never was."""
    who = accounts.find_user(session, user) if user.strip() else None
    if user.strip() and who is None:
        allowed = "the name of a user, or of one who was removed"
        raise Invalid({"user": f"there is no user {user[:100]!r}; allowed: {allowed}"})
    begin = datetime.combine(since, time.min, UTC).timestamp() if since else None
    return {"run_id": run, "user_id": who.id if who else None, "since": begin}


@router.get("/export")
@requires(OPERATE, lasts=EXPORT)
def export_deeds(database: TheDatabase, _visitor: SignedIn) -> StreamingResponse:
    """Return all of it, oldest first, as JSON lines."""

    def lines() -> Iterator[str]:
        with database.reading() as session:
            for deed, name in audit.all_of_them(session):
                yield json.dumps(_row(deed, name).model_dump()) + "\n"

    return StreamingResponse(lines(), media_type="application/jsonl")
