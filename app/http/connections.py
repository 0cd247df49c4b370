"""A connection that waits for nothing: one on which no whole request comes in time is closed.

uvicorn's own time limit begins after an answer, so somebody who connects and says nothing, or half
of something, would stay for ever and take a file descriptor with him.
"""

import asyncio
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.http.active_requests import ABORT

#: From the first sign of somebody to the last byte of what he asks; or, of a long body, from each
#: such time to the next, if so much of it has come meanwhile: a slow line, and nobody who dawdles.
REQUEST_SECONDS = 30.0
BODY_BYTES = 64 << 10


class TimeoutProtocol(H11Protocol):
    """HTTP, with a time limit on each request's arrival. An answer may take as long as it likes,
    and may be broken off.
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
        """Whether a request has yet to come, or the rest of it."""
        return self._limit is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        # Or a body waits for its head's acknowledgement, 40 ms. asyncio does so by itself, but not
        # where the listening socket leaves its protocol to the system, as Python's do.
        transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, unless the request is whole by now."""
        self._arrived += len(data)
        super().data_received(data)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_request(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._limit is None:
            self._arrived = 0
            self._limit = self.loop.call_later(REQUEST_SECONDS, self._end_or_wait)

    def _end_or_wait(self) -> None:
        """Close, unless a body is on its way, or is held up by us."""
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
