"""Which server, and who one is there: by argument, by environment, or as `halfstep login` has it.

A stored token is for the server that it was stored with, and no other gets to see it.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple


class Credentials(NamedTuple):
    """Of one server. Its address has no slash at its end."""

    url: str
    token: str


class Unreadable(ValueError):
    """The file of `halfstep login` is none of ours; the message names it."""


def known(
    url: str | None = None, token: str | None = None, *, otherwise: str | None = None
) -> Credentials | None:
    """Return server and token: as told, else by the environment, else as they were stored.

    otherwise: the server if nothing names one.  None if either is not known. Raises Unreadable.
    """
    url = url or os.environ.get("HALFSTEP_URL")
    token = token or os.environ.get("HALFSTEP_TOKEN")
    stored = None if url and token else read()
    if stored and (not url or url.rstrip("/") == stored.url):
        url, token = stored.url, token or stored.token
    url = url or otherwise
    return Credentials(url.rstrip("/"), token) if url and token else None


def store(credentials: Credentials) -> Path:
    """Keep them in a file that its user alone can read; return where."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as written:  # noqa: PTH123 - of a descriptor, for its mode
        json.dump(credentials._asdict(), written)
    return temporary.replace(path)


def read() -> Credentials | None:
    """Return what was stored, None if nothing was. Raises Unreadable."""
    try:
        stored = json.loads(place().read_text())
        return Credentials(stored["url"], stored["token"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{place()} is damaged; `halfstep login` writes it anew") from error


def place() -> Path:
    """Return where they are kept: under the user's folder of configurations."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "halfstep" / "login.json"
