"""Many concurrent requests."""

import asyncio
import gc
import weakref

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import event
from sqlalchemy.orm import Session

from app.dependencies import TURNS
from db.access import accounts
from db.database import Database
from db.tables import User

pytestmark = pytest.mark.sql

REQUESTS = 100


def _client(app: FastAPI, token: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {token}"},
        timeout=None,
    )


async def _answer(app: FastAPI, token: str, path: str) -> int:
    async with _client(app, token) as client:
        return (await client.get(path)).status_code


async def _answers(app: FastAPI, token: str) -> list[set[int]]:
    """Send all requests at once, readers before writers; return the status codes of each kind."""
    async with _client(app, token) as client:
        reading = [client.get("/api/v1/runs") for _ in range(REQUESTS)]
        read = await asyncio.gather(*reading)
        writing = [client.delete("/api/v1/tokens/1234") for _ in range(REQUESTS)]
        written = await asyncio.gather(*writing)
        return [{answer.status_code for answer in answers} for answers in (read, written)]


@pytest.mark.slow
def test_any_number_of_requests_at_once_are_answered(
    app: FastAPI, database: Database, ada: User
) -> None:
    """Requests beyond the threads and connections wait for their turn, readers and
    writers alike.
    """
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    assert asyncio.run(_answers(app, token)) == [{200}, {204}]


def test_a_rejected_request_leaves_nothing_behind(
    app: FastAPI, database: Database, ada: User
) -> None:
    """After a rejected request the session is released without garbage collection."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    opened: list[weakref.ref[Session]] = []

    def note(session: Session, *_: object) -> None:
        opened.append(weakref.ref(session))

    event.listen(Session, "after_begin", note)
    gc.disable()
    try:
        assert asyncio.run(_answer(app, token, "/api/v1/runs/1234")) == 404
        assert opened
        assert [session() for session in opened] == [None] * len(opened)
    finally:
        gc.enable()
        event.remove(Session, "after_begin", note)


def test_requests_cannot_exhaust_threads_and_connections(database: Database) -> None:
    """Requests with a connection always get a thread, and read-only requests a connection."""
    pool = database.engine.pool
    assert TURNS < 40  # of anyio's threads
    assert database.engine.dialect.name == "sqlite" or pool.size() + pool._max_overflow > TURNS  # type: ignore[attr-defined]
