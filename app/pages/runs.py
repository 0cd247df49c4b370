"""The list of runs."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from app.auth import SignedIn
from app.context import Db, TheSettings
from app.news import list_cursor
from app.rendering import page
from app.summary import summarise
from db import runs, series, workers
from db.tables import Status

router = APIRouter()

PAGE_SIZE = 50


@router.get("/runs")
def list_runs(
    request: Request,
    session: Db,
    settings: TheSettings,
    visitor: SignedIn,
    status: str = "",
    text: str = "",
    before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
) -> HTMLResponse:
    """Show the runs, newest first; the filter is in the address."""
    rows = runs.newest(session, status=status, text=text, before=before, limit=PAGE_SIZE)
    newest = runs.newest_id(session)
    return page(
        request,
        "runs.html",
        visitor=visitor,
        rows=[
            (summarise(session, run, owner, settings), series.sparkline(session, run))
            for run, owner in rows
        ],
        older=rows[-1][0].id if len(rows) == PAGE_SIZE else None,
        newest=newest,
        cursor=list_cursor(newest, runs.live_marks(session)),
        workers_up=sum(alive for _worker, alive in workers.everyone(session)),
        status=status,
        text=text,
        before=before,
        statuses=["active", *Status],
    )
