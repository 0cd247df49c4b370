"""The web server: uvicorn, which tells open pages that it stops instead of waiting for them."""

import socket

import uvicorn

from app.alerting import Alerting
from app.connections import PatientProtocol
from app.erasing import Eraser
from app.main import create_app
from db.database import Database
from db.settings import Settings

#: Seconds that answers in progress, such as downloads, get to finish when the server stops.
GRACE_SECONDS = 3


class Server(uvicorn.Server):
    """Serves until it is told to stop."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.app = create_app(settings, database)
        self.eraser = Eraser(settings, database)
        self.alerting = Alerting(settings, database)
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,  # addresses may hold a sign-in token
            http=PatientProtocol,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; beside it erase what is due, and tell of alerts."""
        with self.eraser, self.alerting:
            super().run(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the live streams first: uvicorn would wait for them until its time is up."""
        self.app.state.live.close()
        await super().shutdown(sockets)
