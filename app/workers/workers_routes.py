"""Workers and recipes: routes and pages."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Form
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ADMIN, SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, TheDatabase, TheLive
from app.html.rendering import Context
from app.http.active_requests import STREAM
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, DocumentedModel, RowId
from app.live import worker_updates
from app.live.streams_api import After as Cursor
from app.live.streams_api import LastEventId
from app.live.worker_updates import MOST_FOLLOWED, cursor_of
from db.queue import device_grid, pending_reasons, workers
from db.queue.pending_reasons import Queue
from db.runs import runs
from db.tables import Worker

api = Router(tags=["workers"])
pages = Router(prefix="/workers")


class WorkerState(DocumentedModel):
    """A worker with its capabilities."""

    id: int
    name: str
    host: str
    alive: bool
    outdated: bool
    """Whether it has another version than the server; recipes are not used"""
    devices: list[dict[str, Any]]
    recipes: list[dict[str, Any]]
    offers_commands: Annotated[bool, Field(description="Whether it runs command lines")]
    is_sandboxed: bool
    """Whether the sandbox passed the worker's check at its start"""
    sandbox: Annotated[
        dict[str, str],
        Field(
            description="State of the requested isolation (users, memory, processes, cpus): '' or "
            "why it is not active; sandbox, if it failed: the path a run could write, or the error"
        ),
    ]
    drained_at: Annotated[float | None, Field(description="Time since which it claims no runs")]
    drain_stops: Annotated[bool, Field(description="Whether the drain also stops its runs")]
    only_run_id: Annotated[int | None, Field(description="The run that a cluster started it for")]
    placement: Annotated[str | None, Field(description="The cluster that it requests workers from")]
    versions: dict[str, Any]
    warm_memory_bytes: Annotated[
        int | None,
        Field(
            description="Memory (proportional set size) of the process that its trainings are "
            "forked from; null without such a process"
        ),
    ]
    started_at: float
    seen_at: float
    stopped_at: Annotated[float | None, Field(description="Null unless the worker was stopped")]


class Workers(ListPage):
    """Workers in order of registration."""

    workers: list[WorkerState]


@api.get("/workers", SIGNED_IN)
def list_workers(session: Db, after: After = "", limit: Limit = 1000) -> Workers:
    """List workers; those that do not report are not alive."""
    listed = workers.page_of_all(session, after=after, limit=limit)
    states = [_state(worker, alive=alive) for worker, alive in listed.rows]
    return Workers(workers=states, total=listed.total, next=listed.next)


class Drain(Body):
    """Options of a drain."""

    stop: Annotated[
        bool, Field(description="Its runs save a checkpoint and return to the queue")
    ] = False


@api.post("/workers/{worker_id}/drain", ADMIN)
@audited("stop")
def drain_worker(worker_id: RowId, body: Drain, session: Db) -> WorkerState:
    """Drain a worker, so that it claims no further runs."""
    workers.drain(session, worker_id, stop=body.stop)
    return _worker(session, worker_id)


@api.post("/workers/{worker_id}/undrain", ADMIN)
def undrain_worker(worker_id: RowId, session: Db) -> WorkerState:
    """Let a worker claim runs again."""
    workers.undrain(session, worker_id)
    return _worker(session, worker_id)


@api.get("/workers/live", SIGNED_IN, lasts=STREAM, response_class=EventSourceResponse)
async def stream_workers(
    database: TheDatabase,
    live: TheLive,
    principal: SignedIn,
    after: Cursor = "",
    last_event_id: LastEventId = "",
) -> AsyncIterator[ServerSentEvent]:
    """Stream changed rows of the workers page as HTML."""
    poll = worker_updates.of_workers(database, principal.grants)
    subject = f"workers {principal.grants.projects}"  # principals with the same view share a poll
    seconds = worker_updates.LIVE_SECONDS
    async for event in live.stream(subject, last_event_id or after, poll, seconds=seconds):
        yield event


@api.get("/recipes", SIGNED_IN)
def list_recipes(session: Db) -> list[dict[str, Any]]:
    """List the recipes that can be submitted, each with the JSON Schema of its configuration."""
    return workers.recipes(session)


def _worker(session: Session, worker_id: int) -> WorkerState:
    worker, is_up = workers.with_liveness(session, worker_id)
    return _state(worker, alive=is_up)


def _state(worker: Worker, *, alive: bool) -> WorkerState:
    outdated = workers.is_outdated(worker)
    return WorkerState.model_validate({**vars(worker), "alive": alive, "outdated": outdated})


#: Queued runs that are listed; the list of runs has all.
MOST_QUEUED = 50


@pages.get("", SIGNED_IN)
def show_workers(context: Context) -> HTMLResponse:
    """Show the devices of workers with their runs, and the queue in order."""
    rows = device_grid.read(context.session, MOST_FOLLOWED)
    queue = Queue.read(context.session)
    first = sorted(queue.places, key=queue.places.__getitem__)[:MOST_QUEUED]
    seen = {run.id: (run, owner) for run, owner in runs.with_owners(context.session, first)}
    return context.render(
        "workers/workers.html",
        rows=rows,
        cursor=cursor_of(rows),
        queued=[
            (
                position,
                *seen[run_id],
                pending_reasons.reason(seen[run_id][0], queue, **context.settings.per_user),
            )
            for position, run_id in enumerate(first, 1)
            if run_id in seen
        ],
        total=len(queue.places),
    )


@pages.get("/{worker_id}", SIGNED_IN)
def show_worker(worker_id: RowId, context: Context) -> HTMLResponse:
    """Show a worker with its devices, recipes and versions."""
    worker, is_up = workers.with_liveness(context.session, worker_id)
    outdated = workers.describe_outdated([worker]) if workers.is_outdated(worker) else ""
    return context.render("workers/worker.html", worker=worker, alive=is_up, outdated=outdated)


@pages.post("/{worker_id}/drain", ADMIN)
@audited("stop")
def drain(
    worker_id: RowId,
    session: Db,
    _at_browser: AtBrowser,
    stop: Annotated[bool, Form()] = False,
) -> Response:
    """Drain a worker. stop: also stop its runs."""
    workers.drain(session, worker_id, stop=stop)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)


@pages.post("/{worker_id}/undrain", ADMIN)
def undrain(worker_id: RowId, session: Db, _at_browser: AtBrowser) -> Response:
    """Let a worker claim runs again."""
    workers.undrain(session, worker_id)
    return RedirectResponse(f"/workers/{worker_id}", status_code=303)
