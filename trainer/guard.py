"""The training's own watch on its lease, for when its supervisor is stopped, stuck or gone astray.

The supervisor writes two moments of the machine's clock into lease-<attempt>.json each time that it
has renewed the lease: when to ask for a checkpoint and an end, and when to be dead.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

LOOK_SECONDS = 0.2


def clock() -> float:
    """Return seconds of a clock that all processes of this machine share and nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lease_path(folder: Path, attempt: int) -> Path:
    """Return where the two moments of an attempt are written."""
    return folder / f"lease-{attempt}.json"


class Guard(threading.Thread):
    """Kills this process when its lease is as good as lost; does nothing without a lease file."""

    def __init__(self, folder: Path, attempt: int) -> None:
        super().__init__(daemon=True)
        self._path = lease_path(folder, attempt)
        self._asks = False

    def asks(self) -> bool:
        """Tell whether it is time to leave a checkpoint and end."""
        return self._asks

    def run(self) -> None:
        """Look again and again, without a glance at the database."""
        while self._path.exists():
            lease = json.loads(self._path.read_text())
            if clock() > lease["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            self._asks = clock() > lease["ask"]
            time.sleep(LOOK_SECONDS)
