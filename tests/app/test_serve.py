"""The real web server, with real connections."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
from sqlalchemy import QueuePool
from starlette.testclient import TestClient

from db.database import Database
from db.settings import Settings
from db.tables import Run
from tests.app.conftest import serving
from tests.db.telemetry_made import make_steps, record
from tests.site import until


def test_stream_goes_on_where_it_was_lost(
    database: Database, running: Run, script: TestClient, address: str
) -> None:
    """A browser that comes back with its last event's id gets only the steps after it."""
    headers = {"authorization": script.headers["authorization"]}
    url = f"{address}/api/runs/{running.id}/live"
    record(database, running, make_steps([1.0] * 3))
    with httpx2.stream("GET", url, headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = next(_events(stream))
    assert event["data"]["steps"]["step"] == [1, 2, 3]
    record(database, running, make_steps([1.0] * 2, first=4))
    headers["last-event-id"] = event["id"]
    with httpx2.stream("GET", url, headers=headers) as stream:
        assert next(_events(stream))["data"]["steps"]["step"] == [4, 5]


def test_server_stops_while_pages_are_open(
    database: Database, settings: Settings, running: Run, script: TestClient
) -> None:
    """An open stream is ended by the server, so that stopping does not wait for it."""
    headers = {"authorization": script.headers["authorization"]}
    with serving(settings, database) as (server, address):
        url = f"{address}/api/runs/{running.id}/live"
        with httpx2.stream("GET", url, headers=headers) as stream:
            events = _events(stream)
            next(events)
            server.should_exit = True
            # The server says goodbye in HTTP's terms: a cut connection would raise here.
            assert list(events) == []


def test_open_streams_hold_no_connection(
    database: Database, running: Run, script: TestClient, address: str
) -> None:
    """However many pages are open, the pool is everybody else's."""
    headers = {"authorization": script.headers["authorization"]}
    record(database, running, make_steps([1.0] * 3))
    with ExitStack() as stack:
        for path in ("/api/runs/live", f"/api/runs/{running.id}/live") * 5:
            stream = stack.enter_context(httpx2.stream("GET", f"{address}{path}", headers=headers))
            next(_events(stream))
        pool = database.engine.pool
        assert isinstance(pool, QueuePool)
        until(lambda: pool.checkedout() == 0)


def _events(stream: httpx2.Response) -> Iterator[dict[str, object]]:
    event: dict[str, object] = {}
    for line in stream.iter_lines():
        name, _, value = line.partition(": ")
        if name == "data":
            event["data"] = json.loads(value)
        elif name == "id":
            event["id"] = value
        elif not line and "data" in event:
            yield event
            event = {}
