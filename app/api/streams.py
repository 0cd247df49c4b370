"""Live streams, as server-sent events. The id of an event is a cursor to come back with."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from app import news
from app.auth import SignedIn
from app.context import Db, TheDatabase, TheLive, TheSettings
from app.parameters import RunId
from db import runs

router = APIRouter(prefix="/runs", tags=["live"])

RUN_SECONDS = 0.05  # a look that finds nothing takes half a millisecond
LIST_SECONDS = 0.5

After = Annotated[str, Query(description="Cursor of what you have seen")]
LastEventId = Annotated[str, Header(description="The same, from a browser that comes back")]


@router.get("/live", response_class=EventSourceResponse)
async def watch_list(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    _visitor: SignedIn,
    after: After = "",
    last_event_id: LastEventId = "",
) -> AsyncIterator[ServerSentEvent]:
    """Send each row of the list of runs that changed, as HTML."""
    look = news.of_list(database, settings)
    async for event in live.watch("runs", last_event_id or after, look, seconds=LIST_SECONDS):
        yield event


def _existing(run_id: RunId, session: Db) -> int:
    return runs.get(session, run_id).id


@router.get("/{run_id}/live", response_class=EventSourceResponse)
async def watch_run(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    _visitor: SignedIn,
    run_id: Annotated[int, Depends(_existing)],
    after: After = "",
    last_event_id: LastEventId = "",
) -> AsyncIterator[ServerSentEvent]:
    """Send what is new about a run.

    "steps" replaces all that you have from its first step on: after a resume, steps run again.
    """
    look = news.of_run(database, settings, run_id)
    subject = f"run {run_id}"
    async for event in live.watch(subject, last_event_id or after, look, seconds=RUN_SECONDS):
        yield event
