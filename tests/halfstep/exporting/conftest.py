"""A real server with a recorded run."""

from tests.halfstep.api_client.conftest import client, recorded

__all__ = ["client", "recorded"]
