"""Middleware: security headers, known host names, HEAD, and the size of request bodies."""

import ipaddress
import re
import secrets
import socket
from json import detect_encoding
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.media_types import is_json
from db.settings import Settings
from halfstep import protocol

#: Far above any configuration, which is a few kB.
BODY_BYTES = 1 << 20
#: Limit of nested objects and lists; configurations have their own limit.
JSON_DEPTH = 32
#: Brackets, and strings with brackets that do not count. Possessive, so without backtracking.
_NESTING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
#: Hash of an empty style sheet, which Plotly creates for its rules.
EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
_IMAGES = re.compile(r"/api/v1/(?:(?:runs|reports)/\d{1,10}|projects)/images")
#: HSTS for a year.
HSTS = "max-age=31536000"
#: Largest piece of a watched run's spool or files.
PIECE_BYTES = 32 << 20
PIECES = ("/api/v1/ingest/", "/api/v1/artifact-versions/")
#: Limit of the list of an artifact's files.
MANIFEST_BYTES = 8 << 20

#: Largest image of a note or a report.
IMAGE_BYTES = 4 << 20

#: Path of read-only links. The page that posts a link's secret needs a Referer, for the check of
#: its origin; the pages below it send none.
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
            "media-src 'self'",  # sounds and videos that a script logged
            "frame-src 'self'",  # its documents
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )


class SecurityHeaders:
    """Middleware that sets security headers, and the nonce of the response in request.state."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        scope.setdefault("state", {})["nonce"] = nonce

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # Responses with files of recipes set a stricter policy.
                headers.setdefault("Content-Security-Policy", content_security_policy(nonce))
                headers["X-Content-Type-Options"] = "nosniff"
                headers[protocol.HEADER] = str(protocol.PROTOCOL)
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
    """Middleware that answers HEAD like GET without the body, for routes without their own HEAD.

    Not for streams, which never end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
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
    """Middleware that rejects requests with unknown host names, against DNS rebinding.

    Numeric addresses are always accepted: they cannot be made to resolve to something else.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        configured = (name.strip() for name in settings.host_names.split(","))
        public = urlsplit(settings.public_url).hostname or ""
        names = ("localhost", settings.host, socket.gethostname(), public, *configured)
        self.names = {name.lower() for name in names if name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; 400 for an unknown host name."""
        if scope["type"] == "http" and not self.knows(Headers(scope=scope).get("host", "")):
            text = "Unknown host name. Add it to HALFSTEP_HOST_NAMES."
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
    """Middleware that rejects too large bodies with 413, by declared or actual length.

    The error is raised where the body is read, so that pages and API format it as usual.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "PUT" and scope["path"].startswith("/api/v1/uploads/"):
            await self.app(scope, receive, send)  # streamed to disk, see app.files.weight_uploads
            return
        is_piece = scope["method"] == "PUT" and scope["path"].startswith(PIECES)
        is_manifest = (scope["method"], scope["path"]) == ("POST", "/api/v1/artifacts")
        is_image = scope["method"] == "POST" and _IMAGES.fullmatch(scope["path"])
        most = PIECE_BYTES if is_piece else MANIFEST_BYTES if is_manifest else BODY_BYTES
        most = IMAGE_BYTES if is_image else most
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        is_too_large = declared.isdecimal() and (len(declared) > 18 or int(declared) > most)
        is_checked, text, received = is_json(headers) and not is_piece, bytearray(), 0

        async def receive_within_limit() -> Message:
            nonlocal received
            message: Message = {} if is_too_large else await receive()
            received += len(message.get("body", b""))
            if is_too_large or received > most:
                detail = f"The request is too large; allowed: at most {most:,} bytes."
                raise HTTPException(413, detail)
            if is_checked:
                text.extend(message.get("body", b""))
                if not detect_encoding(bytes(text[:4])).startswith("utf-8"):
                    # Bytes of another encoding could hide brackets from the limit of nesting.
                    raise HTTPException(415, "The JSON is not in UTF-8, the allowed encoding.")
                if not message.get("more_body") and await run_in_threadpool(is_deep, text):
                    detail = f"The JSON is nested too deeply; allowed: {JSON_DEPTH} levels."
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
