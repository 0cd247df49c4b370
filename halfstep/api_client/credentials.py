"""Server URL and token: from arguments, the environment, or `halfstep login`.

A stored token is only sent to the server that it was stored for.
"""

import json
import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Credentials(NamedTuple):
    """URL and token of a server. The URL has no trailing slash."""

    url: str
    token: str
    origin: str = ""  # source of the token, a file or a variable, for messages; "" for an argument


class Unreadable(ValueError):
    """Given or stored credentials are invalid; the message names the variable or file."""


def find(
    url: str | None = None, token: str | None = None, *, otherwise: str | None = None
) -> Credentials | None:
    """Return URL and token from the arguments, else the environment, else the stored login.

    otherwise: default URL.  None if URL or token is unknown. Raises Unreadable.
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


def is_local(url: str) -> bool:
    """Return whether a URL's host is this machine, to which no proxy of the environment leads."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(url: str) -> bool:
    """Return whether this is a valid server URL."""
    try:
        parts = urlsplit(url)
        named = (parts.hostname or "").encode("idna")  # encoded as for a connection
        is_written = url.isprintable() and " " not in url  # urlsplit drops line breaks
        return is_written and parts.scheme in ("http", "https") and bool(named) and parts.port != 0
    except ValueError:  # e.g. an invalid port, or a host with two dots
        return False


def flaw(token: str) -> str | None:
    """Return why a token is invalid, without showing the token; None if it is valid."""
    wrong = [character for character in token if not "!" <= character <= "~"]
    return (
        f"the token has the character {wrong[0]!r}; allowed: ASCII without spaces"
        if wrong
        else None
    )


def store(credentials: Credentials) -> Path:
    """Store credentials in a file readable only by the user; return its path."""
    return write_private(place(), {"url": credentials.url, "token": credentials.token})


def write_private(path: Path, content: Mapping[str, str | None]) -> Path:
    """Replace a JSON file that only the user may read; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as written:  # noqa: PTH123 - of a descriptor, for its mode
        json.dump(content, written)
    return temporary.replace(path)


def read() -> Credentials | None:
    """Return the stored credentials, None if there are none. Raises Unreadable."""
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
        raise Unreadable(f"{place()} is damaged; `halfstep login` writes it again") from error


def place() -> Path:
    """Return the path of the stored credentials, in the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "halfstep" / "login.json"
