"""What a request works with: its one transaction, the settings, the live streams."""

from asyncio import get_running_loop
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from app.http.active_requests import ActiveRequests, Queue
from app.live.live import Live
from db.database import Database
from db.queue import quotas
from db.settings import Settings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Requests that work with the database at once; the others wait for their turn in the event loop.
#: A request holds its connection, and on SQLite the write lock, while it goes from thread to
#: thread: were there as many of them as the server's 40 threads, or the pool's 55 connections,
#: threads would wait for what those hold who wait for threads.
TURNS = 30
#: Pieces of watched runs that are worked on at once, beside those, in threads of their own: of the
#: forty each would keep the memory that its largest piece took.
INGESTING = 3
#: Passwords that are verified at once, each of which takes 64 MiB and all cores.
HASHING = 4
#: And those that wait for it.
MOST_HASHING = 100

Done = TypeVar("Done")


async def _turn(request: Request) -> AsyncIterator[None]:
    active_requests: ActiveRequests = request.app.state.active_requests
    client = _client(request)
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


def _client(request: Request) -> str:
    """Return what somebody's requests are counted by before it is known whose they are."""
    address = request.client.host if request.client else ""
    return request.headers.get("authorization") or request.headers.get("cookie") or address


#: Comes before the turn with the database, which nobody is to hold while others are hashed.
Hashing = Annotated[None, Depends(_hashing, scope="function")]
Turn = Annotated[None, Depends(_turn, scope="function")]


# What waits for nothing is async: anything else is a way to a thread and back.
async def _database(request: Request, _turn: Turn) -> Database:
    database: Database = request.app.state.database
    return database


TheDatabase = Annotated[Database, Depends(_database)]


async def ingesting(request: Request, work: Callable[[], Done]) -> Done:
    """Return what `work` on a piece of a watched run returns, once its turn has come."""
    return await get_running_loop().run_in_executor(request.app.state.ingesting, work)


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


TheSettings = Annotated[Settings, Depends(_settings)]


async def _live(request: Request) -> Live:
    live: Live = request.app.state.live
    return live


async def _session(request: Request, _turn: Turn) -> AsyncIterator[Session]:
    database: Database = request.app.state.database
    settings: Settings = request.app.state.settings
    safe = request.method in SAFE_METHODS
    opened = database.reading() if safe else database.writing()
    # It connects by its first query, so that nothing waits before its end.
    async with _ended_in_thread(opened) as session:
        quotas.allow(session, queued_per_user=settings.queued_per_user)
        yield session


@asynccontextmanager
async def _ended_in_thread(opened: AbstractContextManager[Session]) -> AsyncIterator[Session]:
    session = opened.__enter__()
    try:
        yield session
    except BaseException as error:
        await _end(opened, type(error), error, error.__traceback__)
        raise
    await _end(opened, None, None, None)


async def _end(opened: AbstractContextManager[Session], *error: Any) -> None:
    # Also of a request that is given up; and whatever the limit of threads, since who waits for
    # one may wait for this connection.
    with CancelScope(shield=True):
        await to_thread.run_sync(opened.__exit__, *error, limiter=CapacityLimiter(1))


async def _posted(request: Request) -> FormData:
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind in ("application/x-www-form-urlencoded", "multipart/form-data"):
        return await request.form()
    return FormData()


TheLive = Annotated[Live, Depends(_live)]
# Scope "function": committed before the answer is sent, so whoever reads it finds the change; and
# a stream that stays open holds no session.
Db = Annotated[Session, Depends(_session, scope="function")]
Posted = Annotated[FormData, Depends(_posted)]
