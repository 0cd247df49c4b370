"""A real server with a run that was recorded."""

from tests.halfstep.conftest import address, offered, running, settings, stranger
from tests.halfstep.test_client import token
from tests.halfstep.test_series import client, recorded

__all__ = ["address", "client", "offered", "recorded", "running", "settings", "stranger", "token"]
