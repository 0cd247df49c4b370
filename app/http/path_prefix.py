"""Serving below a path prefix, such as https://host/halfstep, set by HALFSTEP_PUBLIC_URL.

Inside the application all paths are without the prefix ("/runs/1"). It is removed from requests,
and added to redirects and cookies here, and to links of pages by `with_prefix`.
"""

import re

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: URL attributes of our templates; escaped texts and values cannot contain such a quote.
_ADDRESS = re.compile(r' (?:href|src|action|formaction|data-api|data-preview)="(?=/(?!/))')
_COOKIE_PATH = re.compile(r"(?i)(; *path=)/")


def with_prefix(html: str, prefix: str) -> str:
    """Add the prefix to the addresses of this server in a page."""
    return _ADDRESS.sub(rf"\g<0>{prefix}", html) if prefix else html


def public_address(request: Request) -> str:
    """Return the public address of this server, by default as the browser sees it."""
    public = request.app.state.settings.public_url.rstrip("/")
    return public or f"{request.url.scheme}://{request.url.netloc}"


class PathPrefix:
    """Middleware that removes the prefix from requests, unless the proxy has, and adds it again."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or not self.prefix:
            await self.app(scope, receive, send)
            return
        if f"{scope['path']}/".startswith(f"{self.prefix}/"):
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self.prefix) or "/",
                "raw_path": scope["raw_path"].removeprefix(self.prefix.encode()) or b"/",
            }

        async def send_with_prefix(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_to(MutableHeaders(scope=message))
            await send(message)

        await self.app(scope, receive, send_with_prefix)

    def _add_to(self, headers: MutableHeaders) -> None:
        location = headers.get("location", "")
        if location.startswith("/") and not location.startswith("//"):
            headers["location"] = self.prefix + location
        if cookies := headers.getlist("set-cookie"):
            del headers["set-cookie"]
            for cookie in cookies:
                headers.append("set-cookie", _COOKIE_PATH.sub(rf"\g<1>{self.prefix}/", cookie))
