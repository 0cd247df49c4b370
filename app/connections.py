"""A connection that waits for nothing: one on which no whole request comes in time is closed.

uvicorn's own time limit begins after an answer, so somebody who connects and says nothing, or half
of something, would stay for ever and take a file descriptor with him.
"""

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.in_flight import ABORT

#: From the first sign of somebody to the last byte of what he asks; a body has a megabyte at most.
REQUEST_SECONDS = 30.0


class PatientProtocol(H11Protocol):
    """HTTP, with a time limit on each request's arrival. An answer may take as long as it likes,
    and may be broken off.
    """

    _limit: asyncio.TimerHandle | None = None

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
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, unless the request is whole by now."""
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
            self._limit = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
