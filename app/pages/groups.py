"""Runs of one configuration in several precisions, side by side."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from app import comparison
from app.auth import SignedIn
from app.context import Db, TheSettings
from app.news import list_cursor
from app.parameters import RunId
from app.rendering import page
from db import runs, waiting
from db.waiting import Queue

router = APIRouter()


@router.post("/runs/{run_id}/comparison")
def compare(run_id: RunId, session: Db, visitor: SignedIn) -> RedirectResponse:
    """Queue the run in each precision, and lead to where they are compared."""
    queued = comparison.queue(session, visitor.user, runs.get(session, run_id))
    return RedirectResponse(f"/groups/{queued[0].group_id}", status_code=303)


@router.get("/groups/{group_id}")
def show_group(
    group_id: RunId, request: Request, session: Db, settings: TheSettings, visitor: SignedIn
) -> HTMLResponse:
    """Lay the runs side by side; the browser fetches the page anew while they change."""
    laid_out = comparison.lay_out(session, group_id, settings)
    shown = [column.run.id for column in laid_out.columns]
    queue = Queue.read(session)
    marks = waiting.live_marks(session, shown, queue)
    newest = runs.newest_id(session)
    return page(
        request,
        "group.html",
        visitor=visitor,
        group_id=group_id,
        comparison=laid_out,
        labels=comparison.LABELS,
        is_over=all(column.run.is_over for column in laid_out.columns),
        cursor=list_cursor(newest, marks, is_worker_up=bool(queue.workers)),
    )
