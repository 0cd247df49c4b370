"""The address of a data folder's running server, for commands on the same machine.

The file of a killed server is ignored: its lock is gone.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from db.errors import Conflict
from db.settings import Settings
from halfstep.api_client.credentials import is_local
from halfstep.telemetry.folder_lock import FolderLock


@contextmanager
def publish_address(settings: Settings) -> Iterator[None]:
    """Write this server's address to the data folder while it runs."""
    lock = FolderLock(_file(settings))
    if not lock.acquire():  # another server of this folder has written its own
        yield
        return
    try:
        _file(settings).write_text(json.dumps({"host": settings.host, "port": settings.port}))
        yield
    finally:
        _file(settings).unlink(missing_ok=True)
        lock.release()


def running_address(settings: Settings) -> tuple[str, int]:
    """Return host and port: as configured, else those of the running server."""
    running = _running(settings)
    for name in settings.model_fields_set & running.keys():
        del running[name]
    return running.get("host", settings.host), running.get("port", settings.port)


def check_unused(settings: Settings) -> None:
    """Check that no server runs on the data folder. Raises Conflict with its address."""
    if running := _running(settings):
        place = f"{settings.data}, at {url_of(**running)}"
        advice = "`halfstep link NAME` prints a link. Stop it, or set HALFSTEP_DATA to another"
        raise Conflict(f"Halfstep already runs on {place}: {advice} folder.")


def url_of(host: str, port: int) -> str:
    """Return the URL on this machine of a server that binds to a host and a port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def explain_local(url: str) -> str:
    """Explain why a link opens only on the server's machine; empty if others may open it."""
    if not is_local(url):
        return ""
    return (
        f"Links to {urlsplit(url).hostname} open only on this machine: for others, set "
        "HALFSTEP_PUBLIC_URL to an address of this server that they reach."
    )


def _running(settings: Settings) -> dict[str, Any]:
    with suppress(OSError, ValueError):  # being written, or just deleted
        if FolderLock(_file(settings)).is_held():
            return dict(json.loads(_file(settings).read_text()))
    return {}


def _file(settings: Settings) -> Path:
    return settings.data / "server.json"
