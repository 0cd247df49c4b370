"""Many requests at once."""

import asyncio

import httpx2
from fastapi import FastAPI

from app.context import TURNS
from db import accounts
from db.database import Database
from db.tables import User

REQUESTS = 150


async def _answers(app: FastAPI, token: str) -> list[set[int]]:
    """Send them all at once, readers and then writers; return the status codes of each kind."""
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {token}"},
        timeout=None,
    ) as client:
        reading = [client.get("/api/v1/runs") for _ in range(REQUESTS)]
        read = await asyncio.gather(*reading)
        writing = [client.delete("/api/v1/tokens/1234") for _ in range(REQUESTS)]
        written = await asyncio.gather(*writing)
        return [{answer.status_code for answer in answers} for answers in (read, written)]


def test_any_number_of_requests_at_once_are_answered(
    app: FastAPI, database: Database, ada: User
) -> None:
    """More than there are threads and connections, readers and writers alike, wait their turn."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    assert asyncio.run(_answers(app, token)) == [{200}, {204}]


def test_turns_leave_threads_and_connections_to_others(database: Database) -> None:
    """Whoever holds a connection between threads finds a thread, and a look a connection."""
    pool = database.engine.pool
    assert TURNS < 40  # of anyio's threads
    assert database.engine.dialect.name == "sqlite" or pool.size() + pool._max_overflow > TURNS  # type: ignore[attr-defined]
