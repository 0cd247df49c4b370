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
from app.auth.permissions import ADMIN, requires
from app.dependencies import Db, TheDatabase
from app.http.active_requests import EXPORT
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId, Text
from db.access import accounts, audit
from db.errors import Invalid
from db.tables import AuditEvent

router = APIRouter(prefix="/audit", tags=["people"])


class AuditEventRow(BaseModel):
    """What somebody has done."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    time: float
    user: Annotated[
        str | None, Field(description="Who; null of nobody known, and on the server's terminal")
    ]
    token: Annotated[str | None, Field(description="Name of the token that a script came with")]
    action: Annotated[str, Field(description="Method and path, or a command")]
    detail: Annotated[str, Field(description="Of what was sent, what may be kept")]
    run_id: int | None
    address: Annotated[str, Field(description="From where; terminal: the server's")]


class AuditLog(ListPage):
    """Deeds, newest first."""

    audit_events: list[AuditEventRow]


#: A day's beginning is the same wherever one is.
Since = Annotated[date | None, Query(description="Not before this day, UTC: 2026-11-22")]


def _row(action: AuditEvent, name: str | None) -> AuditEventRow:
    return AuditEventRow.model_validate({**vars(action), "user": name})


@router.get("")
@requires(ADMIN)
def list_audit_events(
    session: Db,
    _principal: SignedIn,
    run: Annotated[RunId | None, Query(description="Done to this run alone")] = None,
    user: Annotated[Text, Query(description="By this person alone")] = "",
    since: Since = None,
    after: After = "",
    limit: Limit = 1000,
) -> AuditLog:
    """List what was done."""
    chosen = conditions(session, run, user, since)
    found = audit.listed(session, **chosen, after=after, limit=limit)
    rows = [_row(action, name) for action, name in found.rows]
    return AuditLog(audit_events=rows, total=found.total, next=found.next)


def conditions(session: Session, run: int | None, user: str, since: date | None) -> dict[str, Any]:
    """Return what deeds are listed by. Raises Invalid of a person that there never was."""
    who = accounts.find_user(session, user) if user.strip() else None
    if user.strip() and who is None:
        allowed = "the name of a user, or of one who was removed"
        raise Invalid({"user": f"there is no user {user[:100]!r}; allowed: {allowed}"})
    begin = datetime.combine(since, time.min, UTC).timestamp() if since else None
    return {"run_id": run, "user_id": who.id if who else None, "since": begin}


@router.get("/export")
@requires(ADMIN, lasts=EXPORT)
def export_audit_log(database: TheDatabase, _principal: SignedIn) -> StreamingResponse:
    """Return all of it, oldest first, as JSON lines."""

    def lines() -> Iterator[str]:
        with database.reading() as session:
            for action, name in audit.all_of_them(session):
                yield json.dumps(_row(action, name).model_dump()) + "\n"

    return StreamingResponse(lines(), media_type="application/jsonl")
