"""The connection of a command to its server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.client import Client


def connect() -> "Client":
    """Return a client of the server of the environment or of `halfstep login`.

    Imports the HTTP client only now: --help and usage errors do not need it.
    """
    from halfstep.client import Client

    return Client()
