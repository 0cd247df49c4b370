"""Servers that run on this machine, found by scripts of the same user without a token.

`halfstep up` writes a file per data folder into the user's state folder, readable only by the user:
the server's URL, and a token for watched runs, artifacts and sweeps of agents. The server holds a
lock while it runs, which the kernel releases if it is killed.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halfstep import process
from halfstep.api_client.credentials import Credentials, write_private
from halfstep.telemetry.folder_lock import FolderLock

URL = "http://127.0.0.1:8000"
TRIES, TRY_SECONDS = 20, 0.05  # after them another server of this folder holds the lock


@contextmanager
def announce(data: Path, url: str, token: str) -> Iterator[None]:
    """Let scripts find the server of a data folder while it runs. Raises OSError."""
    path = _file(data)
    write_private(path, {"url": url, "token": token, "machine": process.pid_space()})
    lock = FolderLock(path.with_suffix(".lock"))
    for _ in range(TRIES):  # a script that looks for servers shares it for a moment
        if lock.acquire():
            break
        time.sleep(TRY_SECONDS)
    try:
        yield
    finally:
        lock.release()


def token_of(data: Path) -> str | None:
    """Return the token that was last announced for a data folder, so that it can be reused."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(_file(data).read_text())["token"])
    return None


def running(data: Path | None = None) -> Credentials | None:
    """Return URL and token of the server that started last; None if none runs.

    data: only the server of this data folder.
    """
    found = []
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        pattern = _file(data).name if data else "*.json"
        found = sorted(folder().glob(pattern), key=lambda path: -path.stat().st_mtime)
    for path in found:
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (
                path.stat().st_uid == os.getuid()
                and FolderLock(path.with_suffix(".lock")).is_held()
            ):
                known = json.loads(path.read_text())
                # Machines and containers can share a home folder.
                if known["machine"] == process.pid_space():
                    return Credentials(known["url"], known["token"], str(path))
    return None


def default_url() -> str:
    """Return the URL of the server that started last on this machine, or where one usually is."""
    server = running()
    return server.url if server else URL


def folder() -> Path:
    """Return the folder of the files, in the user's state folder."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "halfstep" / "servers"


def _file(data: Path) -> Path:
    name = hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:16]
    return folder() / f"{name}.json"
