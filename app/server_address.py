"""Where the server of a data folder listens, for commands that are typed beside it.

A server that was killed leaves its file, which is not believed: the lock on it went with it.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from db.settings import Settings


@contextmanager
def telling(settings: Settings) -> Iterator[None]:
    """Keep in the data folder where this server listens, for as long as it does."""
    with _file(settings).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another server of this folder has told its own; or no file has locks here
            yield
            return
        file.truncate(0)
        file.write(json.dumps({"host": settings.host, "port": settings.port}))
        file.flush()
        try:
            yield
        finally:
            _file(settings).unlink(missing_ok=True)


def where(settings: Settings) -> tuple[str, int]:
    """Return host and port: as they were set, else those of the server that runs now."""
    running = _running(settings)
    for name in settings.model_fields_set & running.keys():
        del running[name]
    return running.get("host", settings.host), running.get("port", settings.port)


def _running(settings: Settings) -> dict[str, Any]:
    try:
        with _file(settings).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(OSError, ValueError):  # it has just begun to write, or ended
            return dict(json.loads(_file(settings).read_text()))
    except OSError:  # there is none
        pass
    return {}


def _file(settings: Settings) -> Path:
    return settings.data / "server.json"
