"""The real web server, with real connections."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

import httpx2
import pytest
from sqlalchemy import QueuePool
from starlette.testclient import TestClient

from app.http import connections
from db.database import Database
from db.settings import Settings
from db.tables import Run
from tests.app.conftest import serving
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.site import SECONDS, until


def test_stream_continues_where_it_was_lost(
    database: Database, running: Run, script: TestClient, address: str
) -> None:
    """A browser that reconnects with the id of its last event gets only later steps."""
    headers = {"authorization": script.headers["authorization"]}
    url = f"{address}/api/v1/runs/{running.id}/live"
    record(database, running, make_steps([1.0] * 3))
    with httpx2.stream("GET", url, headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = next(_events(stream))
    assert event["data"]["steps"]["step"] == [1, 2, 3]
    record(database, running, make_steps([1.0] * 2, first=4))
    headers["last-event-id"] = event["id"]
    with httpx2.stream("GET", url, headers=headers) as stream:
        assert next(_events(stream))["data"]["steps"]["step"] == [4, 5]


@pytest.mark.slow
def test_server_stops_while_pages_are_open(
    database: Database, settings: Settings, running: Run, script: TestClient
) -> None:
    """An open stream is ended by the server, so that stopping does not wait for it."""
    headers = {"authorization": script.headers["authorization"]}
    with serving(settings, database) as (server, address):
        url = f"{address}/api/v1/runs/{running.id}/live"
        with httpx2.stream("GET", url, headers=headers) as stream:
            events = _events(stream)
            next(events)
            server.should_exit = True
            # The server ends the connection by HTTP's rules: a cut one would raise here.
            assert list(events) == []


def test_an_answer_waits_for_no_acknowledgement(settings: Settings, database: Database) -> None:
    """Each part of a response is sent at once, without waiting for an acknowledgement."""
    with (
        serving(settings, database) as (server, address),
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))),
    ):
        until(lambda: bool(server.server_state.connections))
        [protocol] = server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.sql
def test_open_streams_hold_no_connection(
    database: Database, running: Run, script: TestClient, address: str
) -> None:
    """Open pages hold no connection, so the connection pool stays free."""
    headers = {"authorization": script.headers["authorization"]}
    record(database, running, make_steps([1.0] * 3))
    with ExitStack() as stack:
        for path in ("/api/v1/runs/live", f"/api/v1/runs/{running.id}/live") * 5:
            stream = stack.enter_context(httpx2.stream("GET", f"{address}{path}", headers=headers))
            next(_events(stream))
        pool = database.engine.pool
        assert isinstance(pool, QueuePool)
        until(lambda: pool.checkedout() == 0)


HALF_REQUESTS = [
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nname",
]


@pytest.mark.parametrize("after_one", [False, True])
@pytest.mark.parametrize("said", HALF_REQUESTS, ids=["nothing", "half a header", "half a body"])
def test_who_sends_no_whole_request_is_not_waited_for(
    address: str, monkeypatch: pytest.MonkeyPatch, said: bytes, after_one: bool
) -> None:
    """The server closes a connection that stays silent, also after a response."""
    with ExitStack() as stack:
        if not after_one:
            monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
        connection = stack.enter_context(socket.create_connection(_host_and_port(address)))
        connection.settimeout(SECONDS)
        if after_one:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(9999).startswith(b"HTTP/1.1 200 OK")
            monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
        with suppress(ConnectionError):  # closed is closed
            connection.sendall(said)
            while connection.recv(9999):
                pass


def test_a_long_body_may_take_its_time(
    database: Database, settings: Settings, script: TestClient
) -> None:
    """A slow upload of a checkpoint is received as long as data keep arriving."""
    head = (
        "PUT /api/v1/uploads/w.pt HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n"
        f"Authorization: {script.headers['authorization']}\r\n\r\n"
    )
    with (
        serving(settings, database) as (server, address),
        socket.create_connection(_host_and_port(address)) as connection,
    ):
        connection.settimeout(SECONDS)
        connection.sendall(head.encode() + bytes(connections.BODY_BYTES))
        until(lambda: any(_has_arrived(each) for each in list(server.server_state.connections)))
        [protocol] = server.server_state.connections
        assert isinstance(protocol, connections.TimeoutProtocol)
        end_or_wait = partial(protocol.loop.call_soon_threadsafe, protocol._end_or_wait)
        end_or_wait()
        until(lambda: protocol._arrived == 0)
        assert protocol.waits
        end_or_wait()
        with suppress(ConnectionError):  # closed is closed
            while connection.recv(9999):
                pass


def _has_arrived(protocol: object) -> bool:
    assert isinstance(protocol, connections.TimeoutProtocol)
    return protocol._arrived >= connections.BODY_BYTES


def test_headers_are_bounded(address: str) -> None:
    """A connection with endless headers is closed long before 100 MB."""
    with socket.create_connection(_host_and_port(address), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        header = b"X: %s\r\n" % (b"x" * 1000)
        with pytest.raises(ConnectionError):
            connection.sendall(header * 100_000)


def test_an_answer_may_take_longer_than_a_request(
    database: Database, settings: Settings, running: Run, script: TestClient
) -> None:
    """A live stream stays open longer than the time limit of requests, which is for
    received data.
    """
    headers = {"authorization": script.headers["authorization"]}
    with serving(settings, database) as (server, address), ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection(_host_and_port(address)))
        url = f"{address}/api/v1/runs/{running.id}/live"
        stream = stack.enter_context(httpx2.stream("GET", url, headers=headers))
        events = _events(stream)  # kept: a generator that is dropped closes its stream
        next(events)
        waits = {each.client[1]: each.waits for each in list(server.server_state.connections)}
        assert waits.pop(silent.getsockname()[1]) is True
        assert list(waits.values()) == [False]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").partition(":")
    return host, int(port)


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
