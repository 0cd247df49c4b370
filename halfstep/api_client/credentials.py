"""Which server, and who one is there: by argument, by environment, or as `halfstep login` has it.

A stored token is for the server that it was stored with, and no other gets to see it.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Credentials(NamedTuple):
    """Of one server. Its address has no slash at its end.

    origin: where the token stands, a file or a variable, for messages; "" of an argument.
    """

    url: str
    token: str
    origin: str = ""


class Unreadable(ValueError):
    """What was told or stored cannot be used; the message names the variable or the file."""


def known(
    url: str | None = None, token: str | None = None, *, otherwise: str | None = None
) -> Credentials | None:
    """Return server and token: as told, else by the environment, else as they were stored.

    otherwise: the server if nothing names one.  None if either is not known. Raises Unreadable.
    """
    named, origin = "url" if url else "HALFSTEP_URL", "" if token else "HALFSTEP_TOKEN"
    url = url or os.environ.get("HALFSTEP_URL")
    token = token or os.environ.get("HALFSTEP_TOKEN")
    stored = None if url and token else read()
    if stored and (not url or url.rstrip("/") == stored.url):
        named = named if url else stored.origin
        origin = origin if token else stored.origin
        url, token = stored.url, token or stored.token
    url = url or otherwise
    if not url or not token:
        return None
    if not is_address(url):
        raise Unreadable(f"{named} is {url!r}; allowed: http://… or https://…")
    if wrong := flaw(token):
        raise Unreadable(f"{origin or 'token'}: {wrong}")
    return Credentials(url.rstrip("/"), token, origin)


def is_address(url: str) -> bool:
    """Tell whether a server can have this address."""
    try:
        parts = urlsplit(url)
        named = (parts.hostname or "").encode("idna")  # as whoever connects will
        is_written = url.isprintable() and " " not in url  # urlsplit passes line breaks over
        return is_written and parts.scheme in ("http", "https") and bool(named) and parts.port != 0
    except ValueError:  # of a port that is no number, or a host with two dots, say
        return False


def flaw(token: str) -> str | None:
    """Say what no token has, without telling the token; None if nothing is wrong."""
    wrong = [each for each in token if not "!" <= each <= "~"]
    return f"the token has the character {wrong[0]!r}; allowed: ASCII, no blanks" if wrong else None


def store(credentials: Credentials) -> Path:
    """Keep them in a file that its user alone can read; return where."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as written:  # noqa: PTH123 - of a descriptor, for its mode
        json.dump({"url": credentials.url, "token": credentials.token}, written)
    return temporary.replace(path)


def read() -> Credentials | None:
    """Return what was stored, None if nothing was. Raises Unreadable."""
    try:
        stored = json.loads(place().read_text())
        url, token = stored["url"], stored["token"]
        if not isinstance(url, str) or not isinstance(token, str):
            raise TypeError
        return Credentials(url, token, str(place()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unreadable(f"{place()} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{place()} is damaged; `halfstep login` writes it anew") from error


def place() -> Path:
    """Return where they are kept: under the user's folder of configurations."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "halfstep" / "login.json"
