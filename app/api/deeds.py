"""Who changed what, when and from where. For operators."""

import json
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.lists import After, Limit, ListPage
from app.auth import SignedIn
from app.context import Db, TheDatabase
from app.parameters import RunId
from db import deeds
from db.tables import Deed

router = APIRouter(prefix="/deeds", tags=["people"])


class DeedRow(BaseModel):
    """A change that somebody signed in has made."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    time: float
    user: Annotated[str, Field(description="Who")]
    token: Annotated[str | None, Field(description="Name of the token that a script came with")]
    deed: Annotated[str, Field(description="Method and path")]
    run_id: int | None
    address: Annotated[str, Field(description="From where")]


class Deeds(ListPage):
    """Deeds, newest first."""

    deeds: list[DeedRow]


def _row(deed: Deed, name: str) -> DeedRow:
    return DeedRow.model_validate({**vars(deed), "user": name})


@router.get("")
def list_deeds(
    session: Db,
    _visitor: SignedIn,
    run: Annotated[RunId | None, Query(description="Done to this run alone")] = None,
    after: After = "",
    limit: Limit = 1000,
) -> Deeds:
    """List what was done."""
    found = deeds.listed(session, run_id=run, after=after, limit=limit)
    rows = [_row(deed, name) for deed, name in found.rows]
    return Deeds(deeds=rows, total=found.total, next=found.next)


@router.get("/export")
def export_deeds(database: TheDatabase, _visitor: SignedIn) -> StreamingResponse:
    """Return all of it, oldest first, as JSON lines."""

    def lines() -> Iterator[str]:
        with database.reading() as session:
            for deed, name in deeds.all_of_them(session):
                yield json.dumps(_row(deed, name).model_dump()) + "\n"

    return StreamingResponse(lines(), media_type="application/jsonl")
