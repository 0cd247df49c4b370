"""Time limit for requests: a connection without a complete request in time is closed.

uvicorn's own limit begins after a response, so a client that connects and sends nothing, or half a
request, would occupy a file descriptor forever.
"""

import asyncio
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.http.active_requests import ABORT

#: Time from the first byte to the last byte of a request. A long body gets it again if BODY_BYTES
#: have arrived meanwhile, for slow connections.
REQUEST_SECONDS = 30.0
BODY_BYTES = 64 << 10


class TimeoutProtocol(H11Protocol):
    """HTTP with a time limit for receiving each request, and responses that can be aborted.

    A response has no time limit.
    """

    _limit: asyncio.TimerHandle | None = None
    _arrived = 0  # bytes since the limit began

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        app = self.app

        async def app_that_can_abort(scope: Scope, receive: Receive, send: Send) -> None:
            extensions = {**scope.get("extensions", {}), ABORT: self.transport.abort}
            await app({**scope, "extensions": extensions}, receive, send)

        self.app = app_that_can_abort

    @property
    def waits(self) -> bool:
        """Whether a request, or its rest, has not arrived yet."""
        return self._limit is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit."""
        # Otherwise a body waits 40 ms for the acknowledgement of its head. asyncio sets this only
        # if the listening socket names its protocol, which Python's sockets do not.
        transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Stop the time limit if the request is complete."""
        self._arrived += len(data)
        super().data_received(data)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_request(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._limit is None:
            self._arrived = 0
            self._limit = self.loop.call_later(REQUEST_SECONDS, self._end_or_wait)

    def _end_or_wait(self) -> None:
        """Close the connection, unless a body is arriving or reading is paused."""
        self._limit = None
        is_coming = self.conn.their_state is h11.SEND_BODY and self._arrived >= BODY_BYTES
        if is_coming or self.flow.read_paused:
            self._wait_for_request()
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
