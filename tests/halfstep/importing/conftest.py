"""A real server that runs are imported into."""

from tests.halfstep.conftest import address, settings, stranger

__all__ = ["address", "settings", "stranger"]
