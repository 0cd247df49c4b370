"""Middleware: security headers, known host names, HEAD, and the size of request bodies."""

import ipaddress
import re
import secrets
import socket
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from db.settings import Settings

#: Far above any configuration, which is a few kB.
BODY_BYTES = 1 << 20
#: Objects and lists within each other; configurations have a limit of their own.
JSON_DEPTH = 32
#: Brackets, and texts, whose brackets do not count. Without backtracking, whatever is sent.
_NESTING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
#: The hash of an empty style sheet, as Plotly makes one to put rules into.
EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
#: HSTS for a year.
HSTS = "max-age=31536000"
#: Largest piece of a watched run's spool or files.
PIECE_BYTES = 32 << 20

#: Where read-only links lead. The page that posts a link's secret has to say where it comes from,
#: which it could not without any Referer; those that it leads to need not.
SHARED = "/shared"


def content_security_policy(nonce: str) -> str:
    """Return the policy that allows only content of this server. nonce: of the import map."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}'",
            f"style-src-elem 'self' {EMPTY_STYLE}",
            "style-src-attr 'unsafe-inline'",  # Plotly sets styles on its elements
            "img-src 'self' data: blob:",  # Plotly's picture of a chart
            "connect-src 'self'",
            "media-src 'self'",  # sounds that a script logged
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )


class SecurityHeaders:
    """Adds the headers, and sets the nonce of this response in request.state."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        scope.setdefault("state", {})["nonce"] = nonce

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # A file that a recipe made brings a stricter one.
                headers.setdefault("Content-Security-Policy", content_security_policy(nonce))
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "same-origin"
                if scope["path"].startswith(SHARED):
                    headers["X-Robots-Tag"] = "noindex"
                if scope["path"].startswith(f"{SHARED}/"):
                    headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
                if scope["scheme"] == "https":
                    headers["Strict-Transport-Security"] = HSTS
            await send(message)

        await self.app(scope, receive, send_with_headers)


class Heads:
    """Answers HEAD like GET without the body, for routes without HEAD of their own.

    Not for streams, which have no end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if not is_head or scope["path"].endswith(("/download", "/live")):
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, send_head)


class KnownHosts:
    """Refuses requests with unknown host names, against DNS rebinding.

    Numeric addresses are always accepted: they cannot be made to resolve to something else.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        configured = (name.strip() for name in settings.host_names.split(","))
        public = urlsplit(settings.public_url).hostname or ""
        names = ("localhost", settings.host, socket.gethostname(), public, *configured)
        self.names = {name.lower() for name in names if name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        if scope["type"] == "http" and not self.knows(Headers(scope=scope).get("host", "")):
            text = "This server does not go by that name. HALFSTEP_HOST_NAMES adds names to it."
            await PlainTextResponse(text, status_code=400)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def knows(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or _is_address(name)


class BodyLimit:
    """Refuses bodies that are too large with 413, by their declared or actual length.

    The error is raised where the body is read, so that pages and API format it as usual.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count what comes in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "PUT" and scope["path"].startswith("/api/v1/uploads/"):
            await self.app(
                scope, receive, send
            )  # is never in memory as a whole: app.files.weight_uploads
            return
        is_piece = scope["method"] == "PUT" and scope["path"].startswith("/api/v1/ingest/")
        most = PIECE_BYTES if is_piece else BODY_BYTES
        headers = Headers(scope=scope)
        declared, kind = headers.get("content-length", ""), headers.get("content-type", "")
        says_too_much = declared.isdecimal() and (len(declared) > 18 or int(declared) > most)
        is_json, text, received = "json" in kind and not is_piece, bytearray(), 0

        async def receive_within_limit() -> Message:
            nonlocal received
            message: Message = {} if says_too_much else await receive()
            received += len(message.get("body", b""))
            if says_too_much or received > most:
                detail = f"The request is too large; allowed: at most {most:,} bytes."
                raise HTTPException(413, detail)
            if is_json:
                text.extend(message.get("body", b""))
                if not message.get("more_body") and await run_in_threadpool(is_deep, text):
                    detail = f"The JSON is too deep; allowed: {JSON_DEPTH} values in each other."
                    raise HTTPException(413, detail)
            return message

        await self.app(scope, receive_within_limit, send)


def is_deep(text: bytes | bytearray) -> bool:
    """Return whether JSON nests deeper than allowed, before anything recurses into it."""
    depth = 0
    for token in _NESTING.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > JSON_DEPTH:
            return True
    return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
