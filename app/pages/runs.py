"""The list of runs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.auth import SignedIn
from app.context import Db, TheSettings
from app.disk import disk
from app.news import list_cursor
from app.parameters import STATUSES, RowId, RunId, StatusFilter, Text
from app.rendering import page
from app.summary import summarise_all
from db import run_bin, runs, series, waiting
from db.waiting import Queue

router = APIRouter()

PAGE_SIZE = 50


@router.get("/runs")
def list_runs(
    request: Request,
    session: Db,
    settings: TheSettings,
    visitor: SignedIn,
    status: StatusFilter = "",
    text: Text = "",
    before: RunId | None = None,
    ended: RowId = 0,
    deleted: RowId | None = None,
) -> HTMLResponse:
    """Show the runs, newest first; the filter is in the address.

    ended: how many of those that were to be cancelled had ended already.  deleted: a run that was
    deleted just now.
    """
    rows = runs.newest(session, status=status, text=text, before=before, limit=PAGE_SIZE)
    (newest, moment), queue = runs.newest_and_now(session), Queue.read(session)
    marks = waiting.marks([run for run, _owner in rows], queue, moment)
    lines = series.sparklines(session, [run for run, _owner in rows])
    return page(
        request,
        "runs.html",
        visitor=visitor,
        rows=[
            (summary, lines[summary.id])
            for summary in summarise_all(session, rows, settings, queue, moment)
        ],
        older=rows[-1][0].id if len(rows) == PAGE_SIZE else None,
        newest=newest,
        cursor=list_cursor(newest, marks, is_worker_up=bool(queue.workers)),
        is_worker_up=bool(queue.workers),
        status=status,
        text=text,
        before=before,
        ended=ended,
        deleted=run_bin.restorable(session, deleted),
        days=settings.bin_days,
        bin=run_bin.contents(session),
        disk=disk(settings),
        statuses=STATUSES,
    )
