"""Who changed what, when and from where. For operators."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from app.auth import SignedIn
from app.context import Db
from app.parameters import RunId, Text
from app.rendering import page
from db import deeds

router = APIRouter()


@router.get("/deeds")
def show_deeds(
    request: Request,
    session: Db,
    visitor: SignedIn,
    run: Annotated[RunId | None, Query()] = None,
    after: Text = "",
) -> HTMLResponse:
    """Show a page of them, newest first. run: those done to it alone."""
    found = deeds.listed(session, run_id=run, after=after, limit=100)
    return page(request, "deeds.html", visitor=visitor, found=found, run=run)
