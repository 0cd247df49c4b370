"""The connection of a command to its server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.client import Client


def connect() -> "Client":
    """Return a client of the server of the environment or of `halfstep login`.

    Its module, with HTTP, is loaded only now: --help and what is typed wrongly do without.
    """
    from halfstep.client import Client

    return Client()
