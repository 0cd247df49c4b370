"""The address of a data folder's running server, for commands on the same machine.

The file of a killed server is ignored: its lock is gone.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from db.settings import Settings
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


def _running(settings: Settings) -> dict[str, Any]:
    with suppress(OSError, ValueError):  # being written, or just deleted
        if FolderLock(_file(settings)).is_held():
            return dict(json.loads(_file(settings).read_text()))
    return {}


def _file(settings: Settings) -> Path:
    return settings.data / "server.json"
