"""Pages of workers."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ADMIN, SIGNED_IN, requires
from app.dependencies import Db, TheSettings
from app.html.rendering import page
from app.http.parameters import RowId
from app.live.worker_updates import MOST_FOLLOWED, cursor_of
from db.queue import device_grid, pending_reasons, workers
from db.queue.pending_reasons import Queue
from db.runs import runs

router = APIRouter(prefix="/workers")

#: Queued runs that are listed; the list of runs has all.
MOST_QUEUED = 50


@router.get("")
@requires(SIGNED_IN)
def list_workers(
    request: Request, session: Db, settings: TheSettings, principal: SignedIn
) -> HTMLResponse:
    """Show the devices of workers with their runs, and the queue in order."""
    rows = device_grid.read(session, MOST_FOLLOWED)
    queue = Queue.read(session)
    first = sorted(queue.places, key=queue.places.__getitem__)[:MOST_QUEUED]
    seen = {run.id: (run, owner) for run, owner in runs.with_owners(session, first)}
    return page(
        request,
        "workers/workers.html",
        principal=principal,
        rows=rows,
        cursor=cursor_of(rows),
        queued=[
            (
                position,
                *seen[run_id],
                pending_reasons.reason(seen[run_id][0], queue, **settings.per_user),
            )
            for position, run_id in enumerate(first, 1)
            if run_id in seen
        ],
        total=len(queue.places),
    )


@router.get("/{worker_id}")
@requires(SIGNED_IN)
def show_worker(
    worker_id: RowId, request: Request, session: Db, principal: SignedIn
) -> HTMLResponse:
    """Show a worker with its devices, recipes and versions."""
    worker, is_up = workers.with_liveness(session, worker_id)
    outdated = workers.OUTDATED if workers.is_outdated(worker) else ""
    return page(
        request,
        "workers/worker.html",
        principal=principal,
        worker=worker,
        alive=is_up,
        outdated=outdated,
    )


@router.post("/{worker_id}/drain")
@requires(ADMIN)
@audited("stop")
def drain(
    worker_id: RowId,
    session: Db,
    _principal: SignedIn,
    _at_browser: AtBrowser,
    stop: Annotated[bool, Form()] = False,
) -> Response:
    """Drain a worker. stop: also stop its runs."""
    workers.drain(session, worker_id, stop=stop)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)


@router.post("/{worker_id}/undrain")
@requires(ADMIN)
def undrain(
    worker_id: RowId, session: Db, _principal: SignedIn, _at_browser: AtBrowser
) -> Response:
    """Let a worker claim runs again."""
    workers.undrain(session, worker_id)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)
