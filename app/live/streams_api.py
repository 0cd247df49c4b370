"""Live streams, as server-sent events. The id of an event is a cursor to come back with."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, TheDatabase, TheLive, TheSettings
from app.http.active_requests import STREAM
from app.http.parameters import RunId, Text
from app.live import run_updates
from app.runs import columns as list_columns
from app.telemetry.metric_names import Chosen
from db.access.permissions import Permission
from db.runs import runs

router = APIRouter(prefix="/runs", tags=["live"])

EVERYTHING = ",".join(run_updates.PARTS)
RUN_SECONDS = 0.05  # a look that finds nothing takes half a millisecond
LIST_SECONDS = 0.5

After = Annotated[str, Query(description="Cursor of what you have seen")]
LastEventId = Annotated[str, Header(description="The same, from a browser that comes back")]


def _parts(text: str) -> str:
    if unknown := set(text.split(",")) - {*run_updates.PARTS, ""}:
        raise PydanticCustomError(
            "parts",
            "there is no {unknown}; allowed: {allowed}, with commas between them",
            {"unknown": ", ".join(sorted(unknown)), "allowed": ", ".join(run_updates.PARTS)},
        )
    return text


Parts = Annotated[
    str, AfterValidator(_parts), Query(description="Parts of the news, with commas between them")
]


@router.get("/live", response_class=EventSourceResponse)
@requires(SIGNED_IN, lasts=STREAM)
async def stream_list(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    principal: SignedIn,
    after: After = "",
    last_event_id: LastEventId = "",
    columns: Annotated[Text, Query(description="Of the rows, with commas between them")] = "",
) -> AsyncIterator[ServerSentEvent]:
    """Send each row of the list of runs that changed, as HTML."""
    shown = list_columns.chosen(columns)
    look = run_updates.of_list(database, settings, columns=shown, grants=principal.grants)
    # Viewers of the same columns and projects share a look.
    names = ",".join(column.name for column in shown)
    subject = f"runs {names} {principal.grants.projects}"
    async for event in live.stream(subject, last_event_id or after, look, seconds=LIST_SECONDS):
        yield event


def _existing(run_id: RunId, session: Db) -> int:
    return runs.get(session, run_id).id


@router.get("/{run_id}/live", response_class=EventSourceResponse)
@requires(Permission.VIEW_RUN, lasts=STREAM)
async def stream_run(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    principal: SignedIn,
    run_id: Annotated[int, Depends(_existing)],
    chosen: Chosen,
    after: After = "",
    last_event_id: LastEventId = "",
    parts: Parts = EVERYTHING,
) -> AsyncIterator[ServerSentEvent]:
    """Send what is new about a run, of the parts that are asked for.

    "steps" replaces all that you have from its first step on: after a resume, steps run again.
    "metrics" are points of a page of metrics, in order of name.
    """
    asked = [name for name in run_updates.PARTS if name in parts.split(",")]
    look = run_updates.of_run(
        database, settings, run_id, parts=asked, grants=principal.grants, chosen=chosen
    )
    # Viewers of the same parts and projects share a look; all pages ask for the same parts.
    subject = " ".join((f"run {run_id}", *asked, str(principal.grants.projects), str(chosen)))
    async for event in live.stream(subject, last_event_id or after, look, seconds=RUN_SECONDS):
        yield event
