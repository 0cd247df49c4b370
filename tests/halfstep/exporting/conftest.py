"""A real server with a run that was recorded."""

from tests.halfstep.api_client.test_series import client, recorded
from tests.halfstep.conftest import address, offered, running, settings, stranger
from tests.halfstep.test_client import token

__all__ = ["address", "client", "offered", "recorded", "running", "settings", "stranger", "token"]
