"""The machines that train."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.auth import AtBrowser, SignedIn
from app.context import Db
from app.parameters import RowId
from app.rendering import page
from app.worker_news import MOST_FOLLOWED, cursor_of
from db import grid, workers

router = APIRouter(prefix="/workers")


@router.get("")
def list_workers(request: Request, session: Db, visitor: SignedIn) -> HTMLResponse:
    """Show which device of which worker is in use for what."""
    rows = grid.read(session, MOST_FOLLOWED)
    return page(request, "workers.html", visitor=visitor, rows=rows, cursor=cursor_of(rows))


@router.get("/{worker_id}")
def show_worker(worker_id: RowId, request: Request, session: Db, visitor: SignedIn) -> HTMLResponse:
    """Show one: its devices, recipes and versions."""
    worker, is_up = workers.found(session, worker_id)
    return page(request, "worker.html", visitor=visitor, worker=worker, alive=is_up)


@router.post("/{worker_id}/drain")
def drain(
    worker_id: RowId,
    session: Db,
    _visitor: SignedIn,
    _at_browser: AtBrowser,
    stop: Annotated[bool, Form()] = False,
) -> Response:
    """Have it take nothing more. stop: nor go on with what it has."""
    workers.drain(session, worker_id, stop=stop)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)


@router.post("/{worker_id}/undrain")
def undrain(worker_id: RowId, session: Db, _visitor: SignedIn, _at_browser: AtBrowser) -> Response:
    """Let it take runs again."""
    workers.undrain(session, worker_id)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)
