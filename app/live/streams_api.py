"""Live streams as server-sent events; the id of an event is a cursor to resume from."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, TheDatabase, TheLive, TheRunStates, TheSettings
from app.http.active_requests import STREAM
from app.http.parameters import RunId, Text
from app.live import run_updates
from app.runs import columns as list_columns
from app.telemetry.metric_names import Chosen
from db.access.permissions import Permission
from db.runs import runs

router = Router(prefix="/runs", tags=["live"])

EVERYTHING = ",".join(run_updates.PARTS)
ALLOWED = (*run_updates.PARTS, run_updates.FIRST_CHARTS)
LIST_SECONDS = 0.5

After = Annotated[str, Query(description="Cursor of the last received event")]
LastEventId = Annotated[str, Header(description="The same, sent by a browser when it reconnects")]


def _parts(text: str) -> str:
    if unknown := set(text.split(",")) - {*ALLOWED, ""}:
        raise PydanticCustomError(
            "parts",
            "unknown: {unknown}; allowed: {allowed}, separated by commas",
            {"unknown": ", ".join(sorted(unknown)), "allowed": ", ".join(ALLOWED)},
        )
    return text


Parts = Annotated[
    str, AfterValidator(_parts), Query(description="Parts of the messages, separated by commas")
]


@router.get("/live", SIGNED_IN, lasts=STREAM, response_class=EventSourceResponse)
async def stream_list(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    principal: SignedIn,
    after: After = "",
    last_event_id: LastEventId = "",
    columns: Annotated[Text, Query(description="Columns of the rows, separated by commas")] = "",
) -> AsyncIterator[ServerSentEvent]:
    """Stream changed rows of the list of runs as HTML."""
    shown = list_columns.chosen(columns)
    poll = run_updates.of_list(database, settings, columns=shown, grants=principal.grants)
    # Viewers of the same columns and projects share a poll.
    names = ",".join(column.name for column in shown)
    subject = f"runs {names} {principal.grants.projects}"
    async for event in live.stream(subject, last_event_id or after, poll, seconds=LIST_SECONDS):
        yield event


def _existing(run_id: RunId, session: Db) -> int:
    return runs.get(session, run_id).id


@router.get("/{run_id}/live", Permission.VIEW_RUN, lasts=STREAM, response_class=EventSourceResponse)
async def stream_run(
    database: TheDatabase,
    settings: TheSettings,
    live: TheLive,
    states: TheRunStates,
    principal: SignedIn,
    run_id: Annotated[int, Depends(_existing)],
    chosen: Chosen,
    after: After = "",
    last_event_id: LastEventId = "",
    parts: Parts = EVERYTHING,
) -> AsyncIterator[ServerSentEvent]:
    """Stream the requested parts of a run's changes.

    "steps" replaces all steps from its first step on, since a resume repeats steps. "metrics" are
    points of a page of metrics; each replaces the later ones of its metric. Cursors count flushes,
    of which a run has only the latest: `has_all_metrics` is false if earlier ones are missing,
    whose points `/metrics` returns.
    """
    requested = [name for name in ALLOWED if name in parts.split(",")]
    poll = run_updates.of_run(
        database, settings, run_id, parts=requested, grants=principal.grants, chosen=chosen
    )
    # Viewers of the same parts and projects share a poll; all pages request the same parts.
    subject = " ".join((f"run {run_id}", *requested, str(principal.grants.projects), str(chosen)))
    watching = run_updates.watching_run(states, run_id)
    async for event in live.stream(subject, last_event_id or after, poll, watching=watching):
        yield event
