"""Dependencies of routes: the transaction of a request, the settings, the live streams."""

from asyncio import get_running_loop
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from app.auth.login_throttling import network_of
from app.http.active_requests import ActiveRequests, Queue
from app.http.credentials import secret_of
from app.http.media_types import is_form
from app.live.live import Live
from app.live.run_states import RunStates
from db.database import Database
from db.queue import quotas
from db.settings import Settings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Concurrent requests that use the database; the others wait in the event loop. A request holds its
#: connection, and on SQLite the write lock, while it moves between threads: with as many of them as
#: threads (40) or pooled connections (55), the server would deadlock.
TURNS = 30
#: Concurrent upload chunks, in threads of their own: each of the 40 shared threads would keep the
#: memory of its largest chunk.
INGESTING = 3
#: Passwords verified concurrently; each takes 64 MiB and all cores.
HASHING = 4
#: Requests that may wait for that.
MOST_HASHING = 100

#: Uploaded images encoded concurrently, up to 440 MB each, and requests that may wait for that.
ENCODING, MOST_ENCODING = 1, 100

Done = TypeVar("Done")


async def _turn(request: Request) -> AsyncIterator[None]:
    active_requests: ActiveRequests = request.app.state.active_requests
    address = network_of(request.client.host if request.client else "")
    client = active_requests.client_of(secret_of(request), address)
    active_requests.queue(client)
    try:
        async with request.app.state.turns:
            yield
    finally:
        active_requests.unqueue(client)


async def _hashing(request: Request) -> AsyncIterator[None]:
    queue: Queue = request.app.state.hashing
    async with queue.turn():
        yield


#: Precedes the database turn, which must not be held while passwords are hashed.
Hashing = Annotated[None, Depends(_hashing, scope="function")]
Turn = Annotated[None, Depends(_turn, scope="function")]


# Dependencies that do not block are async: others cost a switch to a thread.
async def _database(request: Request, _turn: Turn) -> Database:
    database: Database = request.app.state.database
    return database


TheDatabase = Annotated[Database, Depends(_database)]


async def ingesting(request: Request, work: Callable[[], Done]) -> Done:
    """Return the result of `work` on a piece of a watched run, run in the ingest threads."""
    return await get_running_loop().run_in_executor(request.app.state.ingesting, work)


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


TheSettings = Annotated[Settings, Depends(_settings)]


async def _live(request: Request) -> Live:
    live: Live = request.app.state.live
    return live


async def _run_states(request: Request) -> RunStates:
    states: RunStates = request.app.state.run_states
    return states


async def _session(request: Request, _turn: Turn) -> AsyncIterator[Session]:
    database: Database = request.app.state.database
    settings: Settings = request.app.state.settings
    safe = request.method in SAFE_METHODS
    opened = database.reading() if safe else database.writing()
    # It connects at its first query, so nothing blocks before its end.
    async with _end_in_thread(opened) as session:
        quotas.allow(session, queued_per_user=settings.queued_per_user)
        yield session


@asynccontextmanager
async def _end_in_thread(opened: AbstractContextManager[Session]) -> AsyncIterator[Session]:
    session = opened.__enter__()
    try:
        yield session
    except BaseException as error:
        await _end(opened, type(error), error, error.__traceback__)
        raise
    await _end(opened, None, None, None)


async def _end(opened: AbstractContextManager[Session], *error: Any) -> None:
    # Shielded, so that it also runs for an aborted request; with its own limiter, since a request
    # that holds a thread may wait for this connection.
    with CancelScope(shield=True):
        await to_thread.run_sync(opened.__exit__, *error, limiter=CapacityLimiter(1))


async def _read_form(request: Request) -> FormData:
    return await request.form() if is_form(request.headers) else FormData()


TheLive = Annotated[Live, Depends(_live)]
TheRunStates = Annotated[RunStates, Depends(_run_states)]
# Scope "function": committed before the response is sent, so a client that reads it finds the
# change; and a stream that stays open holds no session.
Db = Annotated[Session, Depends(_session, scope="function")]
Posted = Annotated[FormData, Depends(_read_form)]
