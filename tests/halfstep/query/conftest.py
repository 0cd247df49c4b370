"""A real server with a run that was recorded."""

from tests.halfstep.api_client.conftest import client, recorded

__all__ = ["client", "recorded"]
