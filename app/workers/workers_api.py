"""Workers, and the recipes that they offer."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ADMIN, SIGNED_IN, requires
from app.dependencies import Db, TheDatabase, TheLive
from app.http.active_requests import STREAM
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId
from app.live import worker_updates
from app.live.streams_api import After as Cursor
from app.live.streams_api import LastEventId
from db.queue import workers
from db.tables import Worker

router = APIRouter(tags=["workers"])


class WorkerState(BaseModel):
    """A machine that trains."""

    id: int
    name: str
    host: str
    alive: bool
    devices: list[dict[str, Any]]
    recipes: list[dict[str, Any]]
    offers_commands: Annotated[bool, Field(description="Whether it runs command lines")]
    is_sandboxed: Annotated[
        bool,
        Field(description="Whether the sandbox of its runs held when the worker probed it"),
    ]
    sandbox: Annotated[
        dict[str, str],
        Field(
            description="users, memory, processes, cpus, if asked for: '' or why it does not "
            "stand; sandbox, if it does not hold: which place a run could write, or why not"
        ),
    ]
    drained_at: Annotated[float | None, Field(description="Since when it takes nothing more")]
    drain_stops: Annotated[bool, Field(description="Nor goes on with what it has")]
    only_run_id: Annotated[
        int | None, Field(description="Of one that a cluster started: the run that it is for")
    ]
    placement: Annotated[
        str | None, Field(description="Of one that trains nothing itself: the cluster that it asks")
    ]
    versions: dict[str, Any]
    started_at: float
    seen_at: float


class Workers(ListPage):
    """Workers, in the order in which they came."""

    workers: list[WorkerState]


@router.get("/workers")
@requires(SIGNED_IN)
def list_workers(
    session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Workers:
    """List workers; those that are silent are not alive."""
    found = workers.page_of_everyone(session, after=after, limit=limit)
    states = [_state(worker, alive=alive) for worker, alive in found.rows]
    return Workers(workers=states, total=found.total, next=found.next)


class Drain(Body):
    """How a worker is drained."""

    stop: Annotated[
        bool, Field(description="What runs leaves a checkpoint and goes back to the queue")
    ] = False


@router.post("/workers/{worker_id}/drain")
@requires(ADMIN)
@audited("stop")
def drain_worker(worker_id: RowId, wanted: Drain, session: Db, _principal: SignedIn) -> WorkerState:
    """Have a worker take nothing more."""
    workers.drain(session, worker_id, stop=wanted.stop)
    return _found(session, worker_id)


@router.post("/workers/{worker_id}/undrain")
@requires(ADMIN)
def undrain_worker(worker_id: RowId, session: Db, _principal: SignedIn) -> WorkerState:
    """Let a worker take runs again."""
    workers.undrain(session, worker_id)
    return _found(session, worker_id)


@router.get("/workers/live", response_class=EventSourceResponse)
@requires(SIGNED_IN, lasts=STREAM)
async def stream_workers(
    database: TheDatabase,
    live: TheLive,
    principal: SignedIn,
    after: Cursor = "",
    last_event_id: LastEventId = "",
) -> AsyncIterator[ServerSentEvent]:
    """Send the rows of the page of workers that changed, as HTML."""
    look = worker_updates.of_workers(database, principal.grants)
    subject = f"workers {principal.grants.projects}"  # who sees the same shares a look
    seconds = worker_updates.LIVE_SECONDS
    async for event in live.stream(subject, last_event_id or after, look, seconds=seconds):
        yield event


@router.get("/recipes")
@requires(SIGNED_IN)
def list_recipes(session: Db, _principal: SignedIn) -> list[dict[str, Any]]:
    """List the recipes that can be submitted, each with the JSON Schema of its configuration."""
    return workers.recipes(session)


def _found(session: Session, worker_id: int) -> WorkerState:
    worker, is_up = workers.found(session, worker_id)
    return _state(worker, alive=is_up)


def _state(worker: Worker, *, alive: bool) -> WorkerState:
    return WorkerState.model_validate({**vars(worker), "alive": alive})
