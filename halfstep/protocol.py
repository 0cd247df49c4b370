"""Version and protocol number, which processes of Halfstep exchange.

PROTOCOL is raised when a process of the version before can no longer work with this one: by other
settings of runs, other messages of the ingest API, or other state in files. 0.1.0 has none.
"""

from collections.abc import Mapping
from typing import Any

from halfstep.version import __version__

PROTOCOL = 1
#: What a worker registers.
VERSIONS = {"halfstep": __version__, "protocol": str(PROTOCOL)}
#: Header of a server's responses, with its protocol number.
HEADER = "Halfstep-Protocol"
#: Header of a server's responses that lack damaged steps or points, with a sentence on them.
DAMAGED = "Halfstep-Damaged"
OLDER_SERVER = (
    f"The server is older than this client, Halfstep {__version__}: update the server, or install "
    "its version here."
)


def is_current(versions: Mapping[str, Any]) -> bool:
    """Return whether a process that registered these versions has this one."""
    return all(versions.get(name) == value for name, value in VERSIONS.items())


class LastServer:
    """Facts about the server that responded last to this process."""

    is_older = False


def is_older(header: str | None) -> bool:
    """Return whether a server is too old for this client. header: of one of its responses."""
    return header is None or not header.isdecimal() or int(header) < PROTOCOL
