"""A real server for the client, as the server's own tests have it."""

from tests.app.conftest import address, offered, running, settings

__all__ = ["address", "offered", "running", "settings"]
