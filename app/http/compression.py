"""Answers of the API as small as they can be: nothing if it is known already, else compressed."""

import gzip
import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Less than a packet is not worth it.
LEAST_BYTES = 1000
#: Of numbers a higher one saves a tenth more, for three times as long.
LEVEL = 1


class Compact:
    """Adds an ETag to what GET answers as JSON, and compresses it; streams and files go by."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        asked, start = Headers(scope=scope), None

        async def send_compact(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is not None:
                is_whole = not message.get("more_body", False)
                body = _compact(asked, start, message.get("body", b"")) if is_whole else None
                message = message if body is None else {**message, "body": body}
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, send_compact)


def _is_json(message: Message) -> bool:
    headers = Headers(raw=message["headers"])
    is_plain = "etag" not in headers and "content-encoding" not in headers
    return (
        message["status"] == 200 and is_plain and headers.get("content-type") == "application/json"
    )


def _compact(asked: Headers, start: Message, body: bytes) -> bytes:
    """Return the body to send, and bring the status and the headers in line with it."""
    headers = MutableHeaders(raw=start["headers"])
    # Weak: it is of what is said, compressed or not.
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers["ETag"] = etag
    headers["Cache-Control"] = "private, no-cache"
    headers.add_vary_header("Accept-Encoding")
    if etag in map(str.strip, asked.get("if-none-match", "").split(",")):
        start["status"] = 304
        del headers["content-length"]
        body = b""
    elif len(body) >= LEAST_BYTES and "gzip" in asked.get("accept-encoding", ""):
        body = gzip.compress(body, LEVEL)
        headers["Content-Encoding"] = "gzip"
        headers["Content-Length"] = str(len(body))
    start["headers"] = headers.raw
    return body
