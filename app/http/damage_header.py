"""Header of responses from which damaged steps or points are left out."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from db.telemetry import damage
from halfstep.protocol import DAMAGED

MOST_CHARACTERS = 1000


class DamageHeader:
    """Middleware that names what a request's readers could not read, in the header DAMAGED."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and (text := damage.describe_collected()):
                # A name may have any character; proxies refuse headers of several kilobytes.
                value = text.encode("unicode_escape").decode("ascii")
                more = "..." if len(value) > MOST_CHARACTERS else ""
                MutableHeaders(scope=message)[DAMAGED] = value[:MOST_CHARACTERS] + more
            await send(message)

        with damage.collect():
            await self.app(scope, receive, send_named)
